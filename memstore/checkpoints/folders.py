"""Steps of a run as folders: what they are called, which are whole, which one is the newest, and how one is removed.

`StepStorage` is what the manager asks of the place where steps lie; `StepFolders` is that place on a file system. A
step that a manager saves is a folder `step-000100`, which appears and goes in these steps:

    1. the folder is made, and the *record* is published in it (`FileStorage.publish`): step, metrics, and the number of
       the save. Whoever publishes it has claimed the folder; a second save of this step takes another name
    2. who saves holds the record (a shared `flock`), on each rank, and so does the process that writes the files
    3. the snapshot is taken, or the checkpoint saved. Its manifest is linked last: from then on the step is *whole*
    4. to remove it: the record is locked exclusively, which fails while anyone reads or writes the step
    5. the manifest goes, durably: the step isn't whole any more
    6. the other files go, then the record, then the folder

A process that dies between 1 and 3, or between 5 and 6, leaves an *unfinished* step that nobody holds: the next save
removes it. Between the folder and the record, or the record's end and the folder's, an empty folder is left, which goes
the same way.

This file imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from memstore._parsing import UNDECODABLE
from memstore.engine import LockFile, OwnedFile, has_settings, syscalls
from memstore.errors import AlreadyExistsError, MemstoreError, NotAStoreError, StoreTimeoutError
from memstore.snapshot.buckets import path_or_url
from memstore.snapshot.manifest import MANIFEST, load_manifest, others_in
from memstore.snapshot.storage import HELD, FileStorage, file_errors, hold, is_unfinished

_log = logging.getLogger("memstore")

# --- The record of a step --------------------------------------------------------------------------------------------


VERSION = 1
RECORD_LIMIT = 1 << 20  # bytes of a record
MOST_STEPS = 10**15

Backend = Literal["snapshot", "dcp"]
Best = Literal["max", "min"]


class StepRecord(msgspec.Struct, frozen=True):
    """The record of a step, as it stands in its folder.

    Attributes:
        memstore_checkpoint: the version of this format.
        step: as it was given.
        save: which save of this root it is, from 1. The newest step is the one with the largest number: a run may go
            back to an earlier step and save from there.
        created: Unix seconds.
        backend: what wrote the checkpoint.
        metrics: by name. JSON has no NaN and no infinities, which stand here as text.
        metric: by which of them the manager ranks steps; None: by the only one.
        best: whether the largest or the smallest is the best; None if the manager ranks no steps.
    """

    memstore_checkpoint: Annotated[int, Meta(ge=1)]
    step: Annotated[int, Meta(ge=0, lt=MOST_STEPS)]
    save: Annotated[int, Meta(ge=1, lt=1 << 62)]
    created: Annotated[float, Meta(ge=0, lt=1 << 40)]
    backend: Backend = "snapshot"
    metrics: dict[str, float | str] = {}
    metric: str | None = None
    best: Best | None = None


_read_record = msgspec.json.Decoder(StepRecord).decode


def encode_record(
    step: int, save: int, metrics: Mapping[str, float], rule: RankingRule | None, backend: Backend
) -> bytes:
    told = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
    metric, best = (None, None) if rule is None else rule
    record = StepRecord(VERSION, step, save, time.time(), backend, dict(told), metric, best)
    text = msgspec.json.encode(record)
    if len(text) > RECORD_LIMIT:
        raise ValueError(
            f"the metrics of a step take {len(text):,} bytes, and {RECORD_LIMIT:,} are the most: save fewer"
        )
    return text


def _metrics_of(record: StepRecord) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in record.metrics.items():
        with contextlib.suppress(ValueError):  # a text that is no number
            found[name] = float(value)
    return found


# --- Steps that are there --------------------------------------------------------------------------------------------


StepFormat = Literal["memstore", "dcp", "dcp in a bucket", "torchsnapshot", "orbax"]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that is there: whole, or unfinished.

    Attributes:
        step: its number.
        name: of its folder.
        save: which save it is, from 1; 0 for one that no manager saved.
        format: "memstore" for a snapshot or a checkpoint of `memstore.integrations.dcp`, "dcp" for one of torch's own
            writer; "torchsnapshot", "orbax" or "dcp in a bucket" for what can't be restored; None while it is
            unfinished.
        created: when a manager began to save it, in Unix seconds; None if no manager saved it.
        metrics: as they were given.
        rule: by which the manager that saved it ranks steps; None if it ranks none.
        tier: which of the manager's folders it lies in, from 0.
    """

    step: int
    name: str
    save: int
    format: StepFormat | None
    created: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    rule: RankingRule | None = None
    tier: int = 0

    @property
    def is_whole(self) -> bool:
        """Returns whether it can be restored."""
        return self.format in ("memstore", "dcp")

    @property
    def is_managed(self) -> bool:
        """Returns whether a manager saved it: no other step is ever removed."""
        return self.save > 0

    @property
    def order(self) -> tuple[int, int]:
        """Returns what is larger for newer steps."""
        return self.save, self.step


