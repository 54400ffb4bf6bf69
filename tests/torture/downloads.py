"""Presets fetched from a server that is slow, breaks off, or says something else.

The server runs on the loopback address and speaks as much of the protocol of
`hf://` handles as fetching files takes.
"""

import contextlib
import http.server
import itertools
import pathlib
import shutil
import tempfile
import threading
import time

import numpy as np

from keras_softmoe import models
from tests.support import tiny
from tests.support.references import to_numpy

_sleep = time.sleep

HANDLE = "hf://torture/preset"
# What the server does with a file once it is asked for it.
BEHAVIOURS = ("well", "slow", "torn", "short", "other", "error", "missing", "no length")


class _Server(http.server.ThreadingHTTPServer):
    """Serves a folder; one file of it, `victim`, with some behaviour.

    The first `times` answers for that file are bad, later ones good.
    """

    folder = victim = behaviour = None
    times = 0


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        server, file = self.server, pathlib.Path(self.path.partition("?")[0]).name
        path, behaviour = server.folder / file, "well"
        if file == server.victim and server.times > 0:
            behaviour = server.behaviour
            server.times -= with_body or behaviour in ("error", "missing")
        if behaviour == "missing" or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self._end(0)
            return
        if behaviour == "error":
            self.send_response(500)
            self._end(0)
            return
        content = path.read_bytes()
        start = 0
        if with_body and (wanted := self.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            self.send_response(206)
            end = len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{file}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        body = content[start:]
        if behaviour == "other":
            body = b"<html>" + body[6:]
        if behaviour == "no length" and with_body:
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self._end(len(body))
        if not with_body:
            return
        if behaviour in ("torn", "short"):
            with contextlib.suppress(OSError):
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
            self.close_connection = True
        elif behaviour == "slow":
            for place in range(0, len(body), 1 + len(body) // 20):
                self.wfile.write(body[place : place + 1 + len(body) // 20])
                self.wfile.flush()
                _sleep(0.02)
        else:
            self.wfile.write(body)

    def _end(self, length):
        self.send_header("Content-Length", str(length))
        self.end_headers()


@contextlib.contextmanager
def _served(folder, cache):
    """Scope in which handles of `hf://` lead to a server with a folder; yields it."""
    from huggingface_hub import constants

    server = _Server(("127.0.0.1", 0), _Answer)
    server.folder = folder
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    changed = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": template.replace(constants.ENDPOINT, address),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DOWNLOAD_TIMEOUT": 5,
        "HF_HUB_ETAG_TIMEOUT": 5,
    }
    before = {name: getattr(constants, name) for name in changed}
    for name, value in changed.items():
        setattr(constants, name, value)
    # Between two attempts the client waits up to 8 seconds.
    time.sleep = lambda seconds: _sleep(min(seconds, 0.01))
    try:
        yield server
    finally:
        time.sleep = _sleep
        for name, value in before.items():
            setattr(constants, name, value)
        server.shutdown()
        server.server_close()
        thread.join()


def bad_downloads(tally, num_downloads, seed):
    """Load a preset from a server that behaves badly for one file, then well."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = tiny.classifier()
        model.save_to_preset(str(folder / "preset"))
        # As it is done with files that hold weights of several GB
        files = ["config.json", "task.json", "model.weights.h5", "task.weights.h5"]
        expected = [to_numpy(weight) for weight in model.weights]
        rng = np.random.default_rng(seed)
        for number in itertools.count():
            if tally.cases >= num_downloads:
                break
            behaviour = BEHAVIOURS[number % len(BEHAVIOURS)]
            file = files[rng.integers(len(files))]
            cache = folder / f"cache_{number}"
            with _served(folder / "preset", cache) as server:
                server.victim, server.behaviour = file, behaviour
                server.times = int(rng.choice([1, 100]))
                what = f"{file} comes {behaviour}, {server.times} times"
                with tally.case(what, mentions=[HANDLE], seconds=120):
                    _check_equal(_load(), expected)
                refused = sum(tally.refusals.values())
                server.times = 0
                if behaviour != "other":
                    # What was left behind does no harm.
                    with tally.case(f"after {what}", seconds=120):
                        _check_equal(_load(), expected)
                    if sum(tally.refusals.values()) > refused:
                        tally.failures.append(f"downloads: refused after {what}")
            shutil.rmtree(cache, ignore_errors=True)


def _load():
    return models.ViTMoEImageClassifier.from_preset(HANDLE)


def _check_equal(model, expected):
    for weight, value in zip(model.weights, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), value)
