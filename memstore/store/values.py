"""The methods of a Store for values: put, get, view, references, and files of other programs.

Each method checks its arguments, has `contents` make or read the bytes, and calls one protocol of the engine:

    put, put_many            contents.flatten, contents.draft, engine.put
    get, get_many            engine.hold_at_once or engine.hold, contents.read
    view, ref                engine.hold, then view.view or a Ref
    attach, export           formats, which know the files of other programs

`mistakes` of arguments that nearly always mean something else are looked for at the end of a call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from memstore import contents, listing, structure
from memstore._arguments import encode_key, expected_version, expected_versions, flag, refused_put, seconds_of, several
from memstore._parsing import UNDECODABLE
from memstore._threads import between_forks
from memstore._wording import an_instance, check_progress
from memstore.engine import (
    DEFAULT_LEASE,
    MISFIT,
    CatalogCrowded,
    Draft,
    MappedEntry,
    Path,
    Pin,
    PinOptions,
    Root,
    at_each_home,
    check_version,
    hold,
    hold_at_once,
    index,
    is_served,
    mutable_entry,
    need_boxes,
    put,
    resource_errors,
)
from memstore.errors import InvalidKeyError, MutableEntryError, UnsupportedValueError, lacks_told
from memstore.listing import Keyspace, UnknownKindError, outline
from memstore.structure import modes
from memstore.view import view

# --- Putting values --------------------------------------------------------------------------------------------------


class Puts(Keyspace):
    """What `Store` inherits."""

    _allow_pickle: bool

    if TYPE_CHECKING:

        def put_sharded(
            self,
            key: str,
            value: Any,
            *,
            dtype: torch.dtype | None,
            expect_version: int | None,
            timeout: float | None,
        ) -> Any: ...

    def put(
        self,
        key: str,
        value: Any,
        *,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores a value as the new version of `key`; readers see all of it, or nothing.

        Args:
            key: 1 to 500 bytes of UTF-8.
            value: a tensor, TensorDict, tensorclass, or dicts, lists and tuples of them and of plain objects. If it has
                DTensors or other shards, this is `put_sharded`, and every rank has to call it.
            dtype: a real floating-point dtype. Real floating-point leaves are cast to it while they are copied,
                rounded as by `torch.Tensor.to`. Leaves that share memory still share it if all of them are cast from
                one dtype; otherwise each dtype is stored separately. None: no cast.
            expect_version: the version that the key must have; 0: it must not exist.
            timeout: seconds; None: the store's.

        Returns:
            The version. Versions of a key grow; they are not consecutive.

        Raises:
            UnsupportedValueError: a leaf can't be stored, or cast; the message names it. Nothing was written.
            TypeError: `dtype` isn't a real floating-point dtype.
            VersionConflictError: the key is at another version than `expect_version`.
            StoreFullError: no room. Nothing was changed.
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError: in a store on several hosts, the one that is the key's home didn't answer. Nothing was
                changed.
            UnknownOutcomeError: that host was asked to publish the value, and gave no answer.
        """
        root = self._writable(timeout)
        try:
            name = encode_key(key)
        except InvalidKeyError as error:
            raise refused_put(error, key, value) from None
        if expect_version is not None:
            expect_version = expected_version(expect_version)
        deadline = self._deadline(timeout)
        limit, pickles = contents.inline_limit(root), self._allow_pickle
        while True:
            try:
                flat = contents.flatten(key, value, root, limit=limit, allow_pickle=pickles, dtype=dtype)
            except UnsupportedValueError:
                if not structure.has_shards(value):
                    raise
                return self._put_sharded(key, value, dtype, expect_version, timeout)
            if expect_version is not None:
                self._check_early(root, {key: expect_version})
            try:
                (version,) = put(root, [contents.draft(root, name, flat, limit, expect_version)], deadline)
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
                continue
            self._puts += 1
            return version

    def _put_cast(self, key: str, value: Any, dtype: torch.dtype | None, below: Path, timeout: float | None) -> int:
        root, name = self._writable(timeout), encode_key(key)
        deadline = self._deadline(timeout)
        limit, pickles = contents.inline_limit(root), self._allow_pickle
        while True:
            flat = contents.flatten(key, value, root, limit=limit, allow_pickle=pickles, dtype=dtype, below=below)
            try:
                (version,) = put(root, [contents.draft(root, name, flat, limit, None)], deadline)
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
                continue
            self._puts += 1
            return version

    def _put_sharded(
        self, key: str, value: Any, dtype: torch.dtype | None, expect_version: int | None, timeout: float | None
    ) -> int:
        version = self.put_sharded(key, value, dtype=dtype, expect_version=expect_version, timeout=timeout)
        assert isinstance(version, int), "it has waited"
        return version

    def put_many(
        self,
        items: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        expect_versions: Mapping[str, int] | None = None,
        atomic: bool = True,
        timeout: float | None = None,
    ) -> dict[str, int]:
        """Stores several values, which become visible at one moment, or not at all. Arguments and errors as `put`.

        `expect_versions` has the versions that keys of `items` must have, by key; 0: the key must not exist.

        In a store on several hosts, all keys of one call must have the same home, as keys with the same text before
        the first "/" have; otherwise CrossHostError is raised before anything is done. With `atomic` False there is one
        moment for each home, and after an error the values that were put at other homes stay.
        """
        root, items = self._writable(timeout), as_items(items)
        flag("atomic", atomic)
        expected = expected_versions(expect_versions)
        deadline = self._deadline(timeout)
        names = [encode_key(key) for key in items]
        if not names:
            return {}
        for key in expected:
            if key not in items:
                raise ValueError(
                    f"expect_versions names {key!r}, which is not among the items: put it too, or leave it out"
                )
        limit = contents.inline_limit(root)
        versions: dict[bytes, int] = {}

        def put_part(part: list[Draft]) -> None:
            versions.update(zip([draft.key for draft in part], put(root, part, deadline), strict=True))

        while True:
            flats: list[structure.FlatValue] = []
            for key, value in items.items():
                try:
                    flats.append(
                        contents.flatten(key, value, root, limit=limit, allow_pickle=self._allow_pickle, dtype=dtype)
                    )
                except UnsupportedValueError as error:
                    refuse_one_of_many(key, error)
            if expected:
                self._check_early(root, expected)
            drafts = [
                contents.draft(root, name, flat, limit, expected.get(key))
                for key, name, flat in zip(items, names, flats, strict=True)
                if name not in versions
            ]
            try:
                if atomic:
                    put_part(drafts)
                else:
                    at_each_home(root, drafts, lambda draft: draft.key, put_part)
                break
            except CatalogCrowded:
                limit = contents.inline_limit_when_crowded(root)
        self._puts += len(names)
        return {key: versions[name] for key, name in zip(items, names, strict=True)}

    def _check_early(self, root: Root, expected: Mapping[str, int]) -> None:
        """Before anything is copied; the commit checks again. No other host is asked for it."""
        for key, version in expected.items():
            found = index.known_version(root, encode_key(key))
            if found is not None:
                check_version(encode_key(key), version, found)


