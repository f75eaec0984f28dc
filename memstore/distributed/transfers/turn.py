"""Turns: of the processes of a host that need a value of another host, one fetches it, and the others wait.

Whose turn it is has locked a byte of the store's doorbell file, by the hash of what is fetched. There is nothing to
clean up after a kill: the kernel gives up the lock, and the next one that waits fetches. Nobody is woken: who waits
tries again soon, which takes a microsecond, and looks whether the value is there by now.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator

import xxhash

from memstore.engine import DOORBELL, LockFile, Root, syscalls
from memstore.errors import StoreTimeoutError

_FIRST_WAIT, _LONGEST_WAIT = 0.0005, 0.005  # seconds
_FIRST_BYTE = 1 << 20  # far behind the end of the file


@contextlib.contextmanager
def turn(root: Root, name: bytes, what: str, deadline: float) -> Generator[None]:
    """Waits until no other process or thread of this host has its turn for that name.

    Args:
        what: for the error: what the others do.

    Raises:
        StoreTimeoutError: it is still another's.
    """
    with root.guard:
        file = LockFile(f"{root.state}/{DOORBELL}", os.O_RDWR)
    at = _FIRST_BYTE + (xxhash.xxh3_64_intdigest(name) >> 2)
    try:
        wait = _FIRST_WAIT
        while not syscalls.lock_byte(file.fd, at):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"another process of this host {what}, and was not done within the timeout")
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        try:
            yield
        finally:
            syscalls.unlock_byte(file.fd, at)  # else a subprocess that is being started would keep it, until its exec
    finally:
        file.close()
