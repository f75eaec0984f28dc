"""The C library: how its functions are bound, and those by which processes wait for each other.

`bind` makes a Python function of a function in C; `files.py` and `mappings.py` beside this use it too. Below are
futexes, mutexes that are robust and shared by processes, and the signal that ends a process with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import sys
import threading
import time
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


# --- futexes ---------------------------------------------------------------------------------------------------------


_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
MUTEX_OWNER = 0x3FFFFFFF  # mask of the owner's thread id in a mutex's first word
MUTEX_SIZE = 64  # sizeof(pthread_mutex_t) is 40 on x86-64 and 48 on aarch64
HELD, OWNER_DIED, TIMED_OUT = 0, errno.EOWNERDEAD, errno.ETIMEDOUT
_SLICE = 0.2  # seconds
_SPINS = 40  # some 10 us

_syscall = bind(
    releasing_gil, "syscall", Long, Long, Pointer, Int, ctypes.c_uint32, ctypes.POINTER(Timespec), Pointer, Int
)
_syscall_of_longs = bind(holding_gil, "syscall", Long, Long, Long, Long, Long)
_mutexattr_init = bind(holding_gil, "pthread_mutexattr_init", Int, Pointer)
_mutexattr_setpshared = bind(holding_gil, "pthread_mutexattr_setpshared", Int, Pointer, Int)
_mutexattr_setrobust = bind(holding_gil, "pthread_mutexattr_setrobust", Int, Pointer, Int)
_mutex_init = bind(holding_gil, "pthread_mutex_init", Int, Pointer, Pointer)
_mutex_trylock = bind(holding_gil, "pthread_mutex_trylock", Int, Pointer)
_mutex_clocklock = bind(releasing_gil, "pthread_mutex_clocklock", Int, Pointer, Int, ctypes.POINTER(Timespec))


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleeps while the word is `expected`; also returns on a wake, a signal, and after `seconds`."""
    limit = timespec(seconds)
    if _syscall(
        _SYS_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0
    ) and ctypes.get_errno() not in (
        errno.EAGAIN,
        errno.EINTR,
        errno.ETIMEDOUT,
    ):
        raise last_error()


def futex_wake(address: int) -> int:
    """Wakes all that wait on the word; returns how many."""
    return _syscall_of_longs(_SYS_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF)


# --- robust, process-shared mutexes -----------------------------------------------------------------------------------


def mutex_create(address: int) -> None:
    attributes = (ctypes.c_char * 64)()
    where = ctypes.addressof(attributes)
    for code in (
        _mutexattr_init(where),
        _mutexattr_setpshared(where, 1),
        _mutexattr_setrobust(where, 1),
        _mutex_init(address, where),
    ):
        if code:
            raise OSError(code, os.strerror(code))


def mutex_lock(address: int, deadline: float) -> int:
    """Returns HELD, OWNER_DIED (held too: recover, then `mutex_recovered`) or TIMED_OUT. `deadline` is monotonic."""
    code = _mutex_trylock(address)
    if code == HELD:
        return code
    for _ in range(_SPINS):  # holds are short: to sleep and be woken takes longer than most of them
        if code != errno.EBUSY:
            break
        code = _mutex_trylock(address)
    while code == errno.EBUSY:
        # In slices, so that a signal's handler runs before the deadline: the C call is not interrupted by it.
        until = min(max(deadline, 0.0), time.monotonic() + _SLICE)
        code = _mutex_clocklock(address, time.CLOCK_MONOTONIC, ctypes.byref(timespec(until)))
        if code == TIMED_OUT and until < deadline:
            code = errno.EBUSY
    if code not in (HELD, OWNER_DIED, TIMED_OUT):
        raise OSError(code, os.strerror(code))
    return code


# Called from `finally`: as plain C functions no signal handler can run between the call and its effect.
mutex_unlock = bind(holding_gil, "pthread_mutex_unlock", Int, Pointer)
mutex_recovered = bind(holding_gil, "pthread_mutex_consistent", Int, Pointer)  # EINVAL where its owner didn't die
thread_id = threading.get_native_id


# --- processes that end together -------------------------------------------------------------------------------------


_PR_SET_PDEATHSIG = 1

_prctl = bind(holding_gil, "prctl", Int, Int, Long, Long, Long, Long)


def die_with_parent(parent: int) -> bool:
    """Asks the kernel to kill this process when the thread that started it ends.

    Args:
        parent: the pid of who started it.

    Returns: False if that one has ended already, so that nobody will be told: end then.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise last_error()
    return os.getppid() == parent
