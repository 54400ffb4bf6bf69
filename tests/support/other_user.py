"""Program that writes a directory, twice, as a user who is no superuser.

Argument: the directory, which is also the current one.
"""

# What is imported later, as another user, cannot be read.
import fcntl  # noqa: F401
import os
import sys

from keras_softmoe.files import atomic_directory

if not os.geteuid():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

for content in ("first", "second"):
    with atomic_directory(sys.argv[1], ["*.json"]) as aside:
        (aside / "config.json").write_text(content)
    found = {name: open(name).read() for name in os.listdir()}
    assert found == {"config.json": content}, found
