"""The extension codes of objects in msgpack. They are a part of the format: no code is ever used for something else."""

from __future__ import annotations

# Containers.
TUPLE, DICT, ORDERED_DICT, SET, FROZENSET = 1, 2, 3, 4, 5
TREE = 6  # a container of objects that has a node, as its tree

# Other builtin types.
INT, COMPLEX, BYTEARRAY, RANGE, SLICE, ELLIPSIS = 10, 11, 12, 13, 14, 15

NUMPY_SCALAR, NUMPY_ARRAY = 20, 21
TORCH_SIZE, TORCH_CONSTANT, TORCH_DEVICE = 30, 31, 32

# Of the standard library.
DATETIME, DATE, TIME, TIMEDELTA, TIMEZONE = 40, 41, 42, 43, 44
PATH, DECIMAL, FRACTION, UUID, ENUM_MEMBER = 45, 46, 47, 48, 49

PICKLE = 100
