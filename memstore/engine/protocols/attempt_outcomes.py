"""What became of an attempt: the version that it is, or the error that every rank of it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from memstore.engine.catalog import Now, Outcome, Part
from memstore.engine.protocols.attempts import Member, missing_ranks, nanoseconds
from memstore.engine.sync import Refusal
from memstore.errors import (
    MutableEntryError,
    PartialCommitError,
    ShardMismatchError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)

Failure = StoreTimeoutError | ShardMismatchError | PartialCommitError | VersionConflictError | MutableEntryError

_SHORTEST_MEMORY = 60.0  # seconds that an outcome is kept for ranks that ask late


class OverAlready(Refusal):
    """Raised within a transaction that finds the outcome of its attempt."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def make_outcome(
    member: Member | Part, parts: Sequence[Part], moment: Now, *, version: int = 0, failure: Failure | None = None
) -> Outcome:
    """It is kept for a lease, and as long as the parts were to be."""
    leases = [nanoseconds(_SHORTEST_MEMORY), *[part.lease for part in parts]]
    if isinstance(member, Member):
        leases.append(nanoseconds(member.lease))
    details: dict[str, Any] = {}
    if failure is not None:
        details = {name: value for name, value in vars(failure).items() if name in _DETAILS}
    return Outcome(
        key=member.key,
        attempt=member.attempt,
        number=member.number or max((part.number for part in parts), default=0),
        version=version,
        error="" if failure is None else type(failure).__name__,
        message="" if failure is None else str(failure),
        details=details,
        expires=max([moment.clock + max(leases), *[part.expires for part in parts]]),
        boot=moment.boot,
    )


_DETAILS = ("expected", "found", "missing_ranks", "missing_boxes")
_ERRORS: dict[str, type[Failure]] = {
    kind.__name__: kind
    for kind in (StoreTimeoutError, ShardMismatchError, PartialCommitError, VersionConflictError, MutableEntryError)
}


def version_of_outcome(outcome: Outcome) -> int:
    """The version that an attempt became. Raises the error that ended it."""
    if outcome.version:
        return outcome.version
    error = _ERRORS.get(outcome.error, PartialCommitError)(outcome.message, key=outcome.key.decode())
    for name, value in outcome.details.items():
        if name in _DETAILS:
            setattr(error, name, _as_tuples(value))
    raise error


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, cast("list[Any]", value))) if isinstance(value, list) else value


def ended(member: Member | Part, parts: Sequence[Part], why: str) -> PartialCommitError:
    """The error of an attempt that was given up."""
    key = member.key.decode()
    text = f"{key!r}: attempt {member.attempt!r} was given up: {why}"
    return PartialCommitError(text, key=key, missing_ranks=missing_ranks(parts, member.world_size))


def unknown(member: Member) -> UnknownOutcomeError:
    key = member.key.decode()
    return UnknownOutcomeError(
        f"{key!r}: nothing is known of attempt {member.attempt!r} any more, since this rank looked later than its "
        "lease: the key says whether it was published",
        key=key,
    )
