"""Program that is killed while it writes a directory again.

Arguments: the directory, and where: "write" or "replace".
"""

import os
import signal
import sys

from keras_softmoe.files import atomic_directory, writing

move, moved = writing.move, []


def killed(file, path):
    if moved:
        os.kill(os.getpid(), signal.SIGKILL)
    moved.append(path)
    move(file, path)


writing.move = killed
with atomic_directory(sys.argv[1], ["*.json"]) as aside:
    for name in ("assets.json", "config.json"):
        (aside / name).write_text("second")
    if sys.argv[2] == "write":
        os.kill(os.getpid(), signal.SIGKILL)
