"""Models: what `save_model` and `load_model` do on the ranks of a process group.

A save is a sharded put. A load, in which all ranks fill their modules, or none does:

1. Rank 0 takes a version, and tells the others which: an overwrite meanwhile can't mix two. Its own mapping keeps the
   version until the others have theirs, so that no lease is taken.
2. Each rank compares the version with its module (`model_fit.py`), and tells rank 0 what doesn't fit, and what it has
   no place for.
3. Rank 0 tells all what was found (`judge`): a name that is stored is unexpected if no rank has a place for it.
4. If all fits, each rank copies its own boxes straight into its module, and tells rank 0 whether that went well.
5. Rank 0 tells all: no rank returns while another has failed.

A rank that fails on its way says so, and the others raise at once; of one that dies, they learn by their timeout. One
whose task was cancelled fails when it looks next: while it waits for others, and before it writes into its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec
import torch

from memstore import errors, structure
from memstore._threads import AbandonedError
from memstore.engine import Pin, deadline_after, pack
from memstore.errors import MemstoreError, StructureMismatchError
from memstore.store.model_fit import MODEL, OPTIMIZER, Fit, is_spread, model_state, optimizer_state
from memstore.store.sharded import Meeting
from memstore.structure import HeldValue

# --- ModelLoad: a load in two steps ----------------------------------------------------------------------------------
# A load of a model, in two steps: who awaits it waits between them for a newer version, and no thread does.
#
# 1. Made, it has its place in the order in which the ranks of a process group match their loads (`Meeting`).
# 2. `fill` takes the version, on the rank that leads, and fills the modules of all ranks (`models.py`).


class ModelLoad:
    """One `load_model` of this process. Any thread may go on with it.

    Args:
        meeting: with the other ranks; None: this process is no rank.
        take: takes the key's current version. Its argument: whether what lies on other hosts may come when it is read.
        receive: maps the version that rank 0 has packed, in the same ways.

    Attributes:
        is_alone: there are no other ranks.
        leads: it takes the version, for all.
    """

    def __init__(
        self, meeting: Meeting | None, take: Callable[[bool, float], Pin], receive: Callable[[bytes, bool], Pin]
    ) -> None:
        self._meeting, self._take, self._receive = meeting, take, receive
        self.is_alone = meeting is None or meeting.world_size == 1
        self.leads = meeting is None or meeting.rank == 0

    def fill(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        strict: bool,
        cast: bool,
        wait: Callable[[], object] | None,
        deadline: float,
        timeout: float,
    ) -> int:
        """Returns the version. Raises as `Store.load_model`.

        Args:
            wait: is called first, where this rank leads. The other ranks are told what it raises.
            deadline: monotonic, until which this rank's copy is to begin.
            timeout: seconds for the other ranks, once it is done.
        """
        lazily = is_spread(model)  # this rank needs some of the bytes; else its host keeps a copy of all of them

        def take() -> Pin:
            if wait is not None:
                wait()
            return self._take(lazily, deadline)

        if self._meeting is None or self.is_alone:
            pin = take()
            load_alone(pin, model, optimizer, strict=strict, cast=cast)
            return pin.record.version
        return load_together(
            self._meeting,
            take,
            lambda packed: self._receive(packed, lazily),
            model,
            optimizer,
            strict=strict,
            cast=cast,
            deadline=deadline,
            timeout=timeout,
        )

    def give_up(self) -> None:
        """Nobody fills: the other ranks are told, if this one leads, and else learn by their timeouts."""
        if self._meeting is not None and self.leads and not self.is_alone:
            with suppress(MemstoreError):
                decline(self._meeting)


# --- What ranks do ---------------------------------------------------------------------------------------------------


_LATER = 1.0  # seconds that the others wait longer than rank 0, so that they learn why it gave up
_VERSION, _VERDICT, _ENDED = "version", "verdict", "ended"


def value_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What is stored of a model. Raises UnsupportedValueError."""
    value: dict[str, Any] = {MODEL: model_state(model)}
    if optimizer is not None:
        value[OPTIMIZER] = optimizer_state(model, optimizer)
    return value


