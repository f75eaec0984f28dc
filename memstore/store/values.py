"""Values on their way into a store and out of it, for the methods of `Store`; and Ref, a version of a key.

put_one, put_many        contents.flatten, contents.draft, engine.put
hold_version, pin        engine.hold_at_once, engine.hold
get_many, value_at_once  the same, and contents.read
attach_files, export     files of other programs, by `formats` and `snapshot`
describe                 what `Store.info` gives
doubtful_default         arguments that nearly always mean something else than they say
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from time import perf_counter
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypedDict,
    TypeVar,
    cast,
    get_origin,
    is_typeddict,
    overload,
)

import msgspec
import torch

from memstore import contents, structure
from memstore._arguments import encode_key
from memstore._info import EntryInfo, LeafInfo, ShardInfo
from memstore._parsing import UNDECODABLE
from memstore._telling import is_wanted, tell
from memstore._threads import between_forks
from memstore._wording import an_instance, first_of, refuse_url
from memstore.engine import (
    MISFIT,
    BaseGone,
    CatalogCrowded,
    Content,
    Draft,
    HeldVersion,
    MappedEntry,
    Path,
    PinOptions,
    Record,
    Root,
    TakenPin,
    at_each_owner,
    check_version,
    deadline_after,
    end_pin,
    files_of,
    hold,
    hold_at_once,
    hold_version_of,
    index,
    is_recovered,
    is_served,
    mutable_entry,
    need_boxes,
    need_deltas,
    need_history,
    owner_name,
    plan_bytes,
    put,
    resource_errors,
    use_root,
)
from memstore.errors import (
    CorruptionError,
    CrossHostError,
    HomeUnavailableError,
    StructureMismatchError,
    UnsupportedValueError,
    lacks_told,
)
from memstore.listing import UnknownKindError, absent, no_value, no_values, outline, version_gone
from memstore.structure import modes
from memstore.view import view

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from memstore.formats import Format

log = logging.getLogger("memstore")
T = TypeVar("T")
D = TypeVar("D")


class _NoDefault:
    """A default that nobody gave. `help` shows it as stubs write it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "..."


NO_DEFAULT: Any = _NoDefault()


class GetOptions(TypedDict, total=False):
    """The options of `Store.get` beside `as_type`, for type checkers."""

    out: Any
    like: Any
    device: torch.device | str | None
    dtype: torch.dtype | None
    non_blocking: bool
    strict: bool
    cast: bool
    max_age: float | None
    version: int | None
    timeout: float | None


class ShardedPutOptions(TypedDict, total=False):
    """The options of `Store.put_sharded` beside `wait`, for type checkers."""

    attempt: str | None
    rank: int | None
    world_size: int | None
    process_group: Any
    dtype: torch.dtype | None
    expect_version: int | None
    lease: float
    timeout: float | None


def checked(key: str, value: Any, as_type: Any) -> Any:
    """Returns a value that is of a type. Of a type with arguments, such as `dict[str, Tensor]`, the class is looked at;
    of a TypedDict, whether there are the keys that it requires.

    Raises:
        StructureMismatchError: it isn't.
        TypeError: `as_type` is no class.
    """
    kind, what = get_origin(as_type) or as_type, f"is {an_instance(value)}"
    if is_typeddict(kind):
        if isinstance(value, dict):
            lacking = sorted(repr(name) for name in kind.__required_keys__ if name not in value)
            if not lacking:
                return cast("Any", value)
            what = f"lacks {first_of(lacking, 5)}"
    elif not isinstance(kind, type):
        raise TypeError(f"as_type is a class, such as dict or torch.Tensor, and not {as_type!r:.100}")
    elif isinstance(value, kind):
        return value
    name = getattr(kind, "__qualname__", kind)
    raise StructureMismatchError(f"{key!r} {what}, and as_type={name} was asked for: give its own type", key=key)


NOT_NOW: Any = object()
_AT_ONCE = 1 << 16  # bytes of a description, or of objects, that are made into a value in some hundred microseconds


# --- Putting values --------------------------------------------------------------------------------------------------


