"""Program that is killed while it writes a directory again.

Arguments: the directory, and where: "write", "exchange" or "replace".
"""

import os
import pathlib
import signal
import sys

from keras_softmoe import files
from keras_softmoe.files import placing

if sys.argv[2] == "exchange":
    placing._rename_both = lambda *paths: False
    rename = pathlib.Path.rename

    def killed(self, target):
        if self.name == "new":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    pathlib.Path.rename = killed
if sys.argv[2] == "replace":
    placing._is_plain = lambda *paths: False
    move, moved = placing.move, []

    def killed(file, path):
        if moved:
            os.kill(os.getpid(), signal.SIGKILL)
        moved.append(path)
        move(file, path)

    placing.move = killed
with files.atomic_directory(sys.argv[1], ["*.json"]) as aside:
    (aside / "config.json").write_text("second")
    if sys.argv[2] == "replace":
        (aside / "assets.json").write_text("second")
    if sys.argv[2] == "write":
        os.kill(os.getpid(), signal.SIGKILL)
