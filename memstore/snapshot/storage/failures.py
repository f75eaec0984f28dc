"""What the file system refuses, as memstore's errors."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator

from memstore.errors import MemstoreError, PermissionDeniedError, ReadOnlyError, error_of_lack, is_of_caller


@contextlib.contextmanager
def file_errors(path: str) -> Generator[None]:
    """Turns OSErrors that a caller can do something about into typed ones that name `path`; others get it as well."""
    try:
        yield
    except MemstoreError:
        raise
    except OSError as error:
        typed = error if is_of_caller(error) else _typed(error, path)
        if typed is error:
            raise
        raise typed from error


def _typed(error: OSError, path: str) -> OSError | MemstoreError:
    code, reason = error.errno or 0, error.strerror
    lack = error_of_lack(error, path)
    if lack is not None:
        return lack
    if code in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(f"{path}: {reason}: it belongs to somebody else, or its folder does")
    if code == errno.EROFS:
        return ReadOnlyError(f"{path} is on a file system that is mounted read-only")
    if error.filename is None:
        return type(error)(code, reason, path)
    return error