def put_one(
    root: Root,
    key: str,
    name: bytes,
    value: Any,
    *,
    dtype: torch.dtype | None,
    expect: int | None,
    allow_pickle: bool,
    deadline: float,
    below: Path = (),
    history: tuple[int, int] | None = None,
    delta_of: int | None = None,
) -> int:
    """Puts a value of this process alone, and returns its version. Raises what `Store.put` raises.

    Args:
        name: the key, encoded.
        below: the path of the part of the value that is cast to `dtype`; (): all of it.
        history: as of `engine.Draft`.
        delta_of: the version with which it may share bytes; 0: the present one; None: none.
    """
    if history is not None:
        with resource_errors(root.path, key, root):
            need_history(root, deadline)
    base = None if delta_of is None or dtype is not None else _hold_base(root, key, name, delta_of, deadline)
    limit = contents.inline_limit(root) if root.catalog.crowded else root.settings.inline_limit
    while True:
        flat = contents.flatten(key, value, root, limit=limit, allow_pickle=allow_pickle, dtype=dtype, below=below)
        if expect is not None:
            check_early(root, {key: expect})
        if base is None:
            draft = contents.draft(root, name, flat, limit, expect)
        else:
            draft = _draft_of(root, name, flat, limit, expect, base, deadline)
        if history is not None:
            draft = msgspec.structs.replace(draft, history=history)
        try:
            return put(root, [draft], deadline)[0]
        except CatalogCrowded:
            limit = contents.inline_limit_when_crowded(root)
        except BaseGone:  # it was replaced or deleted meanwhile, and nobody keeps it
            base = None


def _hold_base(root: Root, key: str, name: bytes, version: int, deadline: float) -> MappedEntry | None:
    """Maps the version with which a put may share bytes. Returns None if it is gone, or its bytes aren't here.

    Args:
        version: 0: the present one.
    """
    if not root.storage.maps_at_once:
        return None
    with resource_errors(root.path, key, root):
        if not is_served(root):
            present = index.find(root, name) if not version else None
            version = version or (present.version if present is not None else 0)
            return hold_version_of(root, name, version, deadline, may_lock=True) if version else None
        with contextlib.suppress(CorruptionError, CrossHostError, HomeUnavailableError):
            held = hold(root, (name,), deadline, may_lock=True, lazily=True)[0]
            if held is not None and held.absent is None and version in (0, held.record.version):
                return held
    return None


def _draft_of(
    root: Root,
    name: bytes,
    flat: structure.FlatValue,
    limit: int,
    expect: int | None,
    base: MappedEntry,
    deadline: float,
) -> Draft:
    """Returns what is to be stored of a value, which may share bytes with an earlier version."""
    has_others = is_served(root)
    if not has_others:
        delta = contents.draft_delta(root, name, flat, base, expect)
        if delta is not None:
            with contextlib.suppress(CrossHostError), resource_errors(root.path, name.decode(), root):
                need_deltas(root, deadline)  # a store that was served has no such versions
                return delta
    draft = contents.draft(root, name, flat, limit, expect)
    return contents.with_origins(root, draft, flat, base) if has_others else draft


def put_many(
    root: Root,
    items: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    expected: Mapping[str, int],
    atomic: bool,
    allow_pickle: bool,
    deadline: float,
    is_delta: bool = False,
) -> dict[str, int]:
    """Puts several values, and returns their versions. Raises what `Store.put_many` raises.

    Args:
        is_delta: each may share bytes with the present version of its key.
    """
    names = {key: encode_key(key) for key in items}
    for key in expected:
        if key not in items:
            raise ValueError(
                f"expect_versions names {key!r}, which is not among the items: put it too, or leave it out"
            )
    versions: dict[bytes, int] = {}
    bases: dict[bytes, MappedEntry | None] = {}
    if is_delta and dtype is None:
        bases = {name: _hold_base(root, key, name, 0, deadline) for key, name in names.items()}

    def put_part(part: list[Draft]) -> None:
        versions.update(zip([draft.key for draft in part], put(root, part, deadline), strict=True))

    limit = contents.inline_limit(root)
    while True:
        flats: list[structure.FlatValue] = []
        for key, value in items.items():
            try:
                flats.append(contents.flatten(key, value, root, limit=limit, allow_pickle=allow_pickle, dtype=dtype))
            except UnsupportedValueError as error:
                text = f"{key!r}: {error.message}; nothing was put"
                raise UnsupportedValueError(text, key=key) from None
        check_early(root, expected)
        drafts = [
            contents.draft(root, name, flat, limit, expected.get(key))
            if (base := bases.get(name)) is None
            else _draft_of(root, name, flat, limit, expected.get(key), base, deadline)
            for (key, name), flat in zip(names.items(), flats, strict=True)
            if name not in versions
        ]
        try:
            if atomic:
                put_part(drafts)
            else:
                at_each_owner(root, drafts, lambda draft: draft.key, put_part, deadline)
            return {key: versions[name] for key, name in names.items()}
        except CatalogCrowded:
            limit = contents.inline_limit_when_crowded(root)
        except BaseGone:
            bases.clear()


