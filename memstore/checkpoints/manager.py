"""CheckpointManager: the checkpoints of a training run, saved by all ranks, kept by rules, and found again.

`save` and `restore` have the steps. What is there is looked up in the root each time, and nothing is remembered of it:
a job that starts again, or another one, sees the same. Rank 0 alone decides, claims and removes; the others hear of it.

Which step is the newest is said by the number of the save, and not by the number of the step: a run that went back to
step 80 and saved step 90 continues from that one, though an earlier step 100 is there.

A signal (`save_on_signal`) is noted by its handler, and answered by the next `save` of all ranks. With several ranks,
each call of `save` looks whether a rank has announced at which step all stop. A rank announces the step after its own:
whoever is further than that has not waited for this rank in its collectives.

A backend writes the files of a step: `SnapshotBackend` here, or that of `dcp.py`, which needs more of torch, and so is
imported when it is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import msgspec
import torch

from memstore import _modes as modes
from memstore._arguments import flag, whole_number
from memstore._ranks import RankStore
from memstore._threads import between_forks
from memstore._wording import an, first_of
from memstore.checkpoints.buckets import steps_at
from memstore.checkpoints.folders import (
    MOST_STEPS,
    Backend,
    Best,
    Closable,
    RankingRule,
    Retention,
    SavedStep,
    StepStorage,
    current,
    newest,
)
from memstore.engine import deadline_after
from memstore.errors import MemstoreError, NoSnapshotError, StoreClosedError, StoreTimeoutError
from memstore.snapshot import AppState, Snapshot, load_manifest
from memstore.snapshot.buckets import OF_ALL, bucket_options, is_url
from memstore.snapshot.increments import LATEST
from memstore.snapshot.manifest import tiers_of
from memstore.snapshot.ranks import TIMEOUT, RankGroup

if TYPE_CHECKING:
    from typing_extensions import Self

# --- Backends --------------------------------------------------------------------------------------------------------


class BackendOptions(NamedTuple):
    """The options of all backends.

    Attributes:
        replicated: as of `Snapshot.take`.
        storage: `storage_options` as of `Snapshot`.
    """

    replicated: Sequence[str] | None
    storage: Mapping[str, Any]

    @property
    def allow_pickle(self) -> bool:
        return bool(self.storage.get("allow_pickle"))


class PendingSave(Protocol):
    """A save that goes on while training does."""

    def wait(self, timeout: float | None = None) -> object: ...

    def done(self) -> bool: ...


class CheckpointBackend(Protocol):
    """A writer of the files of a step. Every rank makes these calls."""

    def save(self, paths: Sequence[str], app_state: AppState, increment: bool) -> None:
        """Saves to all of these folders, and returns when all ranks have.

        Args:
            increment: whether it shares what is unchanged with the newest step; the same on all ranks.
        """
        ...

    def start(self, paths: Sequence[str], app_state: AppState, increment: bool) -> PendingSave:
        """Saves, and returns when the objects may change."""
        ...


class SnapshotBackend:
    """Snapshots."""

    def __init__(self, options: BackendOptions) -> None:
        self._given: dict[str, Any] = {
            "replicated": None if options.replicated is None else list(options.replicated),
            "storage_options": dict(options.storage),
            "allow_pickle": options.allow_pickle,
        }

    def save(self, paths: Sequence[str], app_state: AppState, increment: bool) -> None:
        Snapshot.take(paths[0], app_state, base=LATEST if increment else None, then=paths[1:], **self._given)

    def start(self, paths: Sequence[str], app_state: AppState, increment: bool) -> PendingSave:
        return Snapshot.async_take(
            paths[0], app_state, base=LATEST if increment else None, then=paths[1:], **self._given
        )


# --- The manager -----------------------------------------------------------------------------------------------------


_log = logging.getLogger("memstore")
_CHOICES = 20  # of a step to restore, while others remove what was chosen
_NAMED = 10  # steps in a message


class SaveWord(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank at the beginning of a save.

    Attributes:
        step: that it saves.
        signalled: whether it has got a signal.
        names: of the step's folder in each tier; only rank 0 says them, and the next one.
        increment: whether it shares what is unchanged with the step before.
    """

    step: int
    signalled: bool
    names: tuple[str, ...] = ()
    increment: bool = False