# --- Getting values, viewing them and referring to them --------------------------------------------------------------


class _NoDefault:
    """Stands for a default that nobody gave. `help` shows it as stubs write it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "..."


NO_DEFAULT: Any = _NoDefault()
NOT_NOW: Any = object()
_OF_TASKS = 5  # calls from `check_default` up to a task's get
_AT_ONCE = 1 << 16  # bytes of a description, or of objects, that are made into a value in some hundred microseconds


class Gets(Keyspace):
    """What `Store` inherits."""

    _verify: bool
    _allow_pickle: bool

    if TYPE_CHECKING:

        def _hold_rows(self, root: Root, key: str) -> MappedEntry: ...

    def get(
        self,
        key: str,
        default: Any = NO_DEFAULT,
        *,
        out: Any = None,
        like: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        strict: bool = True,
        cast: bool = False,
        max_age: float | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Returns the value of `key` as it was put: no copy, and copy-on-write.

        A value that you hold never changes, whatever others put or delete. If you write to it, nobody else sees that.

        Args:
            key: the key.
            default: returned unchanged if there is no such key; without it, a missing key is an error.
            out: a value of the same structure, which is filled in place and returned. It is checked before anything is
                written. For a DTensor or TensorShard only this rank's part is read; such a target may lack leaves that
                other ranks hold.
            like: a value of the same structure. The result is in new memory, and has its devices, dtypes, strides,
                meshes and placements.
            device: the device of the result, as in `torch.Tensor.to`; None: that from which the value was put.
            dtype: the dtype of its floating-point leaves; None: as they were put. Other leaves keep theirs.
            non_blocking: as in `torch.Tensor.to`.
            strict: False fills only the leaves that `out` or `like` and the stored value have in common.
            cast: True casts what is copied into `out` where it has another floating-point dtype. False: that is a
                mismatch. Integers are never cast to floating-point numbers, or these to integers.
            max_age: in a store on several hosts: return the version that this process has last seen if that was at
                most so many seconds ago, without asking its home. None, or 0: the home is asked each time. If the home
                is this host, a get always returns the current version.
            timeout: seconds; None: the store's.

        Raises:
            KeyNotFoundError: no such key, and no default.
            StructureMismatchError: `out` or `like` differs; all differences are listed, and nothing was written.
            CorruptionError: the stored bytes are damaged.
            ResourceLimitError: too many open files or mappings.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
            ValueError: `max_age` isn't a number of seconds.
        """
        began = perf_counter() if self._tells else 0.0
        root = self._opened(timeout)
        name = encode_key(key)
        deadline = None if timeout is None else self._deadline(timeout)
        if max_age is not None and max_age != 0:
            max_age = seconds_of("max_age", max_age, otherwise=", or None")
        options = contents.PLAIN_READ
        if out is not None or like is not None or device is not None or dtype is not None or cast:
            options = contents.ReadOptions(
                out, like, device, dtype, non_blocking, flag("strict", strict), flag("cast", cast)
            )
        lazily = (out is not None or like is not None) and is_served(root)
        lazily = lazily and (structure.has_shards(out) or structure.has_shards(like))
        held = self._hold(root, key, name, deadline, lazily=lazily, max_age=max_age)
        if held is None:
            if default is NO_DEFAULT or default is ...:
                raise listing.no_value(root, name)
            check_default(key, default)
            return default
        self._gets += 1
        if default is not NO_DEFAULT and held.record.nbytes:
            check_default(key, default, held.record.description)
        if options is contents.PLAIN_READ and not self._verify:
            tensor = contents.read_bare(held)
            if tensor is not None:
                if began:
                    tell_of_read(root, "get", key, held, began)
                return tensor
        value = contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)
        if began:
            tell_of_read(root, "get", key, held, began)
        return value

    def _get_at_once(self, key: str, default: Any) -> Any:
        """See `get_at_once`."""
        began = perf_counter() if self._tells else 0.0
        root = self._root
        if root is None or self._verify or not root.on_tmpfs or root.catalog.is_released:
            return NOT_NOW
        name = encode_key(key)
        if not root.guard.acquire(False):  # held by a thread that commits, or opens a file
            return NOT_NOW
        try:
            root.glance()
            held = hold_at_once(root, name)
        except (OSError, MemoryError):  # `get` says of what
            return NOT_NOW
        finally:
            root.guard.release()
        if held is MISFIT:
            return NOT_NOW
        if held is None:
            if is_served(root) or default is NO_DEFAULT or default is ...:
                return NOT_NOW
            check_default(key, default, depth=_OF_TASKS)
            return default
        record = held.record
        if record.is_mutable or record.objects_checksum is not None:
            return NOT_NOW
        if len(record.description) > _AT_ONCE or len(record.objects) > _AT_ONCE:
            return NOT_NOW
        value = contents.read_bare(held)
        if value is None:
            if "tensordict" not in sys.modules:  # to import it takes a second
                return NOT_NOW
            value = contents.read(root, key, held, contents.PLAIN_READ, verify=False, allow_pickle=self._allow_pickle)
        self._gets += 1
        if default is not NO_DEFAULT and record.nbytes:
            check_default(key, default, record.description, depth=_OF_TASKS)
        if began:
            tell_of_read(root, "get", key, held, began)
        return value

    def get_many(self, keys: Iterable[str], *, timeout: float | None = None) -> dict[str, Any]:
        """Returns the values of several keys as they were at one moment, in the order of `keys`.

        Raises:
            KeyNotFoundError: some of them don't exist.
            PartialCommitError: none is missing, but one waits for the parts of other ranks.
            MutableEntryError: one is a dataset or replay buffer.
            HomeUnavailableError: in a store on several hosts, one that has a key, or its bytes, didn't answer.
        """
        root = self._opened(timeout)
        names = {key: encode_key(key) for key in several(keys)}
        with resource_errors(self.root):
            held = hold(root, tuple(names.values()), self._deadline(timeout), may_lock=self._mode != "r")
        values: dict[str, Any] = {}
        gone = [name for name, found in zip(names.values(), held, strict=True) if found is None]
        if gone:
            raise listing.no_values(root, gone, len(names), "get(key, default) gets those that are there")
        for (key, name), found in zip(names.items(), held, strict=True):
            assert found is not None, "those that are gone have raised"
            if found.record.is_mutable:
                raise mutable_entry(name, found.record.mutable_kind)
            values[key] = self._load(root, key, found)
        return values

    def _load(self, root: Root, key: str, held: MappedEntry, options: Any = None) -> Any:
        began = perf_counter() if self._tells else 0.0
        self._gets += 1
        options = contents.PLAIN_READ if options is None else options
        value = contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)
        if began:
            tell_of_read(root, "get", key, held, began)
        return value

    def ref(self, key: str, *, lease: float = DEFAULT_LEASE) -> Ref:
        """Returns a picklable reference to the current version of `key`, which keeps that version.

        Args:
            key: the key.
            lease: seconds for which the version stays readable after the ref was pickled, until a receiver gets it.

        Raises:
            KeyNotFoundError: no such key.
            MutableEntryError: the key is that of a dataset or replay buffer.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
        """
        root = self._opened()
        try:
            seconds = seconds_of("lease", lease)
        except (TypeError, ValueError):
            encode_key(key)
            raise
        return Ref(self._pin(root, key, seconds))

    def _ref_lazily(self, key: str) -> Ref:
        """See `ref_lazily`."""
        root = self._opened()
        held = self._held(root, key, lazily=True)
        return Ref(Pin(root, key, held.record, held, self._pin_options()))

    def view(self, key: str, *, device: torch.device | str | None = None) -> Any:
        """Returns the current version of `key` with lazy leaves: slicing one reads nothing, using it reads that part.

        The view stays at this version, can't be written, and is pickled as a reference: see docs/views.md. A view of a
        dataset has the rows that exist now, and shows what others write into them.

        Args:
            key: the key.
            device: the device to which tensors that are read from the view move; None: that from which they were put.

        Returns:
            The stored containers (TensorDict, dict, list, ...) with a `StoredTensor` for each tensor. Those that a
            container looks into (jagged, nested, quantized, unbatched, numpy arrays) are loaded.

        Raises:
            KeyNotFoundError: no such key.
            MutableEntryError: the key is that of a replay buffer.
            CrossHostError: the key is that of a dataset, whose rows are on another host.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("policy", {"w": torch.ones(512, 4)})
            ...     rows = store.view("policy")["w"][3:5]
            ...     rows.sum()
            tensor(8.)
        """
        began = perf_counter() if self._tells else 0.0
        root = self._opened()
        held = self._held_or_rows(root, key)
        self._gets += 1
        found = view(root, key, held, self._pin_options(), device)
        if began:
            tell_of_read(root, "view", key, held, began)
        return found

    def _held_or_rows(self, root: Root, key: str) -> MappedEntry:
        try:
            return self._held(root, key, lazily=True)
        except MutableEntryError:
            pass  # what comes of its rows is no consequence of it
        with contextlib.suppress(MutableEntryError):
            return self._hold_rows(root, key)
        return self._held(root, key, lazily=True)  # a buffer; or a dataset that was sealed just now

    def _pin(
        self,
        root: Root,
        key: str,
        lease: float = DEFAULT_LEASE,
        *,
        lazily: bool = False,
        deadline: float | None = None,
    ) -> Pin:
        held = self._held(root, key, lazily=lazily, deadline=deadline)
        return Pin(root, key, held.record, held, self._pin_options(lease))

    def _pin_options(self, lease: float = DEFAULT_LEASE, *, timeout: float | None = None) -> PinOptions:
        seconds = self._timeout if timeout is None else timeout
        return PinOptions(self._mode, seconds, self._verify, self._allow_pickle, lease)

    def _held(self, root: Root, key: str, *, lazily: bool = False, deadline: float | None = None) -> MappedEntry:
        name = encode_key(key)
        held = self._hold(root, key, name, deadline, lazily=lazily)
        if held is None:
            raise listing.no_value(root, name)
        return held

    def _hold(
        self,
        root: Root,
        key: str,
        name: bytes,
        deadline: float | None,
        *,
        lazily: bool = False,
        max_age: float | None = None,
    ) -> MappedEntry | None:
        try:
            held = hold_at_once(root, name)
            if held is MISFIT or (held is None and is_served(root)):
                deadline = self._deadline(None) if deadline is None else deadline
                may_lock = self._mode != "r"
                held = hold(root, (name,), deadline, may_lock=may_lock, lazily=lazily, max_age=max_age)[0]
        except (OSError, MemoryError):
            with resource_errors(self.root, key):
                raise
        if held is not None and held.record.is_mutable:
            raise mutable_entry(name, held.record.mutable_kind)
        return held