def check_early(root: Root, expected: Mapping[str, int]) -> None:
    """Compares versions before anything is copied; the commit compares them again. No other host is asked.

    Raises VersionConflictError.
    """
    for key, version in expected.items():
        name = encode_key(key)
        found = index.known_version(root, name)
        if found is not None:
            check_version(name, version, found)


def as_items(items: Any, call: str = "put_many") -> Mapping[str, Any]:
    """Returns the argument of `put_many`, or of another such call, as a mapping. Raises TypeError."""
    if isinstance(items, Mapping):
        return items  # pyright: ignore[reportUnknownVariableType]
    if not callable(getattr(items, "items", None)):
        raise TypeError(
            f"{call} takes a dict of values by their keys, and this is {an_instance(items)}: "
            f"{call}({{'key': value}}), or put(key, value) for one"
        )
    return dict(items.items())  # a TensorDict, or another store: to iterate over them means something else


# --- Versions, held --------------------------------------------------------------------------------------------------


def hold_version(
    root: Root,
    key: str,
    name: bytes,
    options: PinOptions,
    deadline: float | None = None,
    *,
    lazily: bool = False,
    max_age: float | None = None,
) -> MappedEntry | None:
    """Returns the current version of a key; None if there is none. Raises MutableEntryError.

    Args:
        name: the key, encoded.
        options: of the store that reads it.
        deadline: monotonic; None: the store's timeout from now on.
        lazily: what lies on other hosts may be fetched when it is read.
        max_age: as in `Store.get`.
    """
    try:
        held = hold_at_once(root, name)
        if held is MISFIT or (held is None and is_served(root)):
            until = deadline_after(options.timeout) if deadline is None else deadline
            may_lock = options.mode != "r"
            held = hold(root, (name,), until, may_lock=may_lock, lazily=lazily, max_age=max_age)[0]
    except (OSError, MemoryError):
        with resource_errors(root.path, key):
            raise
    if held is not None and held.record.is_mutable:
        raise mutable_entry(name, held.record.mutable_kind)
    return held


def held_version(
    root: Root, key: str, options: PinOptions, deadline: float | None = None, *, lazily: bool = False
) -> MappedEntry:
    """Returns the current version of a key. Arguments as of `hold_version`. Raises KeyNotFoundError."""
    name = encode_key(key)
    held = hold_version(root, key, name, options, deadline, lazily=lazily)
    if held is None:
        raise no_value(root, name)
    return held


def hold_one_version(
    root: Root, key: str, version: int, options: PinOptions, deadline: float, *, lazily: bool = False
) -> MappedEntry | None:
    """Returns a version of a key, the present one or one that is kept; None if it can't be read any more, or yet.

    Args:
        options, deadline, lazily: as of `hold_version`.
    """
    name = encode_key(key)
    with resource_errors(root.path, key, root):
        held = hold_version_of(root, name, version, deadline, may_lock=options.mode != "r", lazily=lazily)
    if held is not None and held.record.is_mutable:
        raise mutable_entry(name, held.record.mutable_kind)
    return held


def held_one_version(
    root: Root, key: str, version: int, options: PinOptions, deadline: float, *, lazily: bool = False
) -> MappedEntry:
    """Returns a version of a key as `hold_one_version`. Raises VersionGoneError, KeyNotFoundError."""
    held = hold_one_version(root, key, version, options, deadline, lazily=lazily)
    if held is None:
        raise version_gone(root, encode_key(key), version)
    return held


def pin(
    root: Root, key: str, options: PinOptions, deadline: float | None = None, *, lazily: bool = False
) -> HeldVersion:
    """Pins the current version of a key. Arguments and errors as of `held_version`."""
    held = held_version(root, key, options, deadline, lazily=lazily)
    return HeldVersion(root, key, held.record, held, options)


