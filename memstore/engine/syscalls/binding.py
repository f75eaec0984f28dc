"""C functions that Python's own modules don't have, and their errors: ctypes, for the modules beside this one."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

Pointer, Size, Int, Long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long

releasing_gil = ctypes.CDLL(None, use_errno=True)
holding_gil = ctypes.PyDLL(None, use_errno=True)

drain = deque[Any](maxlen=0).extend  # runs an iterator in C


def bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    try:
        function = getattr(library, name)
    except AttributeError:  # macOS: importable, not usable

        def missing(*_: object) -> Any:
            raise OSError(
                errno.ENOSYS, f"memstore needs Linux with glibc 2.30 or later: {name} is missing on {sys.platform}"
            )

        return missing
    function.restype, function.argtypes = result, arguments
    return function


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def timespec(seconds: float) -> Timespec:
    whole = int(seconds)
    return Timespec(whole, int((seconds - whole) * 1e9))
