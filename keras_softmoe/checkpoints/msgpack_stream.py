"""Reader of msgpack, header by header, for untrusted files."""

import msgpack

# Limits of memory. The library reads names, numbers and small slices; arrays of data
# are skipped or copied piece by piece.
_LARGEST_VALUE = 4096
_BLOCK = 1 << 20

# First byte -> width of the length that follows.
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSION = {0xC7: 1, 0xC8: 2, 0xC9: 4}
# First byte -> length.
_FIXED_EXTENSION = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}


class CheckpointError(ValueError):
    """Error of a checkpoint that is missing, damaged or of another kind.

    Examples:
        >>> try:
        ...     ksm.converters.read_checkpoint("nothing/here")
        ... except ksm.converters.CheckpointError as error:
        ...     print(error)
    """


class Stream:
    """Cursor over one msgpack object in a file.

    `msgpack.Unpacker` bounds the size of single values, but allocates for an array as
    many entries as its header claims, level by level, and loads extension objects as a
    whole. So containers and extension objects are entered by their headers here, and
    the library reads only the values in them. Every step consumes bytes of the file,
    whose size bounds time and memory.

    Args:
        file: binary file that can seek.
        size: int, its length in bytes.
        name: str, its name in errors.
    """

    def __init__(self, file, size, name):
        self._file = file
        self.size = size
        self.name = name
        self.seek(0)

    def seek(self, offset):
        """Move to a byte of the file."""
        self._file.seek(offset)
        self._start = offset
        self._unpacker = msgpack.Unpacker(
            self._file,
            read_size=256,
            max_buffer_size=2 * _LARGEST_VALUE,
            max_str_len=_LARGEST_VALUE,
            max_bin_len=_LARGEST_VALUE,
            max_ext_len=_LARGEST_VALUE,
            max_array_len=0,
            max_map_len=0,
        )

    def tell(self):
        """Return the position of the next byte."""
        return self._start + self._unpacker.tell()

    def error(self, problem):
        """Return a `CheckpointError` with the position and the remedy."""
        return CheckpointError(
            f"{problem}, in '{self.name}' near byte {self.tell()} of {self.size}. The "
            "file is damaged, truncated or no V-MoE checkpoint: fetch it again."
        )

    def map_length(self):
        """Enter a map and return its number of keys."""
        return self._library("read_map_header", "Expected a map")

    def array_length(self, expected=None):
        """Enter an array and return its length, which must be the `expected` one."""
        length = self._library("read_array_header", "Expected an array")
        if expected is not None and length != expected:
            raise self.error(f"Expected an array of {expected}, found {length}")
        return length

    def value(self, kind):
        """Return one value of a type: `str`, `int`, `bool` or `type(None)`."""
        value = self._library("unpack", f"Expected {kind.__name__}")
        if type(value) is not kind:
            raise self.error(f"Expected {kind.__name__}, found {str(value)[:40]!r}")
        return value

    def at_map(self):
        """Return whether the next object is a map."""
        return self._head(1)[0] in _MAPS

    def enter_binary(self):
        """Enter a binary object and return the byte where it ends."""
        head = self._head(5)
        width = _BINARY.get(head[0])
        if width is None:
            raise self.error("Expected binary data")
        return self._enter(1 + width, head[1 : 1 + width])

    def enter_extension(self, code):
        """Enter an extension object of a code and return the byte where it ends."""
        head = self._head(6)
        width = _EXTENSION.get(head[0])
        if width is not None:
            found, length = head[1 + width : 2 + width], head[1 : 1 + width]
            size = 2 + width
        elif head[0] in _FIXED_EXTENSION:
            found, length = head[1:2], bytes([_FIXED_EXTENSION[head[0]]])
            size = 2
        else:
            raise self.error(f"Expected an extension object of type {code}")
        if found != bytes([code]):
            raise self.error(f"Expected an extension object of type {code}")
        return self._enter(size, length)

    def check_end(self, end):
        """Raise unless the position is the byte `end`."""
        if self.tell() != end:
            raise self.error(f"Expected an object to end at byte {end}")

    def copy_to(self, target):
        """Fill a writable memoryview with the next bytes."""
        offset = self.tell()
        self._file.seek(offset)
        position = 0
        while position < len(target):
            block = self._file.read(min(_BLOCK, len(target) - position))
            if not block:
                raise self.error("The file ends in the middle of an array")
            target[position : position + len(block)] = block
            position += len(block)
        self.seek(offset + position)

    def _library(self, method, expectation):
        try:
            return getattr(self._unpacker, method)()
        except (msgpack.UnpackException, ValueError, TypeError) as error:
            reason = str(error)[:80] or type(error).__name__
            raise self.error(f"{expectation} ({reason})") from error

    def _head(self, size):
        """Return up to `size` next bytes, at least one, and keep the position."""
        offset = self.tell()
        self._file.seek(offset)
        head = self._file.read(size)
        self.seek(offset)
        if not head:
            raise self.error("The file ends too early")
        return head

    def _enter(self, header_size, length):
        start = self.tell() + header_size
        end = start + int.from_bytes(length, "big")
        if end > self.size:
            raise self.error(f"An object claims to end at byte {end}")
        self.seek(start)
        return end