def get_many(root: Root, keys: Iterable[str], options: PinOptions, deadline: float, began: float) -> dict[str, Any]:
    """Returns the values of several keys as they were at one moment. Raises what `Store.get_many` raises.

    Args:
        options: of the store that reads them.
        began: the time of `perf_counter` at which the call began, for the log; 0: it is silent.
    """
    names = {key: encode_key(key) for key in keys}
    with resource_errors(root.path):
        found = hold(root, tuple(names.values()), deadline, may_lock=options.mode != "r")
    gone = [name for name, held in zip(names.values(), found, strict=True) if held is None]
    if gone:
        raise no_values(root, gone, len(names), "get(key, default) gets those that are there")
    values: dict[str, Any] = {}
    for (key, name), held in zip(names.items(), found, strict=True):
        assert held is not None, "those that are gone have raised"
        if held.record.is_mutable:
            raise mutable_entry(name, held.record.mutable_kind)
        plain, verify, allow_pickle = contents.PLAIN_READ, options.verify, options.allow_pickle
        values[key] = contents.read(root, key, held, plain, verify=verify, allow_pickle=allow_pickle)
        if began:
            log_read(root, "get", key, held, began)
    return values


def value_at_once(root: Root, key: str, default: Any, options: PinOptions, began: float) -> Any:
    """Returns a value without a wait, the default if there is no such key, or NOT_NOW where it might wait.

    A warning of the default names the line that called the caller of who calls this. `began`: as of `get_many`.
    """
    if not root.on_tmpfs or root.catalog.is_released:
        return NOT_NOW
    name = encode_key(key)
    if not root.guard.acquire(False):  # held by a thread that commits, or opens a file
        return NOT_NOW
    try:
        root.glance()
        if root.host_lease[0]:
            root.check_lease()
        held = hold_at_once(root, name)
    except (OSError, MemoryError):  # `get` says of what
        return NOT_NOW
    finally:
        root.guard.release()
    has_default = default is not NO_DEFAULT and default is not ...
    if held is MISFIT or (held is None and (is_served(root) or not has_default)):
        return NOT_NOW
    value = default
    if held is not None:
        record = held.record
        if record.objects_checksum is not None:
            return NOT_NOW
        if len(record.description) > _AT_ONCE or len(record.objects) > _AT_ONCE:
            return NOT_NOW
        value = contents.read_bare(held)
        if value is None:
            if "tensordict" not in sys.modules:  # to import it takes a second
                return NOT_NOW
            plain, allow_pickle = contents.PLAIN_READ, options.allow_pickle
            value = contents.read(root, key, held, plain, verify=False, allow_pickle=allow_pickle)
    if has_default:
        doubt = doubtful_default(key, default, held)
        if doubt is not None:
            warnings.warn(doubt, UserWarning, stacklevel=4)
    if began and held is not None:
        log_read(root, "get", key, held, began)
    return value


# --- Files of other programs: attached in place, and exported --------------------------------------------------------


def attach_files(
    root: Root,
    key: str,
    path: str | os.PathLike[str],
    format: Format | None,
    *,
    expect: int | None,
    allow_pickle: bool,
    deadline: float,
) -> int:
    """Puts a value that stays in its files, and returns the version. Raises what `Store.attach` raises."""
    with resource_errors(root.path, key, root):
        content = content_in_place(key, path, format, allow_pickle=allow_pickle)
        if content.boxes is not None:
            need_boxes(root, deadline)
    return put(root, [Draft(encode_key(key), content, expect)], deadline)[0]


def content_in_place(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Content:
    """Returns what a store says of files that it serves where they are. Raises what `Store.attach` raises."""
    refuse_url(path, "attach", "memstore put, or store.put(key, memstore.Snapshot(url).view()), copies what is there")
    with between_forks():
        if _is_of_snapshot(path, format):
            from memstore.snapshot import describe_snapshot as describe_files
        else:
            from memstore.formats import describe_files
    return describe_files(key, path, format, allow_pickle=allow_pickle)


def load_to_copy(key: str, path: str | os.PathLike[str], format: Format | None, *, allow_pickle: bool) -> Any:
    """Returns the value that files have, for a put of a copy. Raises what `Store.attach` raises."""
    with between_forks():
        if _is_of_snapshot(path, format):
            from memstore.snapshot import load_snapshot as load_files
        else:
            from memstore.formats import load_files
    return load_files(key, path, format, allow_pickle=allow_pickle)


def _is_of_snapshot(path: Any, format: str | None) -> bool:
    with between_forks():
        from memstore.snapshot import is_snapshot

    return format is None and isinstance(path, (str, os.PathLike)) and is_snapshot(cast("str | os.PathLike[str]", path))


def export(
    root: Root,
    key: str,
    held: MappedEntry,
    target: str,
    format: Literal["safetensors", "memmap", "torch"],
    *,
    limit: int | None,
    progress: Callable[[int, int], None] | None,
    verify: bool,
    allow_pickle: bool,
) -> None:
    """Writes a held version to files. Raises what `Store.export` raises.

    Args:
        target, limit: as `formats.check_export` returns them.
    """
    with between_forks():
        from memstore.formats import export_value, has_devices

    description = held.record.description
    options = contents.ReadOptions(device="cpu" if has_devices(description) else None)
    value = contents.read(root, key, held, options, verify=verify, allow_pickle=allow_pickle)
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
            allow_pickle=allow_pickle,
        )


