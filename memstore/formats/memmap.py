"""Folders that `TensorDict.memmap` writes, served in place; and folders that `TensorDict.load_memmap` reads, written.

    FOLDER/meta.json, KEY.memmap, KEY/...        a TensorDict: its keys, shapes, dtypes; bytes; what is nested
    FOLDER/meta.json, _tensordict/...            a tensorclass: its class
    FOLDER/meta.json, 0/..., 1/..., 2/...        a lazy stack
    FOLDER/meta.json [, other.pickle]            NonTensorData and NonTensorStack: the data itself

tensordict's own loader is not used for serving: it would map each file for itself, unpickle, and run classes' code. A
get gives what that loader makes of a folder, with one difference: leaves are plain tensors.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import errno
import os
import stat
from typing import Any, NamedTuple

import numpy as np
import tensordict
import torch

from memstore import structure
from memstore._compat import saved_classes, saved_dtypes, saved_file_name
from memstore._parsing import Document
from memstore._wording import an, short
from memstore.engine import ExternalFiles, Leaf, Path, opened
from memstore.errors import UnsupportedValueError, lacks_told
from memstore.formats.files import (
    ByteMeter,
    are_sizes,
    damaged,
    new_file,
    new_folder,
    parse_object,
    parse_object_of_python,
    parse_value,
    read_whole,
    what_special,
)
from memstore.structure import (
    DTYPES,
    MAX_DEPTH,
    TENSOR,
    MalformedError,
    RefusedError,
    Tree,
    Walk,
    class_name,
    count,
    name_of,
    read_pickle,
)

# --- Reading ---------------------------------------------------------------------------------------------------------


_VERSION = 1  # of the layout
_META = "meta.json"
_LONGEST_NAME = 255  # bytes, of a file
_MOST_MEMBERS = 1 << 17  # of stacks of values that are stacks again: each takes a kilobyte
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
PICKLES = ("other.pickle", "pickle.pkl")


def read_memmap(path: str, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    reader = _MemmapReader(sources, allow_pickle)
    tree = reader.read(os.path.realpath(path), _NOTHING)
    return structure.describe_external_tree(tree, reader.leaves, reader.walk.objects)


class _OuterTensorDict(NamedTuple):
    """The part that an entry takes over from the TensorDict that it is in."""

    batch: tuple[int, ...] = ()
    device: str | None = None
    names: list[str | None] | None = None


_NOTHING = _OuterTensorDict()


class _MemmapReader:
    """Reads the folders of one value, in the order of its tree."""

    def __init__(self, sources: ExternalFiles, allow_pickle: bool) -> None:
        self.sources, self.allow_pickle = sources, allow_pickle
        self.leaves: list[Leaf] = []
        self.walk = Walk(allow_pickle)
        self.walk.depth = 1  # so that containers of objects become one object, as they do in a TensorDict
        self._depth = self._members = 0

    def read(self, folder: str, above: _OuterTensorDict) -> Tree:
        """Reads the tree of what a folder holds."""
        try:
            found = os.lstat(folder)
        except OSError as error:
            if self._depth and error.errno in _ABSENT:
                damaged(folder, "it is missing")
            raise
        if not stat.S_ISDIR(found.st_mode):
            damaged(folder, "it is no folder, but a link or a file")
        if self._depth == MAX_DEPTH:
            raise UnsupportedValueError(f"{folder}: more than {MAX_DEPTH} levels of folders")
        self._depth += 1
        path = f"{folder}/{_META}"
        try:
            meta = parse_object_of_python(path, read_whole(path))
        except FileNotFoundError:
            damaged(path, "it is missing")
        version = parse_value(path, meta.get("_format_version"))
        if isinstance(version, int) and version > _VERSION:
            raise UnsupportedValueError(f"{folder}: version {version} of TensorDict's layout; {_VERSION} is known")
        tree = self._container(folder, meta, above)
        self._depth -= 1
        return tree

    def _container(self, folder: str, meta: Document, above: _OuterTensorDict) -> Tree:
        kind = _class_of(folder, meta)
        if kind in (tensordict.TensorDict, tensordict.TensorDictParams):
            return self._tensordict(folder, meta)
        if kind is tensordict.LazyStackedTensorDict:
            return self._stack(folder, meta, above)
        if kind is tensordict.NonTensorStack:
            return self._values(folder, meta, above)
        if kind in (tensordict.NonTensorData, tensordict.MetaData):
            name = "nontensor" if kind is tensordict.NonTensorData else "metadata"
            fields = self._fields(folder, meta)
            if "data" not in fields:
                damaged(f"{folder}/{_META}", "it has no data")
            return (name, above.batch, "cpu", above.names, False, self._visit(folder, fields["data"]))
        if tensordict.is_tensorclass(kind):
            return self._tensorclass(folder, meta, kind, above)
        raise UnsupportedValueError(f"{folder}: a {kind.__qualname__}, which can't be attached")

    # --- TensorDicts --------------------------------------------------------------------------------------------------

    def _tensordict(self, folder: str, meta: Document) -> Tree:
        path = f"{folder}/{_META}"
        batch, device, names = (parse_value(path, meta.get(name)) for name in ("shape", "device", "_names"))
        batch, device = [] if batch is None else batch, "None" if device is None else device
        if not are_sizes(batch):
            damaged(path, "it has no batch size")
        if device not in ("None", "cpu"):
            raise UnsupportedValueError(f"{folder}: a TensorDict of device {short(device)}, whose files are the CPU's")
        above = _OuterTensorDict(
            tuple(batch), None if device == "None" else device, names if isinstance(names, list) else None
        )
        entries = {key: parse_object(path, text) for key, text in meta.items() if bytes(text).startswith(b"{")}
        tensors = [key for key, entry in entries.items() if "type" not in entry]
        nested = [key for key, entry in entries.items() if "type" in entry]
        for key in tensors:
            self.leaves.append(self._leaf(folder, key, entries[key]))
        trees = [self.read(_path_of(folder, key, ""), above) for key in nested]
        return ("td", *above, False, tensors + nested, [TENSOR] * len(tensors) + trees)

    def _leaf(self, folder: str, key: str, entry: Document) -> Leaf:
        path, meta = _path_of(folder, key, ".memmap"), f"{folder}/{_META}"
        shape, dtype, is_nested = (parse_value(meta, entry.get(name)) for name in ("shape", "dtype", "is_nested"))
        dtype = str(dtype).removeprefix("torch.")
        if not are_sizes(shape) or dtype not in DTYPES:
            damaged(meta, f"its entry {short(key)} is no shape and dtype")
        if is_nested:
            raise UnsupportedValueError(f"{path}: a nested tensor, which can't be attached: load it, and put it")
        nbytes = count(shape) * DTYPES[dtype].itemsize
        if not nbytes:  # no file, or an empty one
            return Leaf((), dtype, tuple(shape), None, 0, 0)
        try:
            with opened(path) as (_, found):
                if found.st_size < nbytes:
                    damaged(path, f"it has {found.st_size:,} bytes instead of {nbytes:,}: it is truncated")
                base = self.sources.add(path, found)
        except OSError as error:
            if error.errno in _ABSENT:
                damaged(path, f"{meta} names it, and it is missing")
            raise
        return Leaf((), dtype, tuple(shape), None, base, nbytes)

    def _stack(self, folder: str, meta: Document, above: _OuterTensorDict) -> Tree:
        dim, name = (parse_value(f"{folder}/{_META}", meta.get(name)) for name in ("stack_dim", "stack_dim_name"))
        count = 0
        while os.path.lexists(f"{folder}/{count}"):
            count += 1
        if type(dim) is not int or dim < 0 or not (name is None or isinstance(name, str)) or not count:
            damaged(f"{folder}/{_META}", "it describes no lazy stack")
        inner = above._replace(batch=above.batch[:dim] + above.batch[dim + 1 :], names=None)
        return ("lazy", "", dim, name, False, [self.read(f"{folder}/{i}", inner) for i in range(count)])

    def _tensorclass(self, folder: str, meta: Document, kind: Any, above: _OuterTensorDict) -> Tree:
        try:
            name = class_name(kind)
        except RefusedError as error:
            raise UnsupportedValueError(f"{folder}: {error.reason}") from None
        fields = {key: value for key, value in self._fields(folder, meta).items() if value is not None}
        inner = self.read(f"{folder}/_tensordict", above)
        return ("tensorclass", name, inner, list(fields), [self._visit(folder, value) for value in fields.values()])

    # --- what is no tensor --------------------------------------------------------------------------------------------

    def _values(self, folder: str, meta: Document, above: _OuterTensorDict) -> Tree:
        data, device = (parse_value(f"{folder}/{_META}", meta.get(name)) for name in ("data", "device"))
        if data is None:
            return self._stack(folder, meta, above)
        if data == PICKLES[1]:
            data = self._unpickle(f"{folder}/{data}")
        device = device or above.device
        if not isinstance(data, list) or not data or device not in (None, "cpu"):
            damaged(f"{folder}/{_META}", "it has no data of a NonTensorStack")
        return self._stacked(folder, data, device, list(above.names or ()))

    def _stacked(
        self, folder: str, data: list[Any], device: str | None, names: list[str | None], depth: int = 0
    ) -> Tree:
        """Stacks as tensordict stacks a list: lists of one length become stacks of stacks."""
        name = names[0] if names else None
        stacked = all(isinstance(item, list) and len(item) == len(data[0]) for item in data)
        if not stacked and device is None and name is None:
            return ("values", False, self._visit(folder, data))
        self._members += len(data)
        if depth == MAX_DEPTH or self._members > _MOST_MEMBERS:
            raise UnsupportedValueError(
                f"{folder}: a NonTensorStack of more than {MAX_DEPTH} dimensions, or {_MOST_MEMBERS:,} members, which "
                "can't be attached: load it, and put what is in it"
            )
        if not stacked:
            members = [("nontensor", (), device, None, False, self._visit(folder, item)) for item in data]
        elif data[0]:
            members = [self._stacked(folder, item, device, names[1:], depth + 1) for item in data]
        else:
            raise UnsupportedValueError(f"{folder}: a NonTensorStack of empty ones, which can't be attached")
        return ("lazy", "values", 0, name, False, members)

    def _fields(self, folder: str, meta: Document) -> dict[str, Any]:
        """Reads the fields of a tensorclass that are no tensors."""
        fields = {key: parse_value(f"{folder}/{_META}", text) for key, text in meta.items() if key != "_type"}
        path = f"{folder}/{PICKLES[0]}"
        if os.path.lexists(path):
            pickled = self._unpickle(path)
            if not isinstance(pickled, dict):
                damaged(path, "its pickle is no dict")
            fields |= pickled
        return fields

    def _unpickle(self, path: str) -> Any:
        if not self.allow_pickle:
            raise UnsupportedValueError(
                f"{path} is a pickle, which can run code: open the store with allow_pickle=True if you trust whoever "
                "wrote it"
            )
        try:
            return read_pickle(read_whole(path))
        except MalformedError as error:
            damaged(path, str(error))

    def _visit(self, folder: str, value: Any) -> Tree:
        try:
            return self.walk.visit(value)
        except RefusedError as error:
            raise UnsupportedValueError(f"{folder}: {error.message()}") from None


def _class_of(folder: str, meta: Document) -> Any:
    """Returns the class that a folder was saved from, among those that this process knows."""
    identity, text = (parse_value(f"{folder}/{_META}", meta.get(name)) for name in ("_class", "_type"))
    for kind in saved_classes():
        known = f"{'tensordict' if getattr(tensordict, kind.__qualname__, None) is kind else kind.__module__}"
        if text == str(kind) or (isinstance(identity, str) and identity == f"{known}:{kind.__qualname__}"):
            return kind
    if not isinstance(text, str):
        damaged(f"{folder}/{_META}", "it names no class")
    raise UnsupportedValueError(
        f"{folder} was saved from {short(text)}, which this process doesn't know: import its module"
    )


def _path_of(folder: str, key: str, ending: str) -> str:
    """Returns where an entry lies: percent-encoded, or by older writers under the key itself."""
    name = f"{saved_file_name(key)}{ending}"
    if len(name.encode()) > _LONGEST_NAME:
        damaged(f"{folder}/{_META}", f"its entry {short(key)} has a longer name than any file")
    path = f"{folder}/{name}"
    plain = key not in ("", ".", "..") and "/" not in key and "\0" not in key
    if plain and not os.path.lexists(path) and os.path.lexists(f"{folder}/{key}{ending}"):
        return f"{folder}/{key}{ending}"
    return path


# --- Writing ---------------------------------------------------------------------------------------------------------


_RESERVED_KEYS = frozenset({"shape", "device", "_type"})  # names that meta.json uses itself, and would lose


def write_memmap(path: str, value: Any, meter: ByteMeter, *, durable: bool, allow_pickle: bool) -> None:
    """Writes the folder that `TensorDict.load_memmap` reads. tensordict makes it, but for the bytes of the tensors.

    Those it would write through mappings, where a full disk ends the process.
    """
    source = as_collection(value)
    meter.total = sum(tensor.numel() * tensor.itemsize for _, tensor in structure.iter_tensors(source))
    with new_folder(path, durable=durable) as folder:
        for tensor, name in make_folder(folder, source, allow_pickle=allow_pickle):
            with new_file(name, meter, durable=False) as file:
                file.write_tensor(tensor)


def as_collection(value: Any) -> Any:
    """Returns the TensorDict that is written for a value. Raises UnsupportedValueError for a leaf that has none."""
    source = _as_collection(value, ())
    for name, tensor in structure.iter_tensors(source):
        special = what_special(tensor)
        if special:
            raise _refusal(name, special)
        if str(tensor.dtype) not in saved_dtypes():
            raise _refusal(name, f"{tensor.dtype}, which tensordict doesn't load")
        for part in _RESERVED_KEYS.intersection(name):
            raise _refusal(name, f"the key {part!r}, which the layout uses itself")
    return source


def make_folder(folder: str, source: Any, *, allow_pickle: bool) -> list[tuple[torch.Tensor, str]]:
    """Writes all of a TensorDict but the bytes of its tensors into an empty folder.

    Returns: the tensors that have elements, each with the file that is to have them, which has holes as yet.
    """
    try:
        with lacks_told(folder):
            target = source.memmap_like(folder, copy_existing=True)
    except OSError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedValueError(f"TensorDict.memmap can't write it: {error}") from error
    for parent, _, names in () if allow_pickle else os.walk(folder):
        if not set(PICKLES).isdisjoint(names):
            what = os.path.relpath(parent, folder).split(os.sep)
            raise _refusal(tuple(what), "an object that would be pickled: open the store with allow_pickle=True")
    pairs = zip(structure.iter_tensors(source), structure.iter_tensors(target), strict=True)
    return [(tensor, str(place.filename)) for (_, tensor), (_, place) in pairs if tensor.numel()]  # type: ignore[attr-defined]


def _as_collection(value: Any, path: Path) -> Any:
    """Makes TensorDicts without a batch size of dicts, and of what lies in them."""
    if tensordict.is_tensor_collection(value):
        return value
    if not isinstance(value, dict):
        raise _refusal(path, f"{an(type(value))} instead of a TensorDict, tensorclass or dict")
    entries: dict[str, Any] = {}
    for key, entry in value.items():
        if type(key) is not str:
            raise _refusal((*path, name_of(key)), "a key that is no str")
        if isinstance(entry, dict):
            entries[key] = _as_collection(entry, (*path, key))
        elif isinstance(entry, torch.Tensor) or tensordict.is_tensor_collection(entry):
            entries[key] = entry
        elif next(structure.iter_tensors(entry), None) is not None or isinstance(entry, np.ndarray):
            raise _refusal((*path, key), f"{an(type(entry))} with tensors in it")
        else:
            entries[key] = tensordict.NonTensorData(entry)
    return tensordict.TensorDict(entries, batch_size=[])


def _refusal(path: Path, why: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"{structure.render_path(path)}: {why}, which can't be exported as memmap")
