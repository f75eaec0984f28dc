"""Histories of one key, and whether some order of its operations explains them.

An operation has an effect at one moment between its start and its end. One whose outcome is unknown may have it at any
time after its start, or never. A *loss* is such an operation too: a host died, and with it a value that it had. If it
owned the key, a change that was not acknowledged may be undone: then the key has the last value that was, or none.
A *return* gives a key again what it has lost, as another value, if nobody has put or deleted it since.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PUT, DELETE, GET, LOSS, RETURN = "put", "delete", "get", "loss", "return"


@dataclass(frozen=True)
class Operation:
    """What a process saw of one call.

    Attributes:
        value: that was put or got; None: the key was deleted, or found missing. Each value is put once.
        version: of that value; 0: the key was missing; None: unknown.
        old: of a put or delete: the version that it must have replaced; None: any.
        end: math.inf: its outcome is unknown.
        lost: of a loss: the values that may be lost.
        undoes: of a loss: what was not acknowledged may be undone.
        of: of a return: the value that was lost.
        keeps: of a loss: what was acknowledged is there, or one of the later values that were not.
        unsure: of such a loss: these values; None: or a delete was made that was not acknowledged.
    """

    kind: str
    start: float
    end: float
    value: int | None = None
    version: int | None = None
    old: int | None = None
    lost: frozenset[int] = frozenset()
    undoes: bool = False
    of: int | None = None
    keeps: bool = False
    unsure: frozenset[int | None] = frozenset()

    @property
    def may_not_happen(self) -> bool:
        return self.end == math.inf


def check_history(operations: Sequence[Operation]) -> str | None:
    """None if an order explains the operations of one key, else what can't be explained."""
    versions: dict[int, int] = {}
    put = {operation.value for operation in operations if operation.kind in (PUT, RETURN)}
    for operation in operations:
        if operation.value is None:
            continue
        if operation.value not in put:
            return f"{operation}: this value was never put"
        if (
            operation.version is not None
            and versions.setdefault(operation.value, operation.version) != operation.version
        ):
            return f"{operation}: this value had version {versions[operation.value]} before"
    told = {version for one in operations for version in (one.version, one.old) if version}
    undone = any(operation.undoes for operation in operations)
    if told <= set(versions.values()) and not undone:  # what nobody ever saw, and was told of, explains nothing
        seen = {operation.value for operation in operations if operation.kind == GET} | set(versions)
        seen |= {value for operation in operations for value in operation.lost}
        seen |= {operation.of for operation in operations}
        operations = [one for one in operations if one.kind != PUT or not one.may_not_happen or one.value in seen]
    deepest = _search(operations, versions)
    return None if deepest is None else f"nothing explains {deepest} among {len(operations)} operations"


def _search(operations: Sequence[Operation], versions: dict[int, int]) -> Operation | None:
    """Depth first over all orders that respect time, each state once. Returns the operation where all of them end."""
    operations = sorted(operations, key=lambda operation: operation.start)
    everything = (1 << len(operations)) - 1
    needed = sum(1 << number for number, operation in enumerate(operations) if not operation.may_not_happen)
    # done, the value, the largest version so far, the last value that was acknowledged, and the one that was lost
    waiting: list[tuple[int, int | None, int, int | None, int | None]] = [(0, None, 0, None, None)]
    known = set(waiting)
    best, stuck = -1, None
    while waiting:
        done, value, largest, sure, gone = waiting.pop()
        if done & needed == needed:
            return None
        left = [number for number in range(len(operations)) if not done >> number & 1]
        first_end = min(operations[number].end for number in left)
        if done.bit_count() > best:
            best = done.bit_count()
            stuck = min((operations[number] for number in left if needed >> number & 1), key=lambda one: one.end)
        for number in left:
            operation = operations[number]
            if operation.start > first_end:
                break
            for after in _apply(operation, value, largest, sure, gone, versions):
                following = (done | 1 << number, *after)
                if following not in known:
                    known.add(following)
                    waiting.append(following)
    assert everything, "an empty history is explained"
    return stuck


def _apply(
    operation: Operation, value: int | None, largest: int, sure: int | None, gone: int | None, versions: dict[int, int]
) -> list[tuple[int | None, int, int | None, int | None]]:
    """The value, the largest version, the acknowledged value and the lost one, in all ways in which it can happen."""
    at = 0 if value is None else versions.get(value)
    if operation.old is not None and at is not None and at != operation.old:
        return []
    if operation.kind == LOSS:
        after = [] if operation.may_not_happen else [value]
        if value in operation.lost:
            after.append(None)
        if operation.undoes and value != sure:
            after += [sure] if operation.keeps else [sure, None]
        if operation.undoes and operation.keeps:
            least = versions.get(sure or 0, 0)
            after += [one for one in operation.unsure if one is None or versions.get(one, 0) > least]
        return [(one, largest, one, value if one is None and value is not None else gone) for one in after]
    if operation.kind == RETURN:
        if value is not None or gone is None or gone != operation.of or operation.value is None:
            return []
        version = versions.get(operation.value, largest)
        return (
            []
            if version <= largest and operation.value in versions
            else [(operation.value, version, operation.value, None)]
        )
    if operation.kind == DELETE:
        return [(None, largest, sure if operation.may_not_happen else None, None)]
    if operation.kind == PUT:
        assert operation.value is not None
        version = versions.get(operation.value, largest)
        if version <= largest and operation.value in versions:
            return []
        return [(operation.value, version, sure if operation.may_not_happen else operation.value, None)]
    if operation.version == 0 and value is not None:
        return []
    if operation.value is not None and operation.value != value:
        return []
    if operation.version is not None and at is not None and operation.version != at:
        return []
    return [(value, largest, sure, gone)]
