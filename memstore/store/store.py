"""Store: what a user calls. Glue between values (contents, structure) and the engine; the protocols live there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from memstore import contents, listing, structure
from memstore.engine import (
    DEFAULT_LEASE,
    MISFIT,
    Creation,
    Draft,
    MappedEntry,
    Path,
    Pin,
    PinOptions,
    Root,
    RootUse,
    at_each_home,
    check_version,
    hold,
    hold_at_once,
    index,
    is_served,
    mutable_entry,
    need_boxes,
    open_root,
    put,
    resource_errors,
    verify_store,
)
from memstore.errors import InvalidKeyError, MutableEntryError, UnsupportedValueError
from memstore.info import EntryInfo, Progress, VerifyReport
from memstore.keys import encode_key, refused_put, several
from memstore.late_imports import between_forks
from memstore.listing import Mode
from memstore.store.as_mapping import NO_DEFAULT, AsMapping
from memstore.store.by_ranks import ByRanks
from memstore.store.by_rows import ByRows
from memstore.store.describe import describe
from memstore.store.mistakes import as_items, check_default, refuse_one_of_many
from memstore.store.ref import Ref
from memstore.view import view
from memstore.whole_numbers import expected_version
from memstore.wording import shown, table_html

if TYPE_CHECKING:
    import torch

NOT_NOW: Any = object()
_AT_ONCE = 1 << 16  # bytes of a description, or of objects, that are made into a value in some hundred microseconds

log = logging.getLogger("memstore")


class Store(ByRanks, ByRows, AsMapping):
    """A folder of nested tensors under keys, shared by every process that opens it. Made by `memstore.open`.

    Thread-safe; usable in forked children; pickled by its root, so that spawned children and queues may carry it.
    Every method raises StoreClosedError after `close`, InvalidKeyError for an invalid key, and StoreTimeoutError if it
    could not get a lock within `timeout` seconds (None: as given to `open`).

    Attributes:
        root: the folder, as an absolute path.
    """

    def __init__(
        self,
        use: RootUse,
        mode: Mode = "r",
        *,
        verify: bool = False,
        allow_pickle: bool = False,
        timeout: float = 30.0,
        asked: Mode | None = None,
    ) -> None:
        super().__init__(use, mode, timeout=timeout, asked=asked)
        self._verify, self._allow_pickle = verify, allow_pickle

    # --- put ----------------------------------------------------------------------------------------------------------

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
        """
        root = self._writable()
        try:
            name = encode_key(key)
        except InvalidKeyError as error:
            raise refused_put(error, key, value) from None
        if expect_version is not None:
            expect_version = expected_version(expect_version)
        deadline = self._deadline(timeout)
        try:
            flat = contents.flatten(key, value, root, allow_pickle=self._allow_pickle, dtype=dtype)
        except UnsupportedValueError:
            if not structure.has_shards(value):
                raise
            return self._put_sharded(key, value, dtype, expect_version, timeout)
        if expect_version is not None:
            self._check_early(root, {key: expect_version})
        return self._put(root, name, flat, expect_version, deadline)

    def _put(self, root: Root, name: bytes, flat: structure.Flat, expect_version: int | None, deadline: float) -> int:
        (version,) = put(root, [contents.draft(root, name, flat, expect_version)], deadline)
        self._puts += 1
        return version

    def _put_cast(self, key: str, value: Any, dtype: torch.dtype | None, below: Path, timeout: float | None) -> int:
        root, name = self._writable(), encode_key(key)
        deadline = self._deadline(timeout)
        flat = contents.flatten(key, value, root, allow_pickle=self._allow_pickle, dtype=dtype, below=below)
        return self._put(root, name, flat, None, deadline)

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

        In a store on several hosts, all keys of one call must have the same home, as keys with the same text before
        the first "/" have; otherwise CrossHostError is raised before anything is done. With `atomic` False there is one
        moment for each home, and after an error the values that were put at other homes stay.
        """
        root, items = self._writable(), as_items(items)
        expected = {key: expected_version(version) for key, version in (expect_versions or {}).items()}
        deadline = self._deadline(timeout)
        names = [encode_key(key) for key in items]
        if not names:
            return {}
        for key in expected:
            if key not in items:
                raise ValueError(
                    f"expect_versions names {key!r}, which is not among the items: put it too, or leave it out"
                )
        flats: list[structure.Flat] = []
        for key, value in items.items():
            try:
                flats.append(contents.flatten(key, value, root, allow_pickle=self._allow_pickle, dtype=dtype))
            except UnsupportedValueError as error:
                refuse_one_of_many(key, error)
        if expected:
            self._check_early(root, expected)
        drafts = [
            contents.draft(root, name, flat, expected.get(key))
            for key, name, flat in zip(items, names, flats, strict=True)
        ]
        versions: dict[bytes, int] = {}

        def put_part(part: list[Draft]) -> None:
            versions.update(zip([draft.key for draft in part], put(root, part, deadline), strict=True))

        if atomic:
            put_part(drafts)
        else:
            at_each_home(root, drafts, lambda draft: draft.key, put_part)
        self._puts += len(names)
        return {key: versions[name] for key, name in zip(items, names, strict=True)}

    def _check_early(self, root: Root, expected: Mapping[str, int]) -> None:
        """Before anything is copied; the commit checks again. No other host is asked for it."""
        for key, version in expected.items():
            found = index.known_version(root, encode_key(key))
            if found is not None:
                check_version(encode_key(key), version, found)

    # --- get ----------------------------------------------------------------------------------------------------------

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
            device, dtype: as in `torch.Tensor.to`; dtype for floating-point leaves only.
            non_blocking: as in `torch.Tensor.to`.
            strict: False fills only the leaves that `out` or `like` and the stored value have in common.
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
        root = self._opened()
        name = encode_key(key)
        deadline = None if timeout is None else self._deadline(timeout)
        if max_age is not None and not max_age >= 0:
            raise ValueError(f"max_age is 0 seconds or more, or None, and not {max_age!r}")
        options = contents.PLAIN
        if out is not None or like is not None or device is not None or dtype is not None:
            options = contents.Options(out, like, device, dtype, non_blocking, strict)
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
        if options is contents.PLAIN and not self._verify:
            tensor = contents.read_bare(held)
            if tensor is not None:
                return tensor
        return contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)

    def _get_at_once(self, key: str, default: Any) -> Any:
        """See `get_at_once`."""
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
            value = contents.read(root, key, held, contents.PLAIN, verify=False, allow_pickle=self._allow_pickle)
        self._gets += 1
        return value

    def get_many(self, keys: Iterable[str], *, timeout: float | None = None) -> dict[str, Any]:
        """Returns the values of several keys as they were at one moment, in the order of `keys`.

        Raises:
            KeyNotFoundError: one of them doesn't exist.
        """
        root = self._opened()
        names = {key: encode_key(key) for key in several(keys)}
        with resource_errors(self.root):
            held = hold(root, tuple(names.values()), self._deadline(timeout), may_lock=self._mode != "r")
        values: dict[str, Any] = {}
        gone = [name for name, found in zip(names.values(), held, strict=True) if found is None]
        if gone and len(names) > 1:
            raise listing.absent_many(root, gone, len(names), "get(key, default) gets those that are there")
        for (key, name), found in zip(names.items(), held, strict=True):
            if found is None:
                raise listing.no_value(root, name)
            if found.record.is_mutable:
                raise mutable_entry(name, found.record.mutable_kind)
            values[key] = self._load(root, key, found)
        return values

    def _load(self, root: Root, key: str, held: MappedEntry, options: Any = None) -> Any:
        self._gets += 1
        options = contents.PLAIN if options is None else options
        return contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)

    def ref(self, key: str, *, lease: float = DEFAULT_LEASE) -> Ref:
        """Returns a picklable reference to the current version of `key`, which keeps that version.

        Args:
            key: the key.
            lease: seconds for which the version stays readable after the ref was pickled, until a receiver gets it.
        """
        root = self._opened()
        if not float(lease) >= 0:
            encode_key(key)
            raise ValueError(f"lease is seconds, 0 or more, and not {lease}")
        return Ref(self._pin(root, key, float(lease)))

    def view(self, key: str, *, device: torch.device | str | None = None) -> Any:
        """Returns the current version of `key` with lazy leaves: slicing one reads nothing, using it reads that part.

        The view stays at this version, can't be written, and is pickled as a reference: see docs/views.md. A view of a
        dataset has the rows that exist now, and shows what others write into them.

        Args:
            device: the device to which tensors that are read from the view move; None: that from which they were put.

        Returns:
            The stored containers (TensorDict, dict, list, ...) with a `StoredTensor` for each tensor. Those that a
            container looks into (jagged, nested, quantized, unbatched, numpy arrays) are loaded.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("policy", {"w": torch.ones(512, 4)})
            ...     rows = store.view("policy")["w"][3:5]
            ...     rows.sum()
            tensor(8.)
        """
        root = self._opened()
        held = self._held_or_rows(root, key)
        self._gets += 1
        return view(root, key, held, self._pin_options(), device)

    def _held_or_rows(self, root: Root, key: str) -> MappedEntry:
        try:
            return self._held(root, key, lazily=True)
        except MutableEntryError:
            try:
                return self._hold_rows(root, key)
            except MutableEntryError:  # a buffer; or a dataset that was sealed just now
                return self._held(root, key, lazily=True)

    def _pin(self, root: Root, key: str, lease: float = DEFAULT_LEASE) -> Pin:
        held = self._held(root, key)
        return Pin(root, key, held.record, held, self._pin_options(lease))

    def _pin_options(self, lease: float = DEFAULT_LEASE) -> PinOptions:
        return PinOptions(self._mode, self._timeout, self._verify, self._allow_pickle, lease)

    def _held(self, root: Root, key: str, *, lazily: bool = False) -> MappedEntry:
        name = encode_key(key)
        held = self._hold(root, key, name, None, lazily=lazily)
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

    # --- external files -----------------------------------------------------------------------------------------------

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
            expect_version, timeout: as in `put`.

        Returns:
            The version.

        Raises:
            CorruptionError: a file is truncated, or is not what its format says.
            UnsupportedValueError: it has values that can't be served in place, or that only pickle can read.
            PermissionDeniedError: the folder has a link that leads out of it.
            FileNotFoundError, VersionConflictError, StoreFullError, ReadOnlyError.
        """
        with between_forks():
            from memstore.formats import describe_files, load_files
            from memstore.snapshot import is_snapshot

        root, name = self._writable(), encode_key(key)
        deadline = self._deadline(timeout)
        if expect_version is not None:
            expect_version = expected_version(expect_version)
            self._check_early(root, {key: expect_version})
        given: Any = path  # anything: what reads files says what is wrong with it
        if format is None and isinstance(given, (str, os.PathLike)) and is_snapshot(path):
            with between_forks():
                from memstore.snapshot import describe_snapshot as describe_files
                from memstore.snapshot import load_snapshot as load_files
        if copy:
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
                "memmap": for `TensorDict.load_memmap`; dicts become TensorDicts. "torch": for `torch.load`.
            max_shard_size: bytes, or text ("5GB"): safetensors are written as a Hugging Face checkpoint, in several
                files with an index if need be.
            progress: called with the bytes done and those in all.

        Raises:
            KeyNotFoundError: no such key.
            UnsupportedValueError: the format can't represent a leaf, which is named. Nothing was written.
            AlreadyExistsError: the folder isn't empty.
            ValueError: `path` ends in the suffix of another format (.pt, .pth, .ckpt, .bin, .npy, .npz, .safetensors).
        """
        with between_forks():
            from memstore.formats import check_export, export_value, has_devices

        target, limit = check_export(path, format, max_shard_size)
        root = self._opened()
        held = self._held(root, key)
        description = held.record.description
        options = contents.Options(device="cpu" if has_devices(description) else None)
        export_value(
            key,
            description,
            self._load(root, key, held, options),
            target,
            format,
            limit=limit,
            progress=progress,
            durable=root.settings.durable,
            allow_pickle=self._allow_pickle,
        )

    def info(self, key: str) -> EntryInfo:
        """Describes the current version of `key`, without reading its tensors. Raises KeyNotFoundError."""
        return describe(self._opened(), key, self._timeout)

    def verify(self, keys: Iterable[str] | None = None, *, progress: Progress | None = None) -> VerifyReport:
        """Looks for damage: in the catalog, and in the records, files and bytes of `keys`, or of all.

        Others may go on reading and writing; if they replace a key meanwhile, its new version is checked.

        Args:
            keys: the keys to check; one that doesn't exist is reported among the damaged ones. None: all.
            progress: called with the bytes done, and the bytes in all.

        Returns:
            A report. Damage is listed in it, and raises nothing.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp(), checksum=True) as store:
            ...     version = store.put("policy", torch.ones(1000))
            ...     store.verify()
            memstore.VerifyReport: nothing is damaged; 1 checked, 0 without checksums
        """
        root = self._opened()
        names = None if keys is None else [encode_key(key) for key in several(keys)]
        return verify_store(root, names, contents.verify, progress, self._timeout, may_lock=self._mode != "r")

    def __reduce__(self) -> tuple[Any, ...]:
        self._opened()
        return reopen, (self.root, self._mode, self._verify, self._allow_pickle, self._timeout)

    def _repr_html_(self) -> str:
        if self._root is None:
            return repr(self)
        rows = map(listing.cells, listing.entries(self))
        return table_html(listing.COLUMNS, rows, f"{self.root}: {shown(len(self), 'key', 'keys')}")


def get_at_once(store: Store, key: str, default: Any) -> Any:
    """As `store.get(key, default)` of what is here, by a call that never waits: for threads that others wait for.

    NOT_NOW where it might: for a lock, a disk, or another host; or where much is to be copied or imported.
    """
    return store._get_at_once(key, default)  # pyright: ignore[reportPrivateUsage]


def reopen(path: str, mode: Mode, verify: bool, allow_pickle: bool, timeout: float) -> Store:
    """Unpickles a Store: opens the one that is there by now. Errors as `memstore.open`."""
    with resource_errors(path):
        use = open_root(path, mode, Creation(), timeout)
    return Store(use, mode, verify=verify, allow_pickle=allow_pickle, timeout=timeout)
