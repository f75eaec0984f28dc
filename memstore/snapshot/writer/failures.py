"""Errors on their way from the writer to the trainer, with their types."""

from __future__ import annotations

from memstore import errors
from memstore.snapshot.writer.messages import OUTCOME_LIMIT, Failure

_LONGEST = OUTCOME_LIMIT // 4  # bytes of a text


def failure_of(error: BaseException) -> Failure:
    """What is sent of an error."""
    if isinstance(error, errors.MemstoreError):
        path = getattr(error, "path", None)
        return Failure(type(error).__name__, _text(error), getattr(error, "errno", None), path and _text(path))
    if isinstance(error, OSError):
        path = _text(error.filename) if error.filename else None
        return Failure("OSError", error.strerror or _text(error), error.errno, path)
    return Failure("", f"{type(error).__name__}: {_text(error)}")


def _text(value: object) -> str:
    """As text that msgpack can carry: a path may be no UTF-8."""
    return str(value).encode(errors="backslashreplace")[:_LONGEST].decode(errors="ignore")


def error_of(failure: Failure) -> Exception:
    """The error again. One of a class that memstore doesn't have becomes a MemstoreError that names it."""
    if failure.kind == "OSError":
        return OSError(failure.code or 0, failure.message, failure.path)  # of the subclass that the code means
    kind = getattr(errors, failure.kind, None) if failure.kind else None
    if not (isinstance(kind, type) and issubclass(kind, errors.MemstoreError)):
        return errors.MemstoreError(failure.message)
    if issubclass(kind, errors.StoreFullError | errors.ResourceLimitError):
        return kind(failure.message, code=failure.code)
    if issubclass(kind, errors.CorruptionError):
        return kind(failure.message, path=failure.path)
    return kind(failure.message)
