"""Writes the safetensors format, well or badly."""

import json

import numpy as np

_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "bfloat16": "BF16"}


def contents(arrays, metadata=None):
    """Header (a dict) and data (bytes) of a file with these arrays."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, array in arrays.items():
        array = np.asarray(array)
        begin, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    return header, data


def file_of(header, data):
    """The bytes of a file. The header is a dict, a str or bytes."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return len(header).to_bytes(8, "little") + header + data


def save(path, arrays, **kwargs):
    path.write_bytes(file_of(*contents(arrays, **kwargs)))
    return path