def ref_lazily(store: Gets, key: str) -> Ref:
    """Returns `store.ref(key)` for this process only: bytes of other hosts come when they are read."""
    return store._ref_lazily(key)  # pyright: ignore[reportPrivateUsage]


def get_at_once(store: Gets, key: str, default: Any) -> Any:
    """As `store.get(key, default)` of what is here, by a call that never waits: for threads that others wait for.

    NOT_NOW where it might: for a lock, a disk, or another host; or where much is to be copied or imported.
    """
    return store._get_at_once(key, default)  # pyright: ignore[reportPrivateUsage]


# --- Files of other programs: attached in place, and exported --------------------------------------------------------


class ByFiles(Puts, Gets):
    """What `Store` inherits."""

    def attach(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "memmap", "torch", "npy"] | None = None,
        copy: bool = False,
        expect_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Makes existing files the new version of `key`, without a copy: gets map them in place.

        The files keep their place and their owner. If one is replaced or deleted, the next get raises an error. But if
        it is changed in place, values that were got before change too, which never happens to values that were put.

        Args:
            key: the key.
            path: a safetensors file, the index of a checkpoint of several, a folder that has either, a folder that
                `TensorDict.memmap` wrote, a file of `torch.save`, or a `.npy`; or the folder of a `Snapshot`, whose
                value is a dict of rank 0's state dicts.
            format: which of these it must be; None: memstore recognizes it.
            copy: put a copy of the value instead; the entry then no longer depends on the files. This also takes
                values that can't be served in place.
            expect_version: as in `put`.
            timeout: as in `put`.

        Returns:
            The version.

        Raises:
            CorruptionError: a file is truncated, or is not what its format says.
            UnsupportedValueError: it has values that can't be served in place, or that only pickle can read; or
                `format` is another one than the files have.
            PermissionDeniedError: the folder has a link that leads out of it.
            FileNotFoundError: there is nothing at `path`.
            VersionConflictError, StoreFullError, ReadOnlyError: as in `put`.
            HomeUnavailableError, UnknownOutcomeError: as in `put`.
        """
        with between_forks():
            from memstore.formats import describe_files, load_files
            from memstore.snapshot import is_snapshot

        root, name = self._writable(timeout), encode_key(key)
        deadline = self._deadline(timeout)
        if expect_version is not None:
            expect_version = expected_version(expect_version)
            self._check_early(root, {key: expect_version})
        given: Any = path  # anything: what reads files says what is wrong with it
        if format is None and isinstance(given, (str, os.PathLike)) and is_snapshot(path):
            with between_forks():
                from memstore.snapshot import describe_snapshot as describe_files
                from memstore.snapshot import load_snapshot as load_files
        if flag("copy", copy):
            with resource_errors(self.root, key, root):
                value = load_files(key, path, format, allow_pickle=self._allow_pickle)
            return self.put(key, value, expect_version=expect_version, timeout=timeout)
        with resource_errors(self.root, key, root):
            content = describe_files(key, path, format, allow_pickle=self._allow_pickle)
            if content.boxes is not None:
                need_boxes(root, deadline)
        (version,) = put(root, [Draft(name, content, expect_version)], deadline)
        self._puts += 1
        return version

    def export(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "memmap", "torch"] = "safetensors",
        max_shard_size: int | str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Writes the value of `key` to files for other programs. They appear at `path` completely, or not at all.

        Args:
            key: the key.
            path: a file, which is replaced if it exists; or a folder, which must be missing or empty. It is a folder
                for memmap, and for safetensors with `max_shard_size` or if `path` is a folder or ends with "/".
            format: "safetensors": the tensors by their names joined with ".", in C order, tied ones stored separately.
                "memmap": for `TensorDict.load_memmap`; dicts become TensorDicts. "torch": for `torch.load`, which needs
                `weights_only=False` if the value has numpy arrays or instances of classes.
            max_shard_size: bytes, or text ("5GB"): safetensors are written as a Hugging Face checkpoint, in several
                files with an index if need be.
            progress: called with the bytes done and those in all.

        Raises:
            KeyNotFoundError: no such key.
            UnsupportedValueError: the format can't represent a leaf, which is named. Nothing was written.
            AlreadyExistsError: the folder isn't empty.
            StoreFullError, ResourceLimitError: there is no room, or a file may be no larger. Nothing is left.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
            ValueError: `path` ends in the suffix of another format (.pt, .pth, .ckpt, .bin, .npy, .npz, .safetensors).
        """
        with between_forks():
            from memstore.formats import check_export, export_value, has_devices

        check_progress(progress)
        target, limit = check_export(path, format, max_shard_size)
        root = self._opened()
        held = self._held(root, key)
        description = held.record.description
        options = contents.ReadOptions(device="cpu" if has_devices(description) else None)
        value = self._load(root, key, held, options)
        with lacks_told(target):
            export_value(
                key,
                description,
                value,
                target,
                format,
                limit=limit,
                progress=progress,
                durable=root.settings.durable,
                allow_pickle=self._allow_pickle,
            )


