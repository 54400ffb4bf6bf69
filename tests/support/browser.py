"""A headless Chromium that tells what a page asks for and complains of."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)

# What it would ask for by itself, before it has seen a page.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
# It reads commands from file 3 and writes answers to file 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_ALL_DRAWN = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"


class Browser:
    """Speaks Chromium's DevTools protocol through two pipes."""

    def __init__(self, commands, answers):
        self.commands, self.answers = commands, answers
        self.number = 0
        # What happened since the last page was opened.
        self.events = []

    def ask(self, method, session=None, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path):
        """Load a file.

        Returns: dict of `"requests"` (URLs that are neither data nor the page itself),
        `"complaints"` (what it wrote to the console) and `"drawn"` (whether all images
        were).
        """
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        session = session["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable", session)
        self.events.clear()
        url = path.absolute().as_uri()
        self.ask("Page.navigate", session, url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())
        drawn = self.ask("Runtime.evaluate", session, expression=_ALL_DRAWN)
        requests, complaints = [], []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                requests.append(params["request"]["url"])
            elif method in (
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
            ):
                complaints.append(params)
        self.ask("Target.closeTarget", targetId=target)
        return {
            "requests": [r for r in requests if r != url and not r.startswith("data:")],
            "complaints": complaints,
            "drawn": drawn["result"]["value"],
        }

    def _next(self):
        message = bytearray()
        while (letter := self.answers.read(1)) != b"\0":
            assert letter, "Chromium has ended"
            message += letter
        return json.loads(message)


@contextlib.contextmanager
def browser():
    """Start Chromium, yield a `Browser` and end it."""
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    # Out of the way of the numbers that they shall get.
    theirs = [fcntl.fcntl(x, fcntl.F_DUPFD, 10) for x in (read_commands, write_answers)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START),
                *map(str, theirs),
                *(CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"),
            ],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in (read_commands, write_answers, *theirs):
            os.close(number)
        try:
            with open(commands, "wb") as commands, open(answers, "rb") as answers:
                yield Browser(commands, answers)
        finally:
            process.terminate()
            process.wait()
