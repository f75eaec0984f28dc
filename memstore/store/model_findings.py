"""What ranks that load a model tell each other, and what they raise of it. Who says what when is in `models.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from memstore import errors
from memstore.engine import Pin
from memstore.errors import MemstoreError, StructureMismatchError
from memstore.store.meeting import Meeting

_SHOWN = 20  # lines of each kind in one error


class Failure(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    text: str


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has taken."""

    record: bytes = b""
    error: Failure | None = None


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """What a rank finds in the version; and what rank 0 makes of all findings."""

    problems: list[str] = []
    unexpected: list[str] = []
    error: Failure | None = None

    @property
    def fits(self) -> bool:
        """Of what rank 0 says: whether the ranks go on and fill their modules."""
        return self.error is None and not self.problems and not self.unexpected


class End(msgspec.Struct, frozen=True, array_like=True):
    """Whether a rank has filled its module; and whether all have, as rank 0 says."""

    error: Failure | None = None


def judge(findings: Sequence[Finding], strict: bool) -> Finding:
    """What all ranks are told."""
    errors_found = [finding.error for finding in findings if finding.error is not None]
    ranks: dict[str, list[int]] = {}
    for rank, finding in enumerate(findings):
        for problem in finding.problems:
            ranks.setdefault(problem, []).append(rank)
    world = len(findings)
    problems = [
        problem if len(found) == world else f"{problem} (rank{'s' * (len(found) > 1)} {', '.join(map(str, found))})"
        for problem, found in ranks.items()
    ]
    missed = set[str]().union(*(finding.unexpected for finding in findings[1:]))
    missed.intersection_update(*(finding.unexpected for finding in findings))
    unexpected = [name for name in findings[0].unexpected if name in missed] if strict else []
    return Finding(problems, unexpected, errors_found[0] if errors_found else None)


def told(error: BaseException, rank: int) -> Failure:
    text = str(error) if isinstance(error, MemstoreError) else f"{type(error).__name__}: {error}"
    return Failure(type(error).__name__, f"rank {rank}: {text}")


def raise_error(meeting: Meeting, error: Failure) -> NoReturn:
    """Raises as the rank did that says so."""
    kind = getattr(errors, error.kind, None)
    raised = (kind if isinstance(kind, type) and issubclass(kind, MemstoreError) else MemstoreError)(error.text)
    raised.key = meeting.key
    raise raised


def raise_problems(pin: Pin, problems: Sequence[str], unexpected: Sequence[str]) -> None:
    if not problems and not unexpected:
        return
    lines = [f"{pin.key!r}: version {pin.record.version} doesn't fit, and nothing was loaded:", *_some(problems)]
    if unexpected:
        lines += ["stored, and no rank has a place for it; strict=False leaves it out:", *_some(unexpected)]
    raise StructureMismatchError("\n".join(lines), key=pin.key)


def _some(lines: Sequence[str]) -> list[str]:
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"  {line}" for line in [*lines[:_SHOWN], *more]]
