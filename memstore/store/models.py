"""Models on their way: what `save_model` and `load_model` do on the ranks of a process group.

A save is a sharded put. A load, in which all ranks fill their modules, or none does:

1. Rank 0 takes a version, and tells the others which: an overwrite meanwhile can't mix two. Its own mapping keeps the
   version until the others have theirs, so that no lease is taken.
2. Each rank compares the version with its module, and tells rank 0 what doesn't fit, and what it has no place for.
3. Rank 0 tells all what was found: a name that is stored is unexpected if no rank has a place for it.
4. If all fits, each rank copies its own boxes straight into its module, and tells rank 0 whether that went well.
5. Rank 0 tells all: no rank returns while another has failed.

A rank that fails on its way says so, and the others raise at once; of one that dies, they learn by their timeout. One
whose task was cancelled fails when it looks next: while it waits for others, and before it writes into its module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from memstore import structure
from memstore.abandoned import AbandonedError
from memstore.engine import Pin, deadline_after, pack
from memstore.errors import MemstoreError
from memstore.store.meeting import Meeting
from memstore.store.model_findings import End, Failure, Finding, Taken, judge, raise_error, raise_problems, told
from memstore.store.model_fit import Fit
from memstore.store.model_state import MODEL, OPTIMIZER, model_state, optimizer_state
from memstore.structure import HeldValue

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
    meeting.say(_VERSION, Taken(error=told(error, 0)))


def _lead(
    meeting: Meeting, take: Callable[[], Pin], model: Any, optimizer: Any, *, strict: bool, cast: bool, deadline: float
) -> tuple[Pin, Fit, Finding]:
    try:
        pin = take()
    except BaseException as error:
        meeting.say(_VERSION, Taken(error=told(error, 0)))
        raise
    meeting.say(_VERSION, Taken(pack(pin)))
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
        version = meeting.hear(_VERSION, Taken, deadline)
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
        meeting.say(_filled(meeting.rank), End(told(error, meeting.rank)))
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
        ends = [meeting.hear(_filled(rank), End, deadline, rank) for rank in range(1, meeting.world_size)]
    except BaseException as error:
        meeting.say(_ENDED, End(told(error, 0)))
        raise
    end = next((end for end in ends if end.error is not None), End())
    meeting.say(_ENDED, end)
    _raise_unfilled(meeting, end)


def _follow_filling(meeting: Meeting, fit: Fit, timeout: float) -> None:
    try:
        fit.fill()
    except BaseException as error:
        meeting.say(_filled(meeting.rank), End(told(error, meeting.rank)))
        with suppress(MemstoreError):
            _hear_end(meeting, timeout)
        raise
    meeting.say(_filled(meeting.rank), End())
    _raise_unfilled(meeting, _hear_end(meeting, timeout))


def _hear_end(meeting: Meeting, timeout: float) -> End:
    end = meeting.hear(_ENDED, End, deadline_after(timeout))
    meeting.leave([*_words(meeting), *map(_filled, range(1, meeting.world_size)), _ENDED], meeting.world_size - 1)
    return end


def _raise_unfilled(meeting: Meeting, end: End) -> None:
    if end.error is not None:
        text = f"{end.error.text}; so the ranks don't all have it, and modules may be filled in part: load again"
        raise_error(meeting, Failure(end.error.kind, text))


def _words(meeting: Meeting) -> list[str]:
    """What is said until all know whether it fits."""
    return [_VERSION, _VERDICT, *map(_found, range(1, meeting.world_size))]


def _found(rank: int) -> str:
    return f"found {rank}"


def _filled(rank: int) -> str:
    return f"filled {rank}"
