"""Models: what `save_model` and `load_model` do on the ranks of a process group.

A save is a sharded put. A load, in which all ranks fill their modules, or none does, has these steps:

1. Rank 0 takes a version, and tells the others which: an overwrite meanwhile can't mix two. Its own mapping keeps the
   version until the others have theirs, so that no lease is taken.
2. Each rank compares the version with its module (`model_fit.py`), and tells rank 0 what doesn't fit, and what it has
   no place for.
3. Rank 0 tells all what was found (`judge`): a name that is stored is unexpected if no rank has a place for it.
4. If all fits, each rank copies its own boxes straight into its module, and tells rank 0 whether that went well.
5. Rank 0 tells all: no rank returns while another has failed.

`ModelLoad` has them twice: as rank 0 takes them, and as the others do. A rank that fails on its way says so, and the
others raise at once; of one that dies, they learn by their timeout. One whose task was cancelled fails when it looks
next: while it waits for others, and before it writes into its module.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import structure
from memstore._arguments import encode_key
from memstore._ranks import RankError
from memstore._threads import AbandonedError
from memstore.engine import HeldVersion, PinOptions, Root, deadline_after, pack, unpack
from memstore.errors import MemstoreError, StructureMismatchError
from memstore.store.model_fit import MODEL, OPTIMIZER, Fit, is_spread, model_state, optimizer_state
from memstore.store.sharded import DistributedRank, StoreCall, meet, put_sharded
from memstore.store.values import pin as pin_version
from memstore.store.values import put_one
from memstore.structure import HeldValue

# --- What is stored of a model ---------------------------------------------------------------------------------------


def value_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Returns what is stored of a model. Raises UnsupportedValueError."""
    value: dict[str, Any] = {MODEL: model_state(model)}
    if optimizer is not None:
        value[OPTIMIZER] = optimizer_state(model, optimizer)
    return value


def save_model(
    root: Root,
    key: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    process_group: Any,
    dtype: torch.dtype | None,
    allow_pickle: bool,
    deadline: float,
    timeout: float,
) -> int:
    """Saves a model, and returns the version. Raises what `Store.save_model` raises."""
    call = meet(process_group, "put", key, root)
    if call is None:
        value, name = value_of(model, optimizer), encode_key(key)
        return put_one(
            root,
            key,
            name,
            value,
            dtype=dtype,
            expect=None,
            allow_pickle=allow_pickle,
            deadline=deadline,
            below=(MODEL,),
        )

    def take() -> HeldValue:
        """Returns what this rank holds of the model, of which a cast concerns the module's leaves only."""
        held = structure.take_shards_apart(value_of(model, optimizer), allow_pickle=allow_pickle)
        leaves = (leaf._replace(is_fixed=leaf.is_fixed or leaf.name[0] != MODEL) for leaf in held.leaves)
        return held._replace(leaves=tuple(leaves))

    rank = DistributedRank(call)
    version = put_sharded(root, key, take, rank, dtype=dtype, expect=None, wait=True, lease=0.0, timeout=timeout)
    assert isinstance(version, int), "it has waited"
    return version


# --- Loads -----------------------------------------------------------------------------------------------------------


_LATER = 1.0  # seconds that the others wait longer than rank 0, so that they learn why it gave up
_VERSION, _VERDICT, _ENDED = "version", "verdict", "ended"  # words of rank 0
_FOUND, _FILLED = "found", "filled"  # words of the others, each with its rank