# --- Ref: one version of a key, pinned -------------------------------------------------------------------------------


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

    def __init__(self, pin: HeldVersion) -> None:
        self._pin = pin
        self.key, self.version, self.root = pin.key, pin.record.version, pin.root.path

    @overload
    def get(self, *, as_type: type[T], default: D, **options: Unpack[GetOptions]) -> T | D: ...
    @overload
    def get(self, *, as_type: type[T], **options: Unpack[GetOptions]) -> T: ...
    @overload
    def get(self, **options: Any) -> Any: ...
    def get(self, **options: Any) -> Any:
        """Returns the value of exactly this version. Options as in `Store.get`.

        Raises:
            VersionGoneError: the ref arrived after its lease, and the version was overwritten or deleted.
        """
        began = perf_counter() if is_wanted() else 0.0
        pin, as_type = self._pin, options.pop("as_type", None)
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
            log_read(pin.root, "get", self.key, held, began)
        return value if as_type is None else checked(self.key, value, as_type)

    def view(self, **options: Any) -> Any:
        """Returns this version with lazy leaves. Options as in `Store.view`, errors as in `get`."""
        held, pin = self._map(lazily=True), self._pin
        if held is None:
            raise pin.gone()
        return view(pin.root, self.key, held, pin.options, **options)

    def _map(self, *, lazily: bool = False) -> MappedEntry | None:
        """Maps the version anew, since a user may write to what a get returns. Returns None if the version is gone."""
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


def _unknown_option(options: dict[str, Any]) -> TypeError | None:
    unknown = [name for name in options if name not in _OPTIONS]
    if not unknown:
        return None
    takes = ", ".join(("default", "as_type", *_OPTIONS, *_OF_ANY_VERSION))
    return TypeError(f"Ref.get() got an unexpected keyword argument {unknown[0]!r}: it takes {takes}")