class BegunSave(NamedTuple):
    """A save for which folders are claimed.

    Attributes:
        paths: of its folders, one in each tier.
        held: what keeps them from being removed.
        increment: whether it shares what is unchanged with the step before.
        is_last: whether a signal has come.
    """

    paths: list[str]
    held: list[Closable]
    increment: bool
    is_last: bool


class ChosenStep(msgspec.Struct, frozen=True, array_like=True):
    """The step that rank 0 has chosen to restore, and how it is read: as a snapshot, by `dcp.load`, or by torch's.

    Attributes:
        paths: of its folder in each tier that has it.
    """

    step: int
    paths: tuple[str, ...]
    reader: Literal["snapshot", "dcp", "torch"]


class RunningSave(NamedTuple):
    """A save that goes on while training does, and what keeps its folders from being removed."""

    pending: PendingSave
    held: list[Closable]


@modes.uncompiled_methods
class CheckpointManager:
    """The checkpoints of a training run, in one folder: `root/step-000100`, and so on.

    Each rank of the default process group has one, with the same arguments, and all ranks call `save`, `restore`,
    `wait` and `close`. `latest`, `steps` and `best` are looks at the folder, which any process may take.

    A step is saved completely, or not at all: what a job leaves that dies is neither counted nor restored, and the next
    save removes it. Several rules may keep a step. No rule removes the newest whole step, a step that somebody reads
    (on this host, or wherever the file system's locks reach), or one that no manager saved. A bucket has no locks:
    there a manager that restores leaves a lease. Who reads a step without a manager gets a VersionGoneError if it is
    removed. What a job leaves there that dies goes after a day.

    Args:
        root: the folder, which the first save creates; or a URL: s3://, gs://, az://.
        keep_last: how many of the newest steps stay; None: all.
        keep_every: steps whose number is a multiple of this stay, too.
        keep_best: so many of the best steps stay, too.
        best: whether the largest metric is the best ("max") or the smallest ("min").
        metric: the name of the metric that ranks steps; None: the only one that a step has.
        save_every: `save` saves only steps whose number is a multiple of this; None: each.
        async_: whether training goes on while a step is written, and old ones are removed.
        backend: "snapshot", or "dcp" for checkpoints of `torch.distributed.checkpoint` (in memstore's format).
            `restore` reads both, whichever it is.
        incremental: save what has changed since the step before, and share the rest with it by hard links, or in a
            bucket by copies that the service makes: see `base` of `Snapshot.take`. Any step may still be removed. A
            number: each so many-th save is whole, so that a damaged block of a disk doesn't stay in all later steps.
        then: further folders for the same steps: from memory to a disk. The rules are those of the last one; the others
            keep the newest step. `restore` takes a step from the first one that has it.
        replicated: as of `Snapshot.take`, for snapshots: patterns of what all ranks have alike.
        storage_options: as of `Snapshot`: "timeout", "allow_pickle" (to save with pickle, and to restore); those of a
            bucket.

    Raises:
        TypeError, ValueError: an argument isn't one of these.

    Example:
        >>> import memstore, tempfile, torch
        >>> model, progress = torch.nn.Linear(4, 2), memstore.StateDict(step=0)
        >>> app_state = {"model": model, "progress": progress}
        >>> with memstore.CheckpointManager(tempfile.mkdtemp() + "/run", keep_last=2, save_every=10) as manager:
        ...     for step in range(1, 41):
        ...         progress["step"] = step
        ...         saved = manager.save(step, app_state)
        >>> manager.steps()
        [30, 40]
        >>> manager.restore(app_state, step=30), progress["step"]
        (30, 30)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Best = "max",
        metric: str | None = None,
        save_every: int | None = None,
        async_: bool = True,
        backend: Backend = "snapshot",
        incremental: bool | int = False,
        then: Sequence[str | os.PathLike[str]] = (),
        replicated: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if best not in ("max", "min"):
            raise ValueError(f"best is 'max' or 'min', and not {best!r}")
        if backend not in ("snapshot", "dcp"):
            raise ValueError(f"backend is 'snapshot' or 'dcp', and not {backend!r}")
        if metric is not None and not isinstance(metric, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metric is the name of a metric, and not {metric!r:.100}")
        self._rule = RankingRule(metric, best)
        self._retention = Retention(
            _positive("keep_last", keep_last),
            _positive("keep_every", keep_every),
            _positive("keep_best", keep_best),
            self._rule,
        )
        self._told_rule = None if metric is None and keep_best is None else self._rule  # what records say, for people
        self._save_every = _positive("save_every", save_every)
        self._is_async = flag("async_", async_)
        self._options = BackendOptions(replicated, dict(storage_options or {}))
        self._timeout = float(self._options.storage.get("timeout") or TIMEOUT)
        self._backend_name: Backend = backend
        self._backend: CheckpointBackend = SnapshotBackend(self._options)
        if backend == "dcp":
            with between_forks():
                from memstore.checkpoints.dcp import DcpBackend
            self._backend = DcpBackend(bucket_options(storage_options))
        self._whole_every = int(not incremental)  # which saves are whole: each so many-th; 0: none
        if not isinstance(incremental, bool):
            self._whole_every = _positive("incremental", incremental) or 1
        bucket = bucket_options(storage_options)
        self._storage: StepStorage = steps_at(root, bucket)
        self._tiers: list[StepStorage] = [self._storage, *[steps_at(one, bucket) for one in tiers_of(then)]]
        self._running: RunningSave | None = None
        self._removal: threading.Thread | None = None
        self._has_place = False  # whether it is known which step this run continues
        self._signals = _Signals()
        self._stopping = self._is_closed = False

    @property
    def root(self) -> str:
        """Returns the absolute path of the folder."""
        return self._storage.root

    @property
    def stopping(self) -> bool:
        """Returns whether a signal has come (`save_on_signal`) and its checkpoint is whole. End the run then."""
        return self._stopping

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, app_state: AppState, metrics: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> bool:
        """Saves a step, if it is due: call it after each step.

        A step that is there already is saved again, and the new one takes its place. An earlier step than the newest
        may be saved, and is the newest then.

        Args:
            step: its number, 0 or more; the same on all ranks.
            app_state: as of `Snapshot.take`: modules, optimizers, `StateDict`, `RNGState` by name.
            metrics: numbers by name (also tensors of one element), which are stored with the step; those of rank 0 are
                used. A step without the metric that ranks steps, or with NaN there, is never the best.
            force: save it though `save_every` doesn't say so: the last one of a run.

        Returns:
            Whether it was saved, or with `async_` is being saved.

        Raises:
            Exception: what failed in the last save, which went on while training did; this step isn't saved then.
            ValueError: the ranks save different steps.
            StoreClosedError: the manager is closed.
            StoreFullError, MemstoreError: as of `Snapshot.take`. What failed leaves no step.
        """
        self._check_open()
        step = whole_number("step", step)
        if not 0 <= step < MOST_STEPS:
            raise ValueError(f"step is 0 or more, and less than {MOST_STEPS:,}, and not {step:,}")
        is_due = flag("force", force) or self._save_every is None or step % self._save_every == 0
        if not is_due and (self._stopping or not self._signals.asks_for(step)):
            if self._running is not None and self._running.pending.done():
                with contextlib.suppress(MemstoreError, OSError):  # which the next save, or wait, raises
                    self._settle(0, remember=True)
            return False

        # 1. The last save ends: what has failed in it raises here, on all ranks. Rank 0 claims a folder for this one.
        #    Killed: an unfinished step.
        begun = self._begin(step, metrics)
        try:
            # 2. The snapshot is taken. Killed before it is published: an unfinished step, or with `async_` a whole one.
            if self._is_async and not begun.is_last:
                pending = self._backend.start(begun.paths, app_state, begun.increment)
                self._running = RunningSave(pending, begun.held)
                return True
            self._backend.save(begun.paths, app_state, begun.increment)
        except BaseException:
            _close(begun.held)
            self._remove_unfinished()
            raise
        _close(begun.held)
        # 3. What no rule keeps any more is removed. Killed: an unfinished step.
        self._clean_up()
        if begun.is_last:
            self._signals.has_come = False
            self._stopping = True
        return True

    def _begin(self, step: int, metrics: object) -> BegunSave:
        """Takes step 1 of a save."""
        ranks = RankGroup(None, self._timeout)
        held: list[Closable] = []
        increment = False
        try:
            with ranks.together() as word:
                self._settle(None)
                names: list[str] = []
                if not ranks.rank:
                    told = _checked_metrics(metrics)
                    self._tell_of_going_back(step)
                    self._remove_unfinished()  # before this one needs the room
                    # The save has one number in all tiers: that says which step is the newest.
                    after = max((saved.save for saved in self._steps()), default=0) if self._tiers[1:] else 0
                    for tier in self._tiers:
                        claimed = tier.claim(step, told, self._told_rule, self._backend_name, after=after)
                        names.append(claimed.name)
                        held.append(claimed.held)
                        increment = not self._whole_every or claimed.save % self._whole_every != 0
                word.said = msgspec.msgpack.encode(SaveWord(step, self._signals.has_come, tuple(names), increment))
            heard = [msgspec.msgpack.decode(text, type=SaveWord) for text in word.heard]
            ranks.all_know = True  # what may fail from here on fails on all ranks alike
            ranks.end()
            if len({said.step for said in heard}) > 1:
                steps = first_of([f"{said.step:,} on rank {rank}" for rank, said in enumerate(heard)], _NAMED)
                raise ValueError(f"the ranks save different steps: {steps}: call save with the same one on all ranks")
        except BaseException as error:
            ranks.leave(error)
            _close(held)
            self._remove_unfinished()
            raise
        paths = [tier.path(name) for tier, name in zip(self._tiers, heard[0].names, strict=True)]
        if not held:
            found = [tier.hold(name, reads=False) for tier, name in zip(self._tiers, heard[0].names, strict=True)]
            held = [one for one in found if one is not None]
        return BegunSave(paths, held, heard[0].increment, any(said.signalled for said in heard))

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the last save has ended on all ranks; on rank 0 also until what is to be removed is gone.

        Raises:
            StoreTimeoutError: it takes longer than `timeout` seconds. The save, or the removal, goes on.
            Exception: what failed in the save.
        """
        deadline = None if timeout is None else deadline_after(timeout)
        self._settle(timeout)
        if self._removal is not None:
            self._removal.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            if self._removal.is_alive():
                raise StoreTimeoutError(
                    f"{self.root}: old checkpoints aren't removed yet after {timeout:g} s: wait longer"
                )

    def close(self) -> None:
        """Waits as `wait` does, and gives back the signals' handlers. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._signals.give_back()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except (MemstoreError, OSError) as error:  # the block's own error is the one to tell
            _log.warning("the last save to %s failed: %s", self.root, error)

    def save_on_signal(self, signum: int = signal.SIGTERM) -> None:
        """Makes the next `save` after a signal save at once, and wait: before the host is taken away.

        All ranks call it, in their main threads. It suffices if one rank gets the signal. When the checkpoint is whole,
        `stopping` is true: end the run then. With several ranks, each step has a collective in which all ranks take
        part, and all call `save` after each step; a call costs a message to the process group's store.

        The signal's earlier handler comes back when the manager is closed; until then it isn't called.

        Raises:
            ValueError: this isn't the main thread, or there is no such signal.
        """
        self._check_open()
        self._signals.take(signum)

    # --- restoring, and looks -----------------------------------------------------------------------------------------

    def restore(self, app_state: AppState, step: int | None = None) -> int:
        """Restores a step into the objects, and returns its number. All ranks call it.

        While it runs, nobody removes the step. Checkpoints of other writers are found too: snapshots and DCP's
        checkpoints in folders that are called as torchtitan ("step-100") or Orbax ("100") call them.

        Args:
            app_state: as of `Snapshot.restore`.
            step: None: the newest whole one.

        Raises:
            NoSnapshotError: there is no whole step, or not this one. It is a NotAStoreError and a FileNotFoundError.
            UnsupportedValueError: torch's own writer has saved it, with pickle: see the message.
            StructureMismatchError, CorruptionError, MemstoreError: as of `Snapshot.restore`.
        """
        wanted = None if step is None else whole_number("step", step)
        ranks = RankGroup(None, self._timeout)
        held: list[Closable] = []
        try:
            with ranks.together() as word:
                self._settle(None)
                if not ranks.rank:
                    chosen, held = self._choose(wanted)
                    word.said = msgspec.msgpack.encode(chosen)
            ranks.all_know = True  # from here on the backend tells the ranks what fails on one of them
            ranks.end()
            chosen = msgspec.msgpack.decode(word.heard[0], type=ChosenStep)
            path, then = chosen.paths[0], chosen.paths[1:]
            if chosen.reader == "snapshot":
                options = dict(self._options.storage)
                if not any(map(is_url, chosen.paths)):  # a tier in a bucket has others
                    options = {key: options[key] for key in OF_ALL if key in options}
                Snapshot(path, storage_options=options, then=then).restore(app_state)
            else:
                with between_forks():
                    from memstore.checkpoints import dcp
                is_torchs = chosen.reader == "torch"
                options = bucket_options(self._options.storage) if is_url(path) else {}
                allow_pickle = self._options.allow_pickle
                dcp.restore(path, app_state, is_torchs=is_torchs, allow_pickle=allow_pickle, options=options)
        except BaseException as error:
            ranks.leave(error)
            raise
        finally:
            _close(held)
        self._has_place = True
        return chosen.step

    def latest(self) -> int | None:
        """Returns the number of the newest whole step, from which a run continues; None if there is none."""
        found = newest(self._steps())
        return None if found is None else found.step

    def steps(self) -> list[int]:
        """Returns the numbers of all whole steps, in ascending order."""
        return [saved.step for saved in current(self._steps())]

    def best(self) -> int | None:
        """Returns the number of the best whole step; of equal ones the newest. None if none has the metric."""
        ranked = self._rule.ranked(current(self._steps()))
        return ranked[0].step if ranked else None

    def __repr__(self) -> str:
        return f"memstore.CheckpointManager({self.root!r}{', closed' if self._is_closed else ''})"

    # --- a save that goes on, and what is removed ---------------------------------------------------------------------

    def _settle(self, timeout: float | None, *, remember: bool = False) -> None:
        """Waits for the save that goes on, if there is one, and removes what is to go. Raises what failed in it.

        Args:
            remember: an error is raised here, and again by the next call.
        """
        running = self._running
        if running is None:
            return
        try:
            running.pending.wait(timeout)
        except BaseException:
            if running.pending.done():  # else it was too long, or Ctrl-C: the save goes on
                if not remember:
                    self._running = None
                _close(running.held)
                self._remove_unfinished()
            raise
        self._running = None
        _close(running.held)
        self._clean_up()

    def _clean_up(self) -> None:
        """Removes what no rule keeps, on rank 0; with `async_` in a thread."""
        self._has_place = True
        if _rank():
            return
        if self._removal is not None:
            self._removal.join()
        gone = self._removable()
        if not gone:
            return
        if not self._is_async:
            self._remove(gone)
            return
        self._removal = threading.Thread(
            target=self._remove, args=(gone,), name="memstore: removal of checkpoints", daemon=True
        )
        self._removal.start()

    def _remove_unfinished(self) -> None:
        """Removes what a save has left that failed, as far as nobody writes there any more; it may take the next."""
        if not _rank():
            with contextlib.suppress(MemstoreError, OSError):
                self._remove([saved for saved in self._steps() if saved.format is None])

    def _remove(self, gone: Sequence[SavedStep]) -> None:
        for saved in gone:
            self._tiers[saved.tier].remove(saved)

    def _steps(self) -> list[SavedStep]:
        """Returns the steps of all tiers."""
        found = self._storage.steps()
        for number, tier in enumerate(self._tiers[1:], 1):
            found += [replace(saved, tier=number) for saved in tier.steps()]
        return found

    def _removable(self) -> list[SavedStep]:
        """Returns the steps that no rule keeps. Of the tiers before the last one, only the newest step stays."""
        found = self._steps()
        gone: list[SavedStep] = []
        for number in range(len(self._tiers)):
            is_last = number == len(self._tiers) - 1
            rules = self._retention if is_last else Retention(1, None, None, self._rule)
            gone += rules.removable([saved for saved in found if saved.tier == number])
        return gone

    def _choose(self, step: int | None) -> tuple[ChosenStep, list[Closable]]:
        """Returns the step to restore, and keeps it from being removed. Another manager may remove it just now."""
        for _ in range(_CHOICES):
            found = self._steps()
            whole = current(found)
            chosen = newest(found) if step is None else next((saved for saved in whole if saved.step == step), None)
            if chosen is None:
                there = first_of([f"{saved.step:,}" for saved in whole], _NAMED)
                if not there:
                    raise NoSnapshotError(f"{self.root} has no whole checkpoint: ask latest() first, or check the path")
                raise NoSnapshotError(f"{self.root} has no checkpoint of step {step:,}; it has {there}")
            same = [saved for saved in found if saved.is_whole and saved.order == chosen.order and saved.is_managed]
            places = {(saved.tier, saved.name) for saved in (chosen, *same)}
            holding = [self._tiers[tier].hold(name) for tier, name in sorted(places)]
            held = [one for one in holding if one is not None]
            left = sorted({(saved.tier, saved.name) for saved in self._steps() if saved.is_whole} & places)
            if left:
                paths = tuple([self._tiers[tier].path(name) for tier, name in left])
                is_dcps = chosen.format == "memstore" and self._is_of_dcp(paths[0])
                reader = "torch" if chosen.format == "dcp" else "dcp" if is_dcps else "snapshot"
                return ChosenStep(chosen.step, paths, reader), held
            _close(held)
        raise NoSnapshotError(f"{self.root}: another process removes each step as soon as it was chosen")

    def _is_of_dcp(self, path: str) -> bool:
        """Returns whether a snapshot is a checkpoint of DCP: by its values, as `memstore convert` tells it."""
        found = load_manifest(path, bucket_options(self._options.storage))
        return {value.key for value in found.values} - {"wrapped"} == {"state", "bytes", "dcp"}

    def _tell_of_going_back(self, step: int) -> None:
        """Warns of a run that begins before the newest step and restored none: it makes that the newest one."""
        if self._has_place:
            return
        last = newest(self._steps())
        if last is not None and step <= last.step:
            warnings.warn(
                f"{self.root} has steps up to {last.step:,}, of which this run restored none, and it saves step "
                f"{step:,}: that is the newest then, and the others are removed in their turn. To keep them, take "
                "another root; to continue them, call restore first",
                RuntimeWarning,
                stacklevel=4,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError(f"{self!r} saves nothing any more: make another manager")


def _close(held: Sequence[Closable]) -> None:
    for one in held:
        one.close()


def _rank() -> int:
    distributed: Any = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


# --- Signals ---------------------------------------------------------------------------------------------------------


class _Signals:
    """The signals that a manager answers.

    Attributes:
        has_come: this process has got one, and no save has answered it yet.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._earlier: dict[int, Any] = {}
        self._pid = os.getpid()
        self._meeting: _Meeting | None = None

    def take(self, signum: int) -> None:
        """Notes the signal from now on. Raises ValueError."""
        if signum in self._earlier:
            return
        earlier = signal.signal(signum, self._note)
        self._earlier[signum] = earlier if earlier is not None else signal.SIG_DFL
        self._pid = os.getpid()
        distributed: Any = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self._meeting = self._meeting or _Meeting(distributed.group.WORLD)

    def give_back(self) -> None:
        """Sets the earlier handlers, where nobody has set others since."""
        for signum, earlier in self._earlier.items():
            with contextlib.suppress(ValueError):  # not in the main thread: the handler stays, and only notes
                if signal.getsignal(signum) == self._note:
                    signal.signal(signum, earlier)
        self._earlier.clear()

    def asks_for(self, step: int) -> bool:
        """Returns whether this step is to be saved because of a signal, which all ranks answer alike."""
        if self._meeting is not None:
            return self._meeting.asks_for(step, has_come=self.has_come)
        return self.has_come

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.has_come = True
            return
        # A forked child has the handler, and no manager: without it, `terminate` would not end the child.
        earlier: Callable[[int, FrameType | None], Any] | int = self._earlier.get(signum, signal.SIG_DFL)
        signal.signal(signum, earlier)
        os.kill(os.getpid(), signum)