def take_model_apart(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, *, allow_pickle: bool
) -> HeldValue:
    """What this rank holds of a model, of which a cast concerns the module's leaves only."""
    held = structure.take_shards_apart(value_of(model, optimizer), allow_pickle=allow_pickle)
    leaves = (leaf._replace(is_fixed=leaf.is_fixed or leaf.name[0] != MODEL) for leaf in held.leaves)
    return held._replace(leaves=tuple(leaves))


# --- loads ------------------------------------------------------------------------------------------------------------


def load_alone(
    pin: Pin, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, *, strict: bool, cast: bool
) -> None:
    """Fills a module that one process has. Raises StructureMismatchError before anything is written."""
    fit = Fit(pin, model, optimizer, strict=strict, cast=cast)
    raise_problems(pin, fit.problems, fit.unexpected if strict else [])
    fit.fill()


def load_together(
    meeting: Meeting,
    take: Callable[[], Pin],
    receive: Callable[[bytes], Pin],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool,
    cast: bool,
    deadline: float,
    timeout: float,
) -> int:
    """Fills the modules of all ranks. Returns the version.

    Args:
        take: on rank 0, takes the version to be loaded.
        receive: on the others, maps what rank 0 has packed.
        deadline: monotonic, until which this rank's copy is to begin.
        timeout: seconds for the others, once it is done.
    """
    if meeting.rank == 0:
        pin, fit, verdict = _lead(meeting, take, model, optimizer, strict=strict, cast=cast, deadline=deadline)
    else:
        pin, fit, verdict = _follow(
            meeting, receive, model, optimizer, strict=strict, cast=cast, deadline=deadline + _LATER
        )
    if verdict.error is not None:
        raise_error(meeting, verdict.error)
    raise_problems(pin, verdict.problems, verdict.unexpected)
    if meeting.rank == 0:
        _lead_filling(meeting, fit, timeout)
    else:
        _follow_filling(meeting, fit, timeout + _LATER)
    return pin.record.version


def decline(meeting: Meeting) -> None:
    """In place of `load_together`, on rank 0: nobody awaits its load any more. The others raise that."""
    error = AbandonedError("the task that awaited the load was cancelled")
    meeting.say(_VERSION, TakenVersion(error=told(error, 0)))


def _lead(
    meeting: Meeting, take: Callable[[], Pin], model: Any, optimizer: Any, *, strict: bool, cast: bool, deadline: float
) -> tuple[Pin, Fit, Finding]:
    try:
        pin = take()
    except BaseException as error:
        meeting.say(_VERSION, TakenVersion(error=told(error, 0)))
        raise
    meeting.say(_VERSION, TakenVersion(pack(pin)))
    try:
        fit = Fit(pin, model, optimizer, strict=strict, cast=cast)
        findings = [Finding(fit.problems, fit.unexpected)]
        for rank in range(1, meeting.world_size):
            findings.append(meeting.hear(_found(rank), Finding, deadline, rank))
    except BaseException as error:
        meeting.say(_VERDICT, Finding(error=told(error, 0)))
        raise
    verdict = judge(findings, strict)
    meeting.say(_VERDICT, verdict)
    return pin, fit, verdict