class RankingRule(NamedTuple):
    """The metric by which steps are ranked, and whether the largest or the smallest is the best.

    `metric` may be None: then a step is ranked by the only metric that it has.
    """

    metric: str | None
    best: Best

    def value(self, saved: SavedStep) -> float | None:
        """Returns the metric of a step; None if it has none, or NaN, which is neither better nor worse than others."""
        if self.metric is None:
            values = list(saved.metrics.values())
            value = values[0] if len(values) == 1 else None
        else:
            value = saved.metrics.get(self.metric)
        return None if value is None or math.isnan(value) else value

    def ranked(self, found: Sequence[SavedStep]) -> list[SavedStep]:
        """Returns the steps that have the metric, the best first; of equal ones the newest first."""
        with_values = [(self.value(saved), saved) for saved in found]
        sign = -1 if self.best == "max" else 1
        ranks = [(sign * value, -saved.save, -saved.step, saved) for value, saved in with_values if value is not None]
        return [saved for *_, saved in sorted(ranks, key=lambda one: one[:3])]


def newest(found: Sequence[SavedStep]) -> SavedStep | None:
    """Returns the whole step that was saved last; None if there is none. In several tiers it is the first one's."""
    return max((saved for saved in found if saved.is_whole), key=_order_of, default=None)


def _order_of(saved: SavedStep) -> tuple[int, int, int]:
    return *saved.order, -saved.tier


def current(found: Sequence[SavedStep]) -> list[SavedStep]:
    """Returns the whole steps by number; of one that was saved several times, the newest, in the first tier."""
    by_step: dict[int, SavedStep] = {}
    for saved in sorted((saved for saved in found if saved.is_whole), key=_order_of):
        by_step[saved.step] = saved
    return [by_step[step] for step in sorted(by_step)]


class Retention(NamedTuple):
    """The rules that say which steps stay; a step stays if one of them keeps it.

    Attributes:
        keep_last: how many of the newest, 1 or more, so that the newest one always stays; None: all.
        keep_every: those whose number is a multiple of this.
        keep_best: how many of the best.
    """

    keep_last: int | None
    keep_every: int | None
    keep_best: int | None
    rule: RankingRule

    def removable(self, found: Sequence[SavedStep]) -> list[SavedStep]:
        """Returns the steps that no rule keeps, the oldest first; then the unfinished ones.

        Steps that no manager saved are neither counted nor returned, and the newest whole step is never returned. A
        step that is being read or written may be returned: `StepStorage.remove` leaves it.
        """
        there = [saved for saved in current(found) if saved.is_managed]
        kept = {saved.name for saved in there} if self.keep_last is None else set[str]()
        if self.keep_last is not None:
            kept |= {saved.name for saved in sorted(there, key=lambda saved: saved.order)[-self.keep_last :]}
        if self.keep_every is not None:
            kept |= {saved.name for saved in there if saved.step % self.keep_every == 0}
        if self.keep_best is not None:
            kept |= {saved.name for saved in self.rule.ranked(there)[: self.keep_best]}
        gone = [saved for saved in found if saved.is_managed and saved.is_whole and saved.name not in kept]
        return [*sorted(gone, key=lambda saved: saved.order), *(saved for saved in found if saved.format is None)]