@modes.uncompiled_methods
class Pin:
    """A pin of a version: it stays readable for everybody as long as this process has the pin. Made by `Store.pin`.

    It is a context manager, and ends with `close`, with this process, or when nothing refers to it any more. It can't
    be pickled, and a forked child doesn't have it.

    Attributes:
        key: the key.
        version: the version of the key that is pinned.
        root: the folder of the store, as a path.
    """

    __slots__ = ("__weakref__", "_pin", "_timeout", "_use", "key", "root", "version")

    def __init__(self, root: Root, taken: TakenPin, timeout: float) -> None:
        self._use, self._pin, self._timeout = use_root(root), taken, timeout
        self.key, self.version, self.root = taken.row.key.decode(), taken.row.version, root.path

    def close(self) -> None:
        """Ends the pin; the version goes if it was replaced, and only the pin kept it. May be called again.

        Raises:
            StoreTimeoutError: another process held the store's mutex. The pin holds still.
        """
        if self._pin.file.fd >= 0:  # it is closed in a forked child
            with resource_errors(self.root, self.key):
                end_pin(self._use.root, self._pin, deadline_after(self._timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a pin is its process's own: send store.ref({self.key!r}, version={self.version}), or the version, which "
            "the receiver gets or pins by itself while this pin holds"
        )

    def __repr__(self) -> str:
        state = "" if self._pin.file.fd >= 0 else " (closed)"
        return f"<memstore.Pin {self.key!r} version {self.version} in {self.root}{state}>"


_WHERE = {"inline": "in the catalog", "segment": "in its file", "sharded": "in files of ranks", "adopted": "attached"}


def log_read(root: Root, call: str, key: str, held: MappedEntry, began: float) -> None:
    """Tells of a read that began at this time of `perf_counter`, in a debug line and to the observer."""
    record, took = held.record, (perf_counter() - began) * 1e3
    tell(call, root.path, (key,), record.nbytes or len(record.objects), began)
    where = _WHERE.get(record.kind, "of rows")
    if record.hosts is not None:
        where += ", on another host"
    put = f"version {record.version} of put {record.put_id:#x}"
    nbytes = record.nbytes or len(record.objects)
    log.debug("%s: %s %r: %s, %d bytes %s, %.3f ms", root.path, call, key, put, nbytes, where, took)


# --- The description of an entry, as Store.info gives it -------------------------------------------------------------


def describe(root: Root, key: str, timeout: float) -> EntryInfo:
    """Describes the current version of a key, without reading its tensors.

    Args:
        timeout: seconds for other hosts.

    Raises:
        KeyNotFoundError: no such key.
        CorruptionError: its description is damaged.
    """
    name = encode_key(key)
    record = index.find(root, name, timeout)
    if record is None:
        raise absent(root, name)
    plan = structure.plan_of(plan_bytes(record.description))
    shards = _shards(root, key, record, plan)
    leaves = tuple(
        LeafInfo(*leaf, shards.get(plan.same.get(i, i), ())) for i, leaf in enumerate(structure.leaf_table(plan))
    )
    has_more = (
        record.kind in ("adopted", "sharded") or record.is_delta
    )  # its data section has the headers of the files too
    return EntryInfo(
        key=key,
        version=record.version,
        kind=record.kind,
        nbytes=structure.stored_bytes(plan) if has_more else record.nbytes,
        created=record.created,
        structure=structure.structure_text(plan),
        leaves=leaves,
        files=files_of(root, record),
        owner=owner_name(root, name),
        recovered=is_recovered(root, name, record.version),
        spilled=index.is_spilled(root, record),
    )


def _shards(root: Root, key: str, record: Record, plan: structure.Plan) -> dict[int, tuple[ShardInfo, ...]]:
    """Returns, by leaf, the parts that ranks have put. Raises CorruptionError."""
    files, bases = files_of(root, record), [extent.base for extent in record.extents]

    def file_at(place: int) -> str:
        number = bisect_right(bases, place) - 1
        if number < 0:
            raise CorruptionError(f"{key!r}: a part of it lies in none of its {len(files)} files", key=key)
        return files[number]

    found = {
        leaf: tuple(ShardInfo(*one.box, one.rank, file_at(one.place)) for one in sorted(boxes))
        for leaf, boxes in contents.boxes_of(record).items()
    }
    for leaf, rank in contents.box_table(record).ranks.items():
        if 0 <= leaf < len(plan.leaves):
            at = plan.leaves[leaf]
            found[leaf] = (ShardInfo((0,) * len(at.shape), at.shape, rank, file_at(at.offset)),)
    return found


# --- Arguments that nearly always mean something else than they say --------------------------------------------------


_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|npu|xla|mtia|meta)(:[0-9]+)?")


def doubtful_default(key: str, default: Any, held: MappedEntry | None) -> str | None:
    """Says, for a warning, what the default of a get was probably meant to be. Returns None where that isn't plain.

    A device or a dtype is nearly never meant as a default, unless the key says that such a thing is its value.

    Args:
        held: the value that is there: then the name of a part of it is doubtful too. None: there is no such key.
    """
    if held is not None and not held.record.nbytes:
        return None  # it has no tensors
    is_device = isinstance(default, torch.device) or (type(default) is str and _DEVICE.fullmatch(default))
    name = "device" if is_device else "dtype" if isinstance(default, torch.dtype) else None
    if name is not None and name not in key:
        shown = repr(str(default)) if is_device else repr(default)
        return (
            f"get({key!r}, {shown}): the second argument is the default, which is returned as it is if there is no "
            f"such key; for values of this {name} write {name}={shown}"
        )
    if held is not None and type(default) is str and default in _first_names(held.record.description):
        return (
            f"get({key!r}, {default!r}): the second argument is the default, which is returned as it is if there is no "
            f"such key; for that part of the value write get({key!r})[{default!r}]"
        )
    return None


def _first_names(description: bytes) -> set[str | int]:
    """Returns the names of a value's parts, as far as they can be told without its containers."""
    with contextlib.suppress(UnknownKindError, *UNDECODABLE):
        return {leaf.name[0] for leaf in outline(description)[1] if leaf.name}
    return set()
