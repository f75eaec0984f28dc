"""Whether a history is linearizable: what can be seen of single operations at once, the rest by a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from memstore.testing.history.operation import Operation
from memstore.testing.history.search import Search


class NotLinearizableError(AssertionError):
    """No store that does one operation at a time could have answered so. The message names an operation."""


def check(history: Iterable[Operation]) -> None:
    """Checks a history, a key at a time.

    Args:
        history: operations in any order. Those that failed, and so did not happen, are not in it.

    Raises:
        NotLinearizableError: a value was never put, is torn, old, lost or back again; or a version went back.
        ValueError: two puts of a key have one value, so that nobody can tell which one was read; or an operation ends
            before it starts.
    """
    keys: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        if operation.end < operation.start:
            raise ValueError(f"it ends before it starts: {operation}")
        keys[operation.key].append(operation)
    for operations in keys.values():
        # A read whose outcome isn't known tells nothing.
        told = [one for one in operations if one.is_known or one.changes]
        _check_key(told)


def _check_key(operations: Sequence[Operation]) -> None:
    putting = _puts_by_value(operations)
    versions = _versions(operations, putting)
    for operation in operations:
        _check_alone(operation, putting, versions)
    search = Search(operations, versions)
    if not search.succeeds():
        raise NotLinearizableError(search.explain())


def _puts_by_value(operations: Iterable[Operation]) -> dict[int | str, Operation]:
    found: dict[int | str, Operation] = {}
    for operation in operations:
        if operation.kind != "put":
            continue
        if operation.value is None or operation.value in found:
            raise ValueError(f"each put of a key needs a value that no other has: {operation}")
        found[operation.value] = operation
    return found


def _versions(operations: Iterable[Operation], putting: dict[int | str, Operation]) -> dict[int | str, int]:
    """The versions of values, by the puts that gave them or the gets that found both. Each is another."""
    versions: dict[int | str, int] = {}
    values: dict[int, int | str] = {}
    for operation in operations:
        value, version = operation.value, operation.version
        if value is None or not version or value not in putting:
            continue
        if versions.setdefault(value, version) != version or values.setdefault(version, value) != value:
            others = f"value {value!r} is version {versions[value]}, version {version} is value {values.get(version)!r}"
            raise NotLinearizableError(f"{operation}; but {others}")
    return versions


def _check_alone(operation: Operation, putting: dict[int | str, Operation], versions: dict[int | str, int]) -> None:
    if operation.kind == "get" and operation.value is not None:
        put = putting.get(operation.value)
        if put is None or operation.version == 0:
            raise NotLinearizableError(f"a value that was never put, or whose put failed: {operation}")
        if put.start > operation.end:
            raise NotLinearizableError(f"{operation}; but it was put later: {put}")
    if operation.kind in ("get", "wait") and operation.value is None and operation.version:
        may_be = any(put.version is None and value not in versions for value, put in putting.items())
        if operation.version not in versions.values() and not may_be:
            raise NotLinearizableError(f"a version that no put was given: {operation}")
    if operation.kind == "wait" and operation.version is not None and operation.version <= operation.newer_than:
        raise NotLinearizableError(f"a wait that found what is not newer: {operation}")