# --- The place where steps lie ---------------------------------------------------------------------------------------


class ClaimedStep(NamedTuple):
    """A step that is about to be saved.

    Attributes:
        name: of its folder.
        held: what keeps others from removing it meanwhile.
        save: which save it is.
    """

    name: str
    held: Closable
    save: int


class Closable(Protocol):
    """Something that keeps a step from being removed until it is closed."""

    def close(self) -> None: ...


class StepStorage(Protocol):
    """The place where the steps of a run lie: a folder, or in a bucket (`buckets.py`)."""

    @property
    def root(self) -> str:
        """Returns where it is, for messages."""
        ...

    def path(self, name: str) -> str:
        """Returns what `Snapshot` takes for the path of a step."""
        ...

    def steps(self) -> list[SavedStep]:
        """Returns all steps that are there, also unfinished ones, by their folders' names."""
        ...

    def claim(
        self,
        step: int,
        metrics: Mapping[str, float],
        rule: RankingRule | None,
        backend: Backend,
        *,
        after: int = 0,
    ) -> ClaimedStep:
        """Takes a name for a step, where nothing is yet, and leaves its record there.

        Args:
            after: the number of its save is larger than this.
        """
        ...

    def hold(self, name: str, *, reads: bool = True) -> Closable | None:
        """Keeps a step from being removed until what is returned is closed. Never fails.

        Args:
            reads: whether it is read; else it is being saved, by another rank.
        """
        ...

    def remove(self, saved: SavedStep) -> bool:
        """Removes a step, unless somebody reads or writes it. Returns whether it is gone. Never fails."""
        ...

    def size_of(self, saved: SavedStep) -> int:
        """Returns the bytes of a step's files, as its manifest says, or as they are."""
        ...

    def is_held(self, saved: SavedStep) -> bool:
        """Returns whether somebody reads or writes a step, as far as the storage shows it."""
        ...


STEP_NAME = re.compile(r"step-([0-9]{1,15})(?:\.([0-9]{1,19}))?")  # torchtitan's "step-100", too
OTHER_NAME = re.compile(r"(?:[A-Za-z]+_)?([0-9]{1,15})")  # Orbax's "100" and "checkpoint_100"
ORBAX_MARK = "_CHECKPOINT_METADATA"
_LOOKS = 50  # at a root in which others save and remove
_ATTEMPTS = 100  # to leave a record that stays: others remove folders that are empty
_PAUSE = 0.01  # seconds
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def saved_step(name: str, format: StepFormat | None, record: StepRecord | None) -> SavedStep | None:
    """Returns the step of this name; None if it is none."""
    if record is not None:
        rule = None if record.best is None else RankingRule(record.metric, record.best)
        return SavedStep(record.step, name, record.save, format, record.created, _metrics_of(record), rule)
    own, other = STEP_NAME.fullmatch(name), OTHER_NAME.fullmatch(name)
    match = own or other
    if match is None or (format is None and own is None):
        return None  # a folder that happens to be called "2024"
    return SavedStep(int(match[1]), name, 0, format)


def decode_record(text: bytes) -> StepRecord | None:
    """Returns the record of a step; None if it is damaged, or of another version: such a step is never removed."""
    try:
        record = _read_record(text)
    except UNDECODABLE:
        return None
    return record if record.memstore_checkpoint == VERSION else None