# --- Ref: one version of a key, pinned -------------------------------------------------------------------------------


log = logging.getLogger("memstore")

_OF_ANY_VERSION = ("timeout", "max_age")  # no lock is waited for here, and nobody asked which version is the last
_OPTIONS = tuple(one.name for one in fields(contents.ReadOptions))


@modes.uncompiled_methods
class Ref:
    """A version of a key, which stays readable as long as a Ref of it lives. Made by `Store.ref`.

    It is pickled as a reference: some hundred bytes and 30 for each leaf, never the tensors. Pickling it takes a lease
    (60 s, or the `lease` of `Store.ref`), so that the version survives until the receiver has unpickled it.

    Attributes:
        key: the key.
        version: the version of the key that it refers to.
        root: the folder of the store, as a path.
    """

    __slots__ = ("__weakref__", "_pin", "key", "root", "version")

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self.key, self.version, self.root = pin.key, pin.record.version, pin.root.path

    def get(self, **options: Any) -> Any:
        """Returns the value of exactly this version. Options as in `Store.get`.

        Raises:
            VersionGoneError: the ref arrived after its lease, and the version was overwritten or deleted.
        """
        began = perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
        pin = self._pin
        is_elsewhere = pin.record.hosts is not None
        is_sharded = is_elsewhere and any(structure.has_shards(options.get(name)) for name in ("out", "like"))
        held = self._map(lazily=is_sharded)  # then only the boxes that are read are fetched
        default = options.pop("default", ...)
        if held is None and default is not ...:
            return default
        if held is None:
            raise pin.gone()
        for name in _OF_ANY_VERSION:
            options.pop(name, None)
        try:
            chosen = contents.ReadOptions(**options) if options else contents.PLAIN_READ
        except TypeError as error:
            raise _unknown_option(options) or error from None
        verify, allow_pickle = pin.options.verify, pin.options.allow_pickle
        value = contents.read(pin.root, self.key, held, chosen, verify=verify, allow_pickle=allow_pickle)
        if began:
            tell_of_read(pin.root, "get", self.key, held, began)
        return value

    def view(self, **options: Any) -> Any:
        """Returns this version with lazy leaves. Options as in `Store.view`, errors as in `get`."""
        held, pin = self._map(lazily=True), self._pin
        if held is None:
            raise pin.gone()
        return view(pin.root, self.key, held, pin.options, **options)

    def _map(self, *, lazily: bool = False) -> MappedEntry | None:
        """The version, mapped anew: what a get returns may be written. None if the version is gone."""
        with resource_errors(self.root, self.key):
            return self._pin.map(lazily=lazily)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ref, (self._pin,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and (self.root, self.key, self.version) == (other.root, other.key, other.version)

    def __hash__(self) -> int:
        return hash((self.root, self.key, self.version))

    def __repr__(self) -> str:
        return f"<memstore.Ref {self.key!r} version {self.version} in {self.root}>"


_WHERE = {"inline": "in the catalog", "segment": "in its file", "sharded": "in files of ranks", "adopted": "attached"}


def tell_of_read(root: Root, call: str, key: str, held: MappedEntry, began: float) -> None:
    """A debug line of what was read."""
    record, took = held.record, (perf_counter() - began) * 1e3
    where = _WHERE.get(record.kind, "of rows")
    if record.hosts is not None:
        where += ", on another host"
    put = f"version {record.version} of put {record.put_id:#x}"
    nbytes = record.nbytes or len(record.objects)
    log.debug("%s: %s %r: %s, %d bytes %s, %.3f ms", root.path, call, key, put, nbytes, where, took)


def _unknown_option(options: dict[str, Any]) -> TypeError | None:
    unknown = [name for name in options if name not in _OPTIONS]
    if not unknown:
        return None
    takes = ", ".join(("default", *_OPTIONS, *_OF_ANY_VERSION))
    return TypeError(f"Ref.get() got an unexpected keyword argument {unknown[0]!r}: it takes {takes}")


# --- Arguments that nearly always mean something else than they say --------------------------------------------------


_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|xla|mtia|meta)(:[0-9]+)?")


