"""Atomic writing of files and directories, and reading beside writers.

New content is written to a temporary directory, which replaces the target when it is
complete. If writing fails, the old content is unchanged. Temporary directories of
killed processes are removed by the next process that writes there.
"""

from keras_softmoe.files.reading import (
    one_process as one_process,
    read_whole as read_whole,
)
from keras_softmoe.files.refusals import (
    WriteError as WriteError,
    wrap_os_errors as wrap_os_errors,
)
from keras_softmoe.files.replacing import (
    atomic_directory as atomic_directory,
    atomic_file as atomic_file,
    check_file as check_file,
    restore_interrupted as restore_interrupted,
)