class StepFolders:
    """Steps in a folder of a file system. The folder is made by the first `claim`.

    Raises:
        TypeError, ValueError: `root` is no path, or an address of other storage.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root: str = path_or_url(root)
        self._records: dict[str, tuple[int, StepRecord]] = {}  # by name, with the inode: a record never changes

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def hold(self, name: str, *, reads: bool = True) -> OwnedFile | None:
        return hold(self.path(name))

    # --- what is there

    def steps(self) -> list[SavedStep]:
        # Others save and remove meanwhile: a look may miss the step that is whole by now, and find the one before it
        # gone. It counts if no folder came or went, and none was unfinished, or the look before found the same.
        found: list[SavedStep] = []
        before: list[tuple[str, str | None]] = []
        for _ in range(_LOOKS):
            names = self._names()
            found = [saved for saved in map(self._look, names) if saved is not None]
            seen: list[tuple[str, str | None]] = [(saved.name, saved.format) for saved in found]
            if self._names() == names and (seen == before or all(format is not None for _, format in seen)):
                break
            before = seen
        self._records = {saved.name: self._records[saved.name] for saved in found if saved.name in self._records}
        return found

    def _names(self) -> list[str]:
        try:
            with file_errors(self.root):
                return sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise NotAStoreError(f"{self.root} is a file, and the checkpoints of a run lie in a folder") from None

    def _look(self, name: str) -> SavedStep | None:
        """Returns what a name in the root is; None if it is no step."""
        own, other = STEP_NAME.fullmatch(name), OTHER_NAME.fullmatch(name)
        match = own or other
        path = self.path(name)
        if match is None or not os.path.isdir(path):
            return None
        format = self._format(path)
        record = self._record(name)
        return saved_step(name, format, record)

    def _format(self, path: str) -> StepFormat | None:
        if os.path.lexists(f"{path}/{MANIFEST}"):
            return "memstore"
        for other in others_in(path):
            return "dcp" if other.is_torchs else "torchsnapshot"
        return "orbax" if os.path.lexists(f"{path}/{ORBAX_MARK}") else None

    def _record(self, name: str) -> StepRecord | None:
        """Reads the record of a step. One that is damaged is none: its step is never removed."""
        path = f"{self.path(name)}/{HELD}"
        try:
            status = os.stat(path, follow_symlinks=False)
            if name in self._records and self._records[name][0] == status.st_ino:
                return self._records[name][1]
            if not stat.S_ISREG(status.st_mode):
                return None
            with OwnedFile(path, os.O_RDONLY) as file:
                record = decode_record(syscalls.read_at(file.fd, min(status.st_size, RECORD_LIMIT), 0))
        except OSError:
            return None
        if record is not None:
            self._records[name] = status.st_ino, record
        return record

    # --- a step is saved

    def claim(
        self,
        step: int,
        metrics: Mapping[str, float],
        rule: RankingRule | None,
        backend: Backend,
        *,
        after: int = 0,
    ) -> ClaimedStep:
        """Takes a name for a step: `step-000100`, or `step-000100.7` while the seventh save finds that name taken.

        Raises:
            AlreadyExistsError: the root is a store.
            StoreFullError, PermissionDeniedError, ReadOnlyError, OSError: of the file system.
            StoreTimeoutError: other processes removed the folder again and again.
        """
        if has_settings(self.root):
            raise AlreadyExistsError(
                f"{self.root} is a store: give the manager a folder of its own, such as {self.root}-checkpoints"
            )
        save = 1 + max((saved.save for saved in self.steps()), default=0)
        save = max(save, after + 1)
        record = encode_record(step, save, metrics, rule, backend)
        name = f"step-{step:06}"
        suffix = save
        for _ in range(_ATTEMPTS):
            try:
                held = FileStorage.create_for(self.path(name), partial(_leave_record, record), durable=True)
            except AlreadyExistsError:
                name, suffix = f"step-{step:06}.{suffix}", suffix + 1
                continue
            if held is not None:
                return ClaimedStep(name, held, save)
            time.sleep(_PAUSE)  # somebody was just about to remove the folder, which was empty
        raise StoreTimeoutError(f"{self.path(name)}: other processes remove this folder again and again")

    # --- looks, for people

    def size_of(self, saved: SavedStep) -> int:
        path = self.path(saved.name)
        if saved.format == "memstore":
            with contextlib.suppress(MemstoreError, OSError):
                return load_manifest(path).nbytes
        found = 0
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(OSError):
                    found += os.stat(f"{folder}/{name}", follow_symlinks=False).st_size
        return found

    def is_held(self, saved: SavedStep) -> bool:
        try:
            with LockFile(f"{self.path(saved.name)}/{HELD}", os.O_RDWR) as record:
                return not record.lock()
        except OSError:
            return False

    # --- a step is removed

    def remove(self, saved: SavedStep) -> bool:
        path = self.path(saved.name)
        try:
            return self._remove(path, saved)
        except (FileNotFoundError, NotADirectoryError):
            return not os.path.lexists(path)
        except (MemstoreError, OSError) as error:
            _log.warning("%s couldn't be removed, and stays: %s", path, error)
            return False

    def _remove(self, path: str, saved: SavedStep) -> bool:
        if os.path.islink(path):
            return False  # somebody put the folder elsewhere
        if not saved.is_managed:
            is_ours = saved.name.partition(".")[0] == f"step-{saved.step:06}"
            return is_ours and saved.format is None and _remove_empty(path)
        with LockFile(f"{path}/{HELD}", os.O_RDWR) as record:
            try:
                if not record.lock():
                    return False  # it is being read, or written
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                # Nobody can be seen reading it. A whole step goes: a reader is told that it was removed. An unfinished
                # one may be about to be whole.
                if not saved.is_whole:
                    return False
            storage = FileStorage(path)
            if not saved.is_whole and storage.size(MANIFEST) is not None:
                return False  # it became whole since it was looked at
            # 1. It isn't whole any more. Killed from here on: the next save goes on.
            storage.remove(MANIFEST)
            syscalls.sync_folder(path)
            # 2. Its files go, and the record as the last one: by that it is known whose the rest is.
            for name in storage.names():
                if name == HELD:
                    continue
                if os.path.isdir(f"{path}/{name}") and not os.path.islink(f"{path}/{name}"):
                    shutil.rmtree(f"{path}/{name}")
                else:
                    storage.remove(name)
            storage.remove(HELD)
            # 3. The folder.
            syscalls.remove_folder(path)
        return True


def _leave_record(record: bytes, storage: FileStorage) -> OwnedFile | None:
    """Publishes the record of a step in its folder, and holds it. Returns None if it was removed in between.

    Raises AlreadyExistsError if something is in the folder.
    """
    if any(not is_unfinished(name) for name in storage.names()):
        raise AlreadyExistsError(f"{storage.path} has something in it")
    storage.publish(HELD, record, durable=True)
    for _ in range(_ATTEMPTS):
        held = storage.keep(HELD)
        if held is not None or storage.size(HELD) is None:
            return held
        time.sleep(_PAUSE)  # somebody looks whether it is held
    return None


def _remove_empty(path: str) -> bool:
    """Removes a folder in which a process died before its record was there."""
    storage = FileStorage(path)
    names = storage.names()
    if not all(map(is_unfinished, names)):
        return False
    for name in names:
        storage.remove(name)
    try:
        syscalls.remove_folder(path)
    except OSError:
        return False  # somebody has begun to use it
    return True


class SharedSizes:
    """The room that steps take, of which increments may share files. Made before any of them is removed.

    Args:
        sizes: of each step, by the path of its folder.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._files: dict[str, list[os.stat_result]] = {}
        for path in sizes:
            self._files[path] = []
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                self._files[path] = [entry.stat(follow_symlinks=False) for entry in entries]

    def freed(self, paths: Iterable[str]) -> int:
        """Returns how many bytes the removal of these steps frees: not those that other folders have, too."""
        freed, counts = 0, Counter[tuple[int, int]]()
        for path in paths:
            freed += self._sizes[path]
            for status in self._files[path]:
                if status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                    counts[status.st_dev, status.st_ino] += 1
                    freed -= 0 if counts[status.st_dev, status.st_ino] == status.st_nlink else status.st_size
        return freed
