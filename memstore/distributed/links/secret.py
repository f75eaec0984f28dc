"""The secret that the hosts of a cluster share: a file, which MEMSTORE_SECRET_FILE names."""

from __future__ import annotations

import os
import stat

from memstore.engine import syscalls
from memstore.errors import SecretError

VARIABLE = "MEMSTORE_SECRET_FILE"
SHORTEST = 32  # bytes
LONGEST = 4096


def read_secret(path: str | None = None) -> bytes | None:
    """Reads the secret. All of the file's bytes count, a line's end too.

    Args:
        path: its file; None: the one that the environment's MEMSTORE_SECRET_FILE names.

    Returns: 32 to 4,096 bytes; None if no file is named.

    Raises:
        SecretError: the file is missing, too short or too long, another user's, or open to others.
    """
    path = path or os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        fd = syscalls.open_file(os.path.realpath(path), os.O_RDONLY)  # links are common where secrets are mounted
        try:
            _check_mode(path, syscalls.status(fd))
            secret = syscalls.read_at(fd, LONGEST + 1, 0)
        finally:
            syscalls.close(fd)
    except OSError as error:
        raise SecretError(f"the secret {path!r} can't be read: {error.strerror}; {_ADVICE}") from error
    if not SHORTEST <= len(secret) <= LONGEST:
        size = len(secret) if len(secret) <= LONGEST else f"more than {LONGEST}"
        raise SecretError(f"the secret {path!r} has {size} bytes, and needs {SHORTEST} to {LONGEST}; {_ADVICE}")
    return secret


_ADVICE = "make it once with `(umask 077; head -c 32 /dev/urandom > FILE)`, and copy it to each host"


def _check_mode(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SecretError(f"the secret {path!r} is no regular file; {_ADVICE}")
    if found.st_uid != os.geteuid():
        raise SecretError(
            f"the secret {path!r} belongs to user {found.st_uid}, and this process runs as {os.geteuid()}; "
            "it must be one's own"
        )
    if found.st_mode & 0o077:
        raise SecretError(
            f"the secret {path!r} has mode {stat.S_IMODE(found.st_mode):04o}, so that others may read or change it; "
            f"expected 0600: chmod 600 {path}, and make a new one if others may have seen it"
        )