def check_default(key: str, default: Any, description: bytes | None = None, *, depth: int = 3) -> None:
    """Warns of a get whose default is a device or dtype, unless the key says that such a thing is what it has.

    Args:
        description: of the value that is there; then it warns also of a default that is the name of a part of it.
        depth: calls up to that of the get, whose line the warning names.
    """
    is_device = isinstance(default, torch.device) or (type(default) is str and _DEVICE.fullmatch(default))
    name = "device" if is_device else "dtype" if isinstance(default, torch.dtype) else None
    shown = repr(str(default)) if is_device else repr(default)
    if name is not None and name not in key:
        warnings.warn(
            f"get({key!r}, {shown}): the second argument is the default, which is returned as it is if there is no "
            f"such key; for values of this {name} write {name}={shown}",
            UserWarning,
            stacklevel=depth,
        )
    elif description is not None and type(default) is str and default in _first_names(description):
        warnings.warn(
            f"get({key!r}, {default!r}): the second argument is the default, which is returned as it is if there is no "
            f"such key; for that part of the value write get({key!r})[{default!r}]",
            UserWarning,
            stacklevel=depth,
        )


def _first_names(description: bytes) -> set[str | int]:
    """The names of a value's parts, as far as they can be told without its containers."""
    with contextlib.suppress(UnknownKindError, *UNDECODABLE):
        return {leaf.name[0] for leaf in outline(description)[1] if leaf.name}
    return set()


def as_items(items: Any, call: str = "put_many") -> Mapping[str, Any]:
    """What `put_many`, or another such call, was given, as a mapping. Raises TypeError."""
    if isinstance(items, Mapping):
        return items  # pyright: ignore[reportUnknownVariableType]
    if not callable(getattr(items, "items", None)):
        raise TypeError(
            f"{call} takes a dict of values by their keys, and this is {an_instance(items)}: "
            f"{call}({{'key': value}}), or put(key, value) for one"
        )
    return dict(items.items())  # a TensorDict, or another store: to iterate over them means something else


def refuse_one_of_many(key: str, error: UnsupportedValueError) -> NoReturn:
    """Says which of the values it was."""
    raise UnsupportedValueError(f"{key!r}: {error.message}; nothing was put", key=key) from None