def _follow(
    meeting: Meeting,
    receive: Callable[[bytes], Pin],
    model: Any,
    optimizer: Any,
    *,
    strict: bool,
    cast: bool,
    deadline: float,
) -> tuple[Pin, Fit, Finding]:
    try:
        version = meeting.hear(_VERSION, TakenVersion, deadline)
    except AbandonedError as error:
        meeting.say(_found(meeting.rank), Finding(error=told(error, meeting.rank)))
        raise
    if version.error is not None:
        meeting.leave([_VERSION], meeting.world_size - 1)
        raise_error(meeting, version.error)
    try:
        pin = receive(version.record)
        fit = Fit(pin, model, optimizer, strict=strict, cast=cast)
    except BaseException as error:
        meeting.say(_found(meeting.rank), Finding(error=told(error, meeting.rank)))
        _hear_verdict(meeting, deadline)
        raise
    meeting.say(_found(meeting.rank), Finding(fit.problems, fit.unexpected if strict else []))
    try:
        return pin, fit, _hear_verdict(meeting, deadline)
    except AbandonedError as error:
        meeting.say(_filled(meeting.rank), LoadEnd(told(error, meeting.rank)))
        raise


def _hear_verdict(meeting: Meeting, deadline: float) -> Finding:
    verdict = meeting.hear(_VERDICT, Finding, deadline)
    if not verdict.fits:
        meeting.leave(_words(meeting), meeting.world_size - 1)
    return verdict


def _lead_filling(meeting: Meeting, fit: Fit, timeout: float) -> None:
    try:
        fit.fill()
        deadline = deadline_after(timeout)
        ends = [meeting.hear(_filled(rank), LoadEnd, deadline, rank) for rank in range(1, meeting.world_size)]
    except BaseException as error:
        meeting.say(_ENDED, LoadEnd(told(error, 0)))
        raise
    end = next((end for end in ends if end.error is not None), LoadEnd())
    meeting.say(_ENDED, end)
    _raise_unfilled(meeting, end)


def _follow_filling(meeting: Meeting, fit: Fit, timeout: float) -> None:
    try:
        fit.fill()
    except BaseException as error:
        meeting.say(_filled(meeting.rank), LoadEnd(told(error, meeting.rank)))
        with suppress(MemstoreError):
            _hear_end(meeting, timeout)
        raise
    meeting.say(_filled(meeting.rank), LoadEnd())
    _raise_unfilled(meeting, _hear_end(meeting, timeout))


def _hear_end(meeting: Meeting, timeout: float) -> LoadEnd:
    end = meeting.hear(_ENDED, LoadEnd, deadline_after(timeout))
    meeting.leave([*_words(meeting), *map(_filled, range(1, meeting.world_size)), _ENDED], meeting.world_size - 1)
    return end


def _raise_unfilled(meeting: Meeting, end: LoadEnd) -> None:
    if end.error is not None:
        text = f"{end.error.text}; so the ranks don't all have it, and modules may be filled in part: load again"
        raise_error(meeting, LoadFailure(end.error.kind, text))


def _words(meeting: Meeting) -> list[str]:
    """What is said until all know whether it fits."""
    return [_VERSION, _VERDICT, *map(_found, range(1, meeting.world_size))]


def _found(rank: int) -> str:
    return f"found {rank}"


def _filled(rank: int) -> str:
    return f"filled {rank}"


# --- What ranks tell each other, and what they raise of it -----------------------------------------------------------


_SHOWN = 20  # lines of each kind in one error


class LoadFailure(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    text: str


class TakenVersion(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has taken."""

    record: bytes = b""
    error: LoadFailure | None = None


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """What a rank finds in the version; and what rank 0 makes of all findings."""

    problems: list[str] = []
    unexpected: list[str] = []
    error: LoadFailure | None = None

    @property
    def fits(self) -> bool:
        """Of what rank 0 says: whether the ranks go on and fill their modules."""
        return self.error is None and not self.problems and not self.unexpected


class LoadEnd(msgspec.Struct, frozen=True, array_like=True):
    """Whether a rank has filled its module; and whether all have, as rank 0 says."""

    error: LoadFailure | None = None


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


def told(error: BaseException, rank: int) -> LoadFailure:
    text = str(error) if isinstance(error, MemstoreError) else f"{type(error).__name__}: {error}"
    return LoadFailure(type(error).__name__, f"rank {rank}: {text}")


def raise_error(meeting: Meeting, error: LoadFailure) -> NoReturn:
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
