"""A web server on this machine's loopback address, for files of a folder."""

import contextlib
import http.server
import threading


class Handler(http.server.SimpleHTTPRequestHandler):
    """Sends files.

    Its class attributes are for the tests: what it was asked for, and whether it tells
    more bytes than it sends.
    """

    asked = ()
    cuts = False

    def do_HEAD(self):
        self._answer(with_content=False)

    def do_GET(self):
        self._answer(with_content=True)

    def _answer(self, with_content):
        self.asked.append((self.command, self.path))
        try:
            with open(self.translate_path(self.path), "rb") as file:
                content = file.read()
        except OSError:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content[: len(content) // 2] if self.cuts else content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(folder):
    """Yields the URL of a folder and the class of the server's `Handler`."""
    handler = type("FolderHandler", (Handler,), {"asked": []})

    def make(*args):
        return handler(*args, directory=str(folder))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
