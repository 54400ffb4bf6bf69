"""Program that is killed while it writes a directory again.

Arguments: the directory, and where: "write" or "replace".
"""

import os
import signal
import sys

from keras_softmoe import files

move, moved = files.move, []


def killed(file, path):
    if moved:
        os.kill(os.getpid(), signal.SIGKILL)
    moved.append(path)
    move(file, path)


files.move = killed
with files.atomic_directory(sys.argv[1], ["*.json"]) as aside:
    for name in ("assets.json", "config.json"):
        (aside / name).write_text("second")
    if sys.argv[2] == "write":
        os.kill(os.getpid(), signal.SIGKILL)
