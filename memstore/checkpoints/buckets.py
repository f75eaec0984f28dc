"""Steps of a run in a bucket: the second place where a manager saves, beside the folders of `folders.py`.

    1. the *record* of a step is put, if there is none: who puts it has the name. Another save of the step takes another
    2. the snapshot is taken; its manifest is put last: from then on the step is *whole*
    3. to remove it: a *mark* is put that says so: the step isn't whole any more. If somebody reads it, the mark is
       taken away
    4. the manifest goes, then the other objects, the record and the marks last

A bucket has no locks. A manager that restores a step puts a *lease* beside it, an object that it puts again every few
minutes, and then looks whether the step is whole. Who removes a step puts a mark, and then looks whether there is a
lease that is younger than ten minutes. Each of the two puts before it looks, so one of them sees the other, by
listings that are up to date. Each mark has a name of its own: who takes his away must not take another's. The age of a
lease is the time between its last put and that of the mark, both by the service's clock.

Nobody can see whether who saves a step lives. So an unfinished step is removed if this manager's own save has failed,
if it has a mark, or if it is a day old. This file imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from memstore.checkpoints.folders import (
    ORBAX_MARK,
    OTHER_NAME,
    RECORD_LIMIT,
    STEP_NAME,
    Backend,
    ClaimedStep,
    Closable,
    RankingRule,
    SavedStep,
    StepFolders,
    StepFormat,
    StepRecord,
    StepStorage,
    decode_record,
    encode_record,
    saved_step,
)
from memstore.errors import AlreadyExistsError, KeyNotFoundError, MemstoreError, StoreTimeoutError
from memstore.snapshot.buckets import Bucket, BucketObject, is_url, open_bucket, parse_url, path_or_url
from memstore.snapshot.manifest import MANIFEST, load_manifest, others_among
from memstore.snapshot.objects import ObjectStorage
from memstore.snapshot.publishing import new_id
from memstore.snapshot.storage import HELD

_log = logging.getLogger("memstore")
_GOING = "memstore_checkpoint.removed-"  # the beginning of a mark of a step that somebody removes
_LEASE = "memstore_checkpoint.lease-"  # the beginning of a lease of somebody who reads a step
_LEASE_SECONDS = 600.0  # after which a lease that wasn't put again holds no more
_RENEWED = 150.0  # seconds after which a lease is put again
_OLD = 86400.0  # seconds after which nobody goes on with a save
_ATTEMPTS = 100  # to find a name that nobody has


def steps_at(root: Any, options: Mapping[str, Any] | None = None) -> StepStorage:
    """Returns the place of a run's steps: a folder, or in a bucket.

    Args:
        options: for a bucket.

    Raises:
        TypeError, ValueError: `root` is neither a path nor a URL.
    """
    found = path_or_url(root)
    return StepObjects(found, options) if is_url(found) else StepFolders(found)


class _OwnSave:
    """A save of this manager that goes on until it is closed."""

    def __init__(self, of: dict[str, _OwnSave], name: str) -> None:
        self.goes_on = True
        of[name] = self

    def close(self) -> None:
        self.goes_on = False


class _Lease:
    """A lease of a step, which is put again until it is closed. If this process dies, it ends by itself.

    Raises:
        MemstoreError: it can't be put.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self._name = bucket, name
        self._ended = threading.Event()
        bucket.put(name, b"")
        self._thread = threading.Thread(target=self._renew, name="memstore: lease of a checkpoint", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._ended.wait(_RENEWED):
            with contextlib.suppress(MemstoreError):  # the next one may succeed in time
                self._bucket.put(self._name, b"")

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(MemstoreError):
            self._bucket.remove([self._name])


class StepObjects:
    """Steps in a bucket.

    Args:
        root: the URL.
        options: for the bucket.
    """

    def __init__(self, root: str, options: Mapping[str, Any] | None = None) -> None:
        self._url = parse_url(root)
        self.root: str = str(self._url)
        self._options = dict(options or {})
        self._bucket = open_bucket(self._url, self._options)
        self._records: dict[str, tuple[str, StepRecord]] = {}  # by name, with the version: a record never changes
        self._own: dict[str, _OwnSave] = {}
        self._objects: dict[str, dict[str, BucketObject]] = {}  # of each step, as they were listed last
        self._leased: set[str] = set()  # steps that had leases then

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def hold(self, name: str, *, reads: bool = True) -> Closable | None:
        if not reads or name not in self._records:
            return None  # an unfinished step, which is young, or one that no manager removes
        try:
            return _Lease(self._bucket, f"{self._url.key}/{name}/{_LEASE}{new_id()}")
        except MemstoreError as error:  # who may only read
            _log.info("%s is read without a lease: another manager may remove it meanwhile: %s", self.path(name), error)
            return None

    # --- what is there

    def steps(self) -> list[SavedStep]:
        objects: dict[str, dict[str, BucketObject]] = {}
        leases: dict[str, dict[str, BucketObject]] = {}
        for place, one in self._bucket.list_all(self._url.key).items():
            name, _, file = place.partition("/")
            if file and (STEP_NAME.fullmatch(name) or OTHER_NAME.fullmatch(name)):
                (leases if file.startswith(_LEASE) else objects).setdefault(name, {})[file] = one
        self._objects = objects
        self._leased = {name for name, found in leases.items() if _is_leased(found, time.time())}
        found = [saved_step(name, _format_of(files), self._record(name, files)) for name, files in objects.items()]
        self._records = {name: one for name, one in self._records.items() if name in objects}
        return sorted((one for one in found if one is not None), key=lambda one: one.name)

    def _record(self, name: str, files: Mapping[str, BucketObject]) -> StepRecord | None:
        if HELD not in files:
            return None
        version = repr((files[HELD].tag, files[HELD].modified))
        if name in self._records and self._records[name][0] == version:
            return self._records[name][1]
        try:
            text, _ = self._bucket.fetch_all(f"{self._url.key}/{name}/{HELD}", RECORD_LIMIT)
        except KeyNotFoundError:
            return None
        record = decode_record(text)
        if record is not None:
            self._records[name] = version, record
        return record

    def size_of(self, saved: SavedStep) -> int:
        if saved.format == "memstore":
            with contextlib.suppress(MemstoreError):
                return load_manifest(self.path(saved.name), self._options).nbytes
        return sum(one.size for one in self._objects.get(saved.name, {}).values())

    def is_held(self, saved: SavedStep) -> bool:
        return saved.name in self._leased or self._is_being_saved(saved.name)

    def _is_being_saved(self, name: str) -> bool:
        own = self._own.get(name)
        return own is not None and own.goes_on

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
            MemstoreError: of the service.
        """
        save = 1 + max([after, *[saved.save for saved in self.steps()]])
        record = encode_record(step, save, metrics, rule, backend)
        name, suffix = f"step-{step:06}", save
        for _ in range(_ATTEMPTS):
            if not self._objects.get(name):
                with contextlib.suppress(AlreadyExistsError):
                    ObjectStorage(self.path(name), self._options).publish(HELD, record, durable=True)
                    return ClaimedStep(name, _OwnSave(self._own, name), save)
            name, suffix = f"step-{step:06}.{suffix}", suffix + 1
        raise StoreTimeoutError(f"{self.path(name)}: other processes save this step again and again")

    # --- a step is removed

    def remove(self, saved: SavedStep) -> bool:
        try:
            return self._remove(saved)
        except MemstoreError as error:
            _log.warning("%s couldn't be removed, and stays: %s", self.path(saved.name), error)
            return False

    def _remove(self, saved: SavedStep) -> bool:
        if not saved.is_managed or self._is_being_saved(saved.name):
            return False
        storage = ObjectStorage(self.path(saved.name), self._options)
        found = storage.objects()
        if _is_leased(found, time.time()):
            return False
        if not saved.is_whole:
            if MANIFEST in found and not _marks(found):
                return False  # it became whole since it was looked at
            is_old = saved.created is not None and time.time() - saved.created > _OLD
            if not (is_old or _marks(found) or saved.name in self._own):
                return False  # another process may be saving it
        # 1. A mark, and then a look for leases. Killed: the step isn't whole, and the next save removes it.
        own = _GOING + new_id()
        self._bucket.put(f"{self._url.key}/{saved.name}/{own}", b"")
        found = storage.objects()
        if own not in found or _is_leased(found, found[own].modified.timestamp()):  # or the listing is an old one
            storage.remove(own)
            return False
        # 2. The manifest goes, then the rest. By the record and the marks it is known what the rest is.
        storage.remove(MANIFEST)
        last = [HELD, *_marks(found)]
        storage.remove_all([name for name in found if name not in (MANIFEST, *last)])
        storage.remove_all(last)
        return True


def _marks(files: Mapping[str, BucketObject]) -> list[str]:
    return [name for name in files if name.startswith(_GOING)]


def _is_leased(files: Mapping[str, BucketObject], now: float) -> bool:
    """Returns whether a lease among the objects of a step holds. `now`: Unix seconds."""
    put = [one.modified.timestamp() for name, one in files.items() if name.startswith(_LEASE)]
    return bool(put) and now - max(put) < _LEASE_SECONDS


def _format_of(files: Mapping[str, BucketObject]) -> StepFormat | None:
    if _marks(files):
        return None
    if MANIFEST in files:
        return "memstore"
    for other in others_among(sorted(files)):
        return "dcp in a bucket" if other.is_torchs else "torchsnapshot"
    return "orbax" if ORBAX_MARK in files else None