class ModelLoad:
    """One `load_model` of this process, in two steps. Any thread may go on with it.

    Once it is made, it has its place in the order in which the ranks of a process group match their loads. `fill` does
    all else. Who awaits a load waits between the two for a newer version, and no thread does.

    Args:
        options: of the store that loads it.
        call: of all ranks; None: this process is no rank.
        timeout: seconds for a version that rank 0 has taken, where its bytes lie on other hosts.

    Attributes:
        is_alone: there are no other ranks.
        leads: it takes the version, for all.
    """

    def __init__(self, root: Root, key: str, options: PinOptions, call: StoreCall | None, timeout: float) -> None:
        self._root, self._key, self._options, self._call, self._timeout = root, key, options, call, timeout
        self.is_alone = call is None or call.world_size == 1
        self.leads = call is None or call.rank == 0

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
        # A sharded module needs some of the bytes only; else its host keeps a copy of all of them.
        target = LoadTarget(model, optimizer, strict, cast, is_spread(model))
        if self._call is not None and not self.is_alone:
            if self.leads:
                return self._lead(self._call, target, wait, deadline, timeout)
            return self._follow(self._call, target, deadline + _LATER, timeout + _LATER)
        if wait is not None:
            wait()
        return prepare_load(self._root, self._key, self._options, target, deadline).fill()

    def _lead(
        self, call: StoreCall, target: LoadTarget, wait: Callable[[], object] | None, deadline: float, timeout: float
    ) -> int:
        """Takes the steps of rank 0."""
        # 1. Take a version.
        with _told(call, _VERSION, TakenVersion):
            if wait is not None:
                wait()
            pin = pin_version(self._root, self._key, self._options, deadline, lazily=target.reads_lazily)
        call.say(_VERSION, TakenVersion(pack(pin)))
        # 2. Compare.
        with _told(call, _VERDICT, Finding):
            fit = target.fit(pin)
            findings = [Finding(fit.problems, fit.unexpected), *call.hear_all(_FOUND, Finding, deadline)]
        # 3. Tell all what was found.
        verdict = judge(findings, target.strict)
        call.say(_VERDICT, verdict)
        _raise_unfit(call, pin, verdict)
        # 4. Fill.
        with _told(call, _ENDED, LoadEnd):
            fit.fill()
            ends = call.hear_all(_FILLED, LoadEnd, deadline_after(timeout))
        # 5. Tell all whether each has.
        end = next((end for end in ends if end.error is not None), LoadEnd())
        call.say(_ENDED, end)
        _raise_unfilled(call, end)
        return pin.record.version

    def _follow(self, call: StoreCall, target: LoadTarget, deadline: float, timeout: float) -> int:
        """Takes the steps of a rank other than 0."""
        found, filled = f"{_FOUND}/{call.rank}", f"{_FILLED}/{call.rank}"
        # 1. Map the version that rank 0 has taken.
        with _told(call, found, Finding, AbandonedError):
            version = call.hear(_VERSION, TakenVersion, deadline)
        if version.error is not None:
            call.done_with(_VERSION)
            raise version.error.as_error(call.key)
        # 2. Compare. Who fails hears what rank 0 makes of it, too, so that the words are removed.
        try:
            with _told(call, found, Finding):
                options = msgspec.structs.replace(self._options, timeout=self._timeout)
                pin = unpack(self._root, self._key, version.record, options, lazily=target.reads_lazily)
                fit = target.fit(pin)
        except BaseException:
            _hear_verdict(call, deadline)
            raise
        call.say(found, Finding(fit.problems, fit.unexpected if target.strict else []))
        # 3. Hear what all have found.
        with _told(call, filled, LoadEnd, AbandonedError):
            verdict = _hear_verdict(call, deadline)
        _raise_unfit(call, pin, verdict)
        # 4. Fill.
        try:
            with _told(call, filled, LoadEnd):
                fit.fill()
        except BaseException:
            with suppress(MemstoreError):
                _hear_end(call, timeout)
            raise
        call.say(filled, LoadEnd())
        # 5. Hear whether all have.
        _raise_unfilled(call, _hear_end(call, timeout))
        return pin.record.version

    def give_up(self) -> None:
        """Tells the other ranks that nobody awaits this load any more. If another rank leads, its timeout tells it."""
        if self._call is not None and self.leads and not self.is_alone:
            error = AbandonedError("the task that awaited the load was cancelled")
            with suppress(MemstoreError):
                self._call.say(_VERSION, TakenVersion(error=told(error, 0)))


