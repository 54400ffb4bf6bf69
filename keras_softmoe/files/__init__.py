"""Atomic writing of files and directories, and reading beside writers.

New content is written to a temporary directory, from which files are moved into place
when all are complete. If writing fails, the old content is unchanged. What killed
processes leave is completed or removed by the next process that reads or writes there.
"""

from keras_softmoe.files.reading import (
    one_process as one_process,
    read_whole as read_whole,
)
from keras_softmoe.files.writing import (
    WriteError as WriteError,
    atomic_directory as atomic_directory,
    atomic_file as atomic_file,
    check_file as check_file,
    restore_interrupted as restore_interrupted,
    wrap_os_errors as wrap_os_errors,
)
