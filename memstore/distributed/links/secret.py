"""The secret that the hosts of a cluster share: ROOT/secret, or a file that MEMSTORE_SECRET_FILE names.

ROOT/secret is written by `memstore.serve`, which brings one secret to all hosts. It goes before the environment's: a
process that opens the root needs no environment then, and what other clusters use doesn't get in its way.
"""

from __future__ import annotations

import contextlib
import os
import stat

from memstore.engine import state_folder, syscalls
from memstore.errors import SecretError

VARIABLE = "MEMSTORE_SECRET_FILE"
NAME = "secret"  # in the root
SHORTEST = 32  # bytes
LONGEST = 4096


def secret_of(root: str, *, and_environment: bool = True) -> bytes | None:
    """The secret of a root's cluster: ROOT/secret if there is one, else, unless told otherwise, the environment's.

    Returns, and raises: as `read_secret`.
    """
    path = secret_path(root)
    if os.path.lexists(path):
        return read_secret(path)
    return read_secret() if and_environment else None


def secret_path(root: str) -> str:
    """Of a store on storage that hosts share, it lies in the state folder."""
    return f"{state_folder(root)}/{NAME}"


def write_secret(root: str, secret: bytes) -> None:
    """Makes ROOT/secret, mode 0600, whole or not at all. Raises SecretError: it is too short or too long."""
    check_size(secret, "that was given")
    path = secret_path(root)
    temporary = f"{path}.{os.getpid()}.new"
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(temporary)
    fd = syscalls.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        syscalls.write_at(fd, secret, 0)
        syscalls.sync(fd)
    finally:
        syscalls.close(fd)
    syscalls.rename(temporary, path)


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
    check_size(secret, repr(path))
    return secret


_ADVICE = "make it once with `(umask 077; head -c 32 /dev/urandom > FILE)`, and copy it to each host"


def check_size(secret: bytes, name: str) -> None:
    """Raises SecretError: it is too short or too long."""
    if not SHORTEST <= len(secret) <= LONGEST:
        size = len(secret) if len(secret) <= LONGEST else f"more than {LONGEST}"
        raise SecretError(f"the secret {name} has {size} bytes, and needs {SHORTEST} to {LONGEST}; {_ADVICE}")


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