class LoadTarget(NamedTuple):
    """The modules of this rank that a load fills, as the arguments of `load_model` say it."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    strict: bool
    cast: bool
    reads_lazily: bool

    def fit(self, pin: HeldVersion) -> Fit:
        return Fit(pin, self.model, self.optimizer, strict=self.strict, cast=self.cast)


class PreparedLoad(NamedTuple):
    """A version that fits, pinned, of which nothing was copied yet."""

    pin: HeldVersion
    plan: Fit

    def fill(self) -> int:
        """Copies it into the modules, and returns the version. Raises CorruptionError, and what a copy raises."""
        self.plan.fill()
        return self.pin.record.version


def prepare_load(root: Root, key: str, options: PinOptions, target: LoadTarget, deadline: float) -> PreparedLoad:
    """Takes the newest version for a process that loads it alone, and compares it with the modules.

    Raises KeyNotFoundError, StructureMismatchError, StoreTimeoutError.
    """
    pin = pin_version(root, key, options, deadline, lazily=target.reads_lazily)
    plan = target.fit(pin)
    raise_problems(pin, plan.problems, plan.unexpected if target.strict else [])
    return PreparedLoad(pin, plan)


@contextmanager
def _told(
    call: StoreCall,
    word: str,
    message: type[TakenVersion | Finding | LoadEnd],
    kind: type[BaseException] = BaseException,
) -> Generator[None]:
    """Tells the other ranks, under this word, of an error of this kind that is raised inside."""
    try:
        yield
    except kind as error:
        call.say(word, message(error=told(error, call.rank)))
        raise


def _hear_verdict(call: StoreCall, deadline: float) -> Finding:
    verdict = call.hear(_VERDICT, Finding, deadline)
    if not verdict.fits:
        call.done_with(_VERSION, _VERDICT, *_of_others(call, _FOUND))
    return verdict


def _hear_end(call: StoreCall, timeout: float) -> LoadEnd:
    end = call.hear(_ENDED, LoadEnd, deadline_after(timeout))
    call.done_with(_VERSION, _VERDICT, *_of_others(call, _FOUND), *_of_others(call, _FILLED), _ENDED)
    return end


def _of_others(call: StoreCall, word: str) -> list[str]:
    return [f"{word}/{rank}" for rank in range(1, call.world_size)]


def _raise_unfit(call: StoreCall, pin: HeldVersion, verdict: Finding) -> None:
    if verdict.error is not None:
        raise verdict.error.as_error(call.key)
    raise_problems(pin, verdict.problems, verdict.unexpected)


def _raise_unfilled(call: StoreCall, end: LoadEnd) -> None:
    if end.error is not None:
        text = f"{end.error.text}; so the ranks don't all have it, and modules may be filled in part: load again"
        raise RankError(end.error.kind, text).as_error(call.key)


# --- What ranks tell each other, and what they raise of it -----------------------------------------------------------


_SHOWN = 20  # lines of each kind in one error


class TakenVersion(msgspec.Struct, frozen=True, array_like=True):
    """The version that rank 0 has taken: its record, packed with its place; or why there is none."""

    record: bytes = b""
    error: RankError | None = None


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """The differences that a rank finds between the version and its module; and what rank 0 makes of all findings."""

    problems: list[str] = []
    unexpected: list[str] = []
    error: RankError | None = None

    @property
    def fits(self) -> bool:
        """Returns whether the ranks go on and fill their modules, if rank 0 says this."""
        return self.error is None and not self.problems and not self.unexpected


class LoadEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a load: whether a rank has filled its module; and whether all have, as rank 0 says."""

    error: RankError | None = None


def judge(findings: Sequence[Finding], strict: bool) -> Finding:
    """Returns what all ranks are told of what each has found. A problem that not all ranks have names its ranks."""
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


def told(error: BaseException, rank: int) -> RankError:
    """Returns an error of this rank, as the others are told of it."""
    text = str(error) if isinstance(error, MemstoreError) else f"{type(error).__name__}: {error}"
    return RankError(type(error).__name__, f"rank {rank}: {text}")


def raise_problems(pin: HeldVersion, problems: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raises StructureMismatchError with all of these lines, or the first of them, unless there are none."""
    if not problems and not unexpected:
        return
    lines = [f"{pin.key!r}: version {pin.record.version} doesn't fit, and nothing was loaded:", *_some(problems)]
    if unexpected:
        lines += ["stored, and no rank has a place for it; strict=False leaves it out:", *_some(unexpected)]
    raise StructureMismatchError("\n".join(lines), key=pin.key)


def _some(lines: Sequence[str]) -> list[str]:
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"  {line}" for line in [*lines[:_SHOWN], *more]]