class _Meeting:
    """The step at which all ranks of a group stop: a word in the group's store, which the first signalled rank leaves.

    Args:
        group: all ranks make one at the same time; a later group over the same store has another word.
    """

    def __init__(self, group: Any) -> None:
        self._ranks = RankStore.of_group(group)
        self._word = self._ranks.name_among("memstore/stop", tuple(range(self._ranks.world_size)))
        self._has_said = False

    def asks_for(self, step: int, *, has_come: bool) -> bool:
        store = self._ranks.store
        if has_come and not self._has_said:
            self._has_said = True
            store.compare_set(self._word, "", str(step + 1))
        if not store.check([self._word]):
            return False
        return step >= int(bytes(store.get(self._word)))


# --- Arguments -------------------------------------------------------------------------------------------------------


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = whole_number(name, value)
    if number < 1:
        raise ValueError(f"{name} is 1 or more, or None, and not {number}")
    return number


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns metrics as numbers. Raises TypeError for what is none."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a dict of numbers by name, and not {an(type(cast('object', metrics)))}")
    found: dict[str, float] = {}
    for name, value in cast("Mapping[Any, Any]", metrics).items():
        if not isinstance(name, str) or isinstance(value, str | bytes):
            raise TypeError(f"metrics is a dict of numbers by name, and not {{{name!r:.60}: {value!r:.60}}}")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"metrics[{name!r:.60}] is no number: {error}") from None
    return found
