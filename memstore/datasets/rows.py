"""Rows in memory that processes share: what a row is, which ones an index means, how they are read and written.

A spec says what a row is: `rows_of_spec` turns it into an example of all rows, `spec_of` shows it as a user would write
it, `spec_of_batch` takes it from rows. `take_batch` compares rows with a plan, and returns their bits by leaf.

`put_entry` puts a new mutable entry: a dataset, or a replay buffer. `reduce` and `opened` pickle one as a reference,
and open it again. The rules: docs/decisions/015. The control page, the mutex and the states are the engine's.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_non_tensor,  # pyright: ignore[reportUnknownVariableType]
    is_tensor_collection,
)

from memstore import structure
from memstore._threads import call_late
from memstore._wording import an_instance
from memstore.engine import (
    CONTROL_SIZE,
    Content,
    Creation,
    Draft,
    Header,
    Leaf,
    MutableDescription,
    MutableEntry,
    Path,
    Record,
    Root,
    Span,
    WritableMemory,
    close_root,
    deadline_after,
    elsewhere_of,
    encode_mutable,
    index,
    is_fellow,
    need_mutable,
    new_page,
    open_mutable,
    open_root,
    put,
    resource_errors,
)
from memstore.errors import (
    AlreadyExistsError,
    CrossHostError,
    MemstoreError,
    StructureMismatchError,
    UnsupportedValueError,
    VersionConflictError,
    VersionGoneError,
)
from memstore.listing import open_elsewhere
from memstore.rows import RowIndex
from memstore.structure import DTYPE_NAMES, DTYPES, MAX_DEPTH, Plan, render_path, tensor_of_array, traits, why_no_memory
from memstore.view import StoredTensor

# --- Specs -----------------------------------------------------------------------------------------------------------


Spec = Any
"""`{"x": ((84, 84, 4), torch.uint8), "y": ((), torch.int64), "more": {...}}`, one `(shape, dtype)`, or an example of a
row: a tensor, a TensorDict, a tensorclass, or a dict of tensors.
"""

CAPACITY_LIMIT = 1 << 48  # rows: so that no product of it overflows


def check_capacity(capacity: Any) -> None:
    """Raises TypeError, ValueError for what is no number of rows that there may be room for."""
    if type(capacity) is not int or not 0 < capacity <= CAPACITY_LIMIT:
        kind = ValueError if type(capacity) is int else TypeError
        raise kind(f"capacity is a number of rows, 1 to {CAPACITY_LIMIT:,}, and not {capacity!r:.100}")


def rows_of_spec(spec: Spec, capacity: int) -> Any:
    """Makes a value of `capacity` rows that takes no memory: each leaf is one element, seen often.

    Raises:
        TypeError, ValueError: it is no spec; the message names the leaf, and says what one is.
        UnsupportedValueError: a leaf that can't be written in place.
    """
    check_capacity(capacity)
    if is_tensor_collection(spec):
        _check_tensors(spec, "spec")
        found = spec.apply(
            functools.partial(_leaf, capacity=capacity, path=()), batch_size=[capacity, *spec.batch_size], inplace=False
        )
        if found is None or not len(list(found.keys(include_nested=True, leaves_only=True))):
            raise ValueError("spec has no leaf: a row has at least one tensor")
        _keep_batch_sizes(found, spec, capacity)
        return found
    if isinstance(spec, Mapping):
        return _of_dict(cast("Mapping[Any, Any]", spec), capacity, ())
    return _leaf(spec, capacity, ())


def spec_of_batch(value: Any, path: Path = ()) -> Spec:
    """Returns an example of a row of a batch, which takes no memory. Raises UnsupportedValueError or ValueError."""
    if isinstance(value, np.ndarray):
        value = over_array(cast("Array", value), path)
    if isinstance(value, torch.Tensor):
        check_dense(value, render_path(path))
        if not value.ndim:
            raise ValueError(f"{render_path(path)} has no dimension, and so no rows")
        return torch.empty((), dtype=value.dtype, device="cpu").expand(value.shape[1:])
    entries: Any = entries_of(value, path)
    if not is_tensor_collection(value):
        return {key: spec_of_batch(inner, (*path, key)) for key, inner in entries.items()}
    if not value.batch_size:
        raise ValueError(f"{render_path(path)} is {an_instance(value)} without a batch dimension: it has no rows")
    _check_tensors(value, render_path(path))
    return value.apply(spec_of_batch, batch_size=value.batch_size[1:], inplace=False)


def _keep_batch_sizes(found: Any, example: Any, capacity: int) -> None:
    """Keeps the batch sizes of nested collections, which may count more dimensions than the one that they are in."""
    for key, inner in example.items():
        if is_tensor_collection(inner):
            below = found.get(key)
            below.batch_size = [capacity, *inner.batch_size]
            _keep_batch_sizes(below, inner, capacity)


def _check_tensors(example: Any, name: str) -> None:
    """Checks what `apply` doesn't tell of: names, and leaves that are no tensors."""
    for key, inner in example.items():
        below = f"{name}[{key!r}]"
        if is_non_tensor(inner):
            raise UnsupportedValueError(f"{below} is no tensor: rows are of tensors, and nothing else")
        if is_tensor_collection(inner):
            _check_tensors(inner, below)
        else:
            check_dense(inner, below)


def _of_dict(spec: Mapping[Any, Any], capacity: int, path: Path) -> TensorDictBase:
    if not spec:
        raise ValueError(f"{_render(path)} is empty: a row has at least one tensor")
    if len(path) >= MAX_DEPTH:
        raise UnsupportedValueError(f"{_render(path[:3])}...: more than {MAX_DEPTH} levels of containers")
    entries: dict[str, Any] = {}
    for key, inner in spec.items():
        if not isinstance(key, str):
            raise TypeError(f"{_render(path)} has the key {key!r}: keys are text")
        below = (*path, key)
        if isinstance(inner, Mapping) or is_tensor_collection(inner):
            entries[key] = _of_dict(cast("Mapping[Any, Any]", inner), capacity, below)
        else:
            entries[key] = _leaf(inner, capacity, below)
    return TensorDict(entries, batch_size=[capacity])


def _leaf(spec: Any, capacity: int, path: Path) -> torch.Tensor:
    if isinstance(spec, torch.Tensor):
        check_dense(spec, _render(path))
        shape, dtype = tuple(spec.shape), spec.dtype
    else:
        shape, dtype = _shape_and_dtype(spec, _render(path))
    if dtype not in DTYPE_NAMES or dtype in traits.QUANTIZED:
        raise UnsupportedValueError(f"{_render(path)}: {dtype} can't be written in place")
    return torch.empty((), dtype=dtype, device="cpu").expand(capacity, *shape)


def _render(path: Path) -> str:
    return "spec" + "".join(f"[{key!r}]" for key in path)


def _shape_and_dtype(spec: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    what = (
        f"{name} is {spec!r:.200}: a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, or an "
        f"example of a row, of tensors{_meant(spec)}"
    )
    if not isinstance(spec, Sequence) or isinstance(spec, str):
        raise TypeError(what)
    pair = list(cast("Sequence[Any]", spec))
    if len(pair) != 2 or not isinstance(pair[1], torch.dtype) or not isinstance(pair[0], Sequence):
        raise TypeError(what)
    shape = tuple(cast("Sequence[Any]", pair[0]))
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name}: the shape {shape!r} of a row has something else than sizes")
    return shape, pair[1]


def spec_of(plan: Plan) -> Any:
    """Returns the spec as a user would give it: nested dicts of (shape, dtype) of a row, or one such pair."""
    shown: dict[str, Any] = {}
    for leaf in plan.leaves:
        pair = (tuple(leaf.shape[1:]), DTYPES[leaf.dtype])
        if not leaf.name:
            return pair
        at = shown
        for name in leaf.name[:-1]:
            at = at.setdefault(str(name), {})
        at[str(leaf.name[-1])] = pair
    return shown


def _meant(spec: Any) -> str:
    """Guesses what was meant by a value that is no spec, for an error."""
    if isinstance(spec, np.ndarray):
        return ": torch.as_tensor(...) of the array is one"
    if not isinstance(spec, (list, tuple)) or len(cast("Sequence[Any]", spec)) != 2:
        return ""
    shape, dtype = cast("Sequence[Any]", spec)
    if isinstance(shape, (torch.dtype, type, str)):
        shape, dtype = dtype, shape
    shape = (shape,) if type(shape) is int else shape
    found = _torch_dtype(dtype)
    if found is None or not isinstance(shape, (list, tuple)):
        return ""
    return f": write ({tuple(cast('Sequence[Any]', shape))!r:.100}, {found})"


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """Returns torch's dtype for one of numpy's or Python's; None if there is none."""
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        found: Any = getattr(torch, str(np.dtype(dtype)), None)
    except (TypeError, ValueError, SyntaxError):  # of np.dtype, for texts
        return None
    return found if isinstance(found, torch.dtype) else None


# --- Batches ---------------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NUMPY_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}  # not every dtype has one


class Batch(NamedTuple):
    """Rows to be stored: for each leaf an array of their bits. Nothing is copied but from devices."""

    rows: int
    arrays: tuple[Array, ...]


def take_batch(key: str, plan: Plan, value: Any, *, single: bool = False) -> Batch:
    """Compares a batch with what the rows of `plan` are; `single`: one row, without the dimension that counts them.

    Raises:
        StructureMismatchError: other leaves, shapes or dtypes, or leaves of different numbers of rows. All that is
            wrong is listed.
        UnsupportedValueError: a leaf that has no bytes.
    """
    with naming(key):
        found = dict(_leaves(value, ()))
    known = {leaf.name for leaf in plan.leaves}
    wrong = [f"{render_path(name)} isn't in the spec" for name in found if name not in known]
    tensors: list[torch.Tensor] = []
    for leaf in plan.leaves:
        tensor = found.get(leaf.name)
        if tensor is None:
            wrong.append(f"{render_path(leaf.name)} is missing")
        elif (difference := _difference(leaf, tensor, single=single)) is not None:
            wrong.append(difference)
        else:
            tensors.append(tensor[None] if single else tensor)
    counts = {len(tensor) for tensor in tensors}
    if not wrong and len(counts) > 1:
        wrong.append(f"its leaves have {' and '.join(map(str, sorted(counts)))} rows")
    if wrong:
        what = "row" if single else "batch"
        raise StructureMismatchError(f"{key!r}: this {what} doesn't fit: {'; '.join(wrong)}", key=key)
    return Batch(counts.pop(), tuple(map(_bits, tensors)))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, _with_bytes(value, path)
    elif isinstance(value, np.ndarray):
        yield path, over_array(cast("Array", value), path)
    else:
        for key, inner in entries_of(value, path).items():
            yield from _leaves(inner, (*path, key))


def over_array(array: Array, path: Path) -> torch.Tensor:
    """Returns the values of an array as a tensor. Raises UnsupportedValueError."""
    tensor = tensor_of_array(array)
    if tensor is None:
        raise UnsupportedValueError(f"{render_path(path)} is a numpy array of {array.dtype}, which no tensor can have")
    return tensor


def entries_of(value: Any, path: Path) -> Mapping[Any, Any]:
    """Returns the entries of a container. Raises UnsupportedValueError where it is none, or nests too deeply."""
    if len(path) >= MAX_DEPTH:
        raise UnsupportedValueError(f"{render_path(path[:3])}...: more than {MAX_DEPTH} levels of containers")
    if isinstance(value, Mapping) or (is_tensor_collection(value) and not is_non_tensor(value)):
        return cast("Mapping[Any, Any]", value)
    raise UnsupportedValueError(
        f"{render_path(path)} is {an_instance(value)}: rows are of tensors and numpy arrays{_instead_of(value)}"
    )


def _instead_of(value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return f": write torch.tensor({value!r})"
    if not isinstance(value, (list, tuple)) or not value:
        return ""
    first: Any = cast("Sequence[Any]", value)[0]
    if isinstance(first, torch.Tensor) or is_tensor_collection(first):
        return ": torch.stack(...) of it is a batch"
    if isinstance(first, Mapping):
        return ": a batch is one dict, with torch.stack(...) of what the rows have under each key"
    return ": torch.tensor(...) of it is one" if isinstance(first, (bool, int, float)) else ""


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Raises UnsupportedValueError where rows can't be such tensors."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedValueError(f"{name} is a tensor of another layout, {kind}: rows are of dense tensors")


def _with_bytes(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Returns the tensor, on the CPU, once it is known to have memory. Raises UnsupportedValueError."""
    if isinstance(tensor, StoredTensor):
        return tensor.clone()
    check_dense(tensor, render_path(path))
    reason = why_no_memory(tensor)
    if reason is not None:
        raise UnsupportedValueError(f"{render_path(path)} is {reason}; rows are of dense tensors")
    return tensor.detach().cpu()


def _difference(leaf: Leaf, tensor: torch.Tensor, *, single: bool) -> str | None:
    row, dtype = tuple(leaf.shape[1:]), DTYPES[leaf.dtype]
    shape = tuple(tensor.shape)
    if tensor.dtype is dtype and (shape == row if single else shape[1:] == row and bool(shape)):
        return None
    expected = list(row) if single else ["rows", *row]
    return f"{render_path(leaf.name)} is {tensor.dtype} of shape {list(shape)}, and takes {dtype} of shape " + str(
        expected
    ).replace("'", "")


def _bits(tensor: torch.Tensor) -> Array:
    """Returns a tensor's bits as integers of the same size: numpy has not every dtype."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain.view(_SAME_SIZE[plain.dtype.itemsize]).numpy()


class naming:
    """Gives errors of what the caller has given the key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MemstoreError):
            error.key = self._key


# --- Indices ---------------------------------------------------------------------------------------------------------


_BOOLEAN = (torch.bool, np.dtype(np.bool_))


class NoLeafError(KeyError):
    """A KeyError whose message is printed as it is, without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def as_name(index: Any) -> tuple[str, ...] | None:
    """Returns the names that lead to a leaf or a part of the spec, if the index is a str or a tuple of them."""
    if isinstance(index, str):
        return (index,)
    return index if isinstance(index, tuple) and index and all(isinstance(name, str) for name in index) else None  # type: ignore[reportUnknownVariableType]


def as_row(index: Any) -> int | None:
    """Returns the number of one row, if the index is one: a Python integer, numpy's, or a tensor without dimensions.

    Raises TypeError for a tuple: `dataset[3, 0]` is the first element of a row elsewhere, and means nothing here.
    """
    if isinstance(index, tuple):
        parts = cast("tuple[Any, ...]", index)
        column = next((one for one in parts if isinstance(one, str)), None)
        first = "the rows first, as in dataset[3][0], or give a list of rows"
        instead = first if column is None else f"one after the other, as in dataset[{column!r}][0:2]"
        raise TypeError(
            f"{index!r:.100} is a tuple, and a dataset is indexed by rows, or by the name of a column: take {instead}"
        )
    if type(index) is bool or getattr(index, "dtype", None) in _BOOLEAN or getattr(index, "ndim", 0):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


def in_range(row: int, length: int, key: str) -> int:
    """Returns the number of a row from 0 on. Raises IndexError."""
    if not -length <= row < length:
        if not length:
            raise IndexError(f"row {row:,} of {key!r}, which has no rows yet")
        allowed = f"from {-length:,} to {length - 1:,}"
        raise IndexError(f"row {row:,} of {key!r}, which has {length:,} by now: rows are {allowed}")
    return row + length if row < 0 else row


def places_of(index: Any, length: int, key: str) -> tuple[slice | np.ndarray[Any, Any], int]:
    """Returns the rows that are to be written, as numpy takes them, and how many they are.

    Raises IndexError, TypeError, ValueError.
    """
    if not isinstance(index, slice):
        rows = RowIndex(index).rows(length, repr(key)).numpy()
        return rows, len(rows)
    start, stop, step = index.indices(length)
    count = len(range(start, stop, step))
    if not count:  # a start or stop of -1, before the first row, would be taken for the last one
        return slice(0, 0), 0
    return slice(start, None if stop < 0 else stop, step), count


# --- Rows of an open entry -------------------------------------------------------------------------------------------


def arrays_over(plan: Plan, memory: Array) -> tuple[Array, ...]:
    """Returns for each leaf the bits of all rows, over the data section."""
    arrays: list[Array] = []
    for leaf in plan.leaves:
        kind = NUMPY_SAME_SIZE[DTYPES[leaf.dtype].itemsize]
        arrays.append(np.ndarray(leaf.shape, kind, memory, leaf.offset))
    return tuple(arrays)


def dataset_capacity(record: Record) -> int:
    """Raises CorruptionError."""
    return structure.capacity_of(record.description, record.nbytes)


class Rows:
    """Rows of an open entry: all that there is room for, whole ones and others.

    Attributes:
        plan: of all of them.
        arrays: for each leaf the bits of them.
        value: the same as tensors, in the structure of a row. Users get no part of these: see `shared`.
    """

    def __init__(self, entry: MutableEntry) -> None:
        record = entry.record
        self._entry = entry
        self.plan = structure.plan_of_rows(record.description, record.nbytes)
        self._memory = np.asarray(entry.mapping)[record.start : record.start + record.nbytes]
        self.arrays = arrays_over(self.plan, self._memory)
        self.value: Any = structure.rebuild(self.plan, b"", self._memory, entry.mapping)

    def shared(self, index: int | slice, value: Any = None) -> Any:
        """Returns rows of the part `value`, or of all, as tensors over the memory that the processes share.

        Each has a storage of its own: `share_memory_` moves a storage elsewhere, with all tensors over it, and torch
        saves it whole.
        """

        def own(view: torch.Tensor) -> torch.Tensor:
            return structure.in_own_storage(view, self._memory, self._entry.mapping)

        with torch.inference_mode(False):
            rows = (self.value if value is None else value)[index]
            return own(rows) if isinstance(rows, torch.Tensor) else rows.apply(own)

    def column(self, names: tuple[str, ...], length: int) -> Any:
        """Returns so many rows of a leaf or a part of the spec, as `shared` does.

        Raises KeyError, which lists the leaves.
        """
        found = self.value
        for name in names:
            found = None if isinstance(found, torch.Tensor) else found.get(name, None)
            if found is None:
                asked = names[0] if len(names) == 1 else names
                leaves = [tuple(map(str, leaf.name)) for leaf in self.plan.leaves]
                there = ", ".join(repr(name[0] if len(name) == 1 else name) for name in leaves if name)
                there = there or "rows of one tensor: dataset[:] is all of them"
                raise NoLeafError(f"{self._entry.key!r} has no leaf {asked!r}, but {there}")
        return self.shared(slice(length), found)

    def store(self, batch: Batch, index: Any) -> None:
        """Copies a batch to its rows, by this thread alone: no helper of torch's stores on when its caller is dead."""
        for array, source in zip(self.arrays, batch.arrays, strict=True):
            array[index] = source


# --- Create an entry -------------------------------------------------------------------------------------------------


_OPENED_BY = {
    "dataset": "open it with store.open_dataset({key!r}), or delete it",
    "buffer": "it is a replay buffer, which memstore.ReplayBuffer(store, {key!r}) opens: do that, or delete it",
}
_A_VALUE = "it is an ordinary value: delete it, or take another key"


def control_of(size: int) -> Span:
    """Returns the first tensor of a mutable entry's segment: what the processes share beside the rows."""
    return Span(("__control__",), "uint8", 1, (size,), size)


def check_absent(root: Root, key: str, deadline: float) -> None:
    """Raises AlreadyExistsError before room is reserved: beside a large dataset there may be none for another."""
    record = index.find(root, key.encode(), max(deadline - time.monotonic(), 0))
    if record is not None:
        advice = _OPENED_BY[record.mutable_kind].format(key=key) if record.is_mutable else _A_VALUE
        raise AlreadyExistsError(f"{key!r} is there already, at version {record.version}: {advice}", key=key)


def put_entry(
    root: Root,
    key: str,
    mutable: MutableDescription,
    plan: Plan,
    entries: bytes,
    deadline: float,
    length: int = 0,
    batch: Batch | None = None,
) -> int:
    """Puts a new mutable entry. Returns the version.

    Args:
        plan, entries: of all rows, with `control_of`; the entries of the header.
        length: how many rows are whole from the beginning. They are zeros, or those of a `batch`.

    Raises:
        AlreadyExistsError, StoreFullError: as `Store.create_dataset`.
    """
    need_mutable(root, deadline)
    description = encode_mutable(mutable)
    header = Header(key, root.settings.store, description, b"", entries)
    content = Content(description, b"", plan.nbytes)

    def fill(memory: WritableMemory) -> None:
        data = np.asarray(memory)  # zeros
        data[:CONTROL_SIZE] = np.frombuffer(new_page(length), np.uint8)
        if batch is not None:
            for array, source in zip(arrays_over(plan, data), batch.arrays, strict=True):
                array[:length] = source

    try:
        (version,) = put(root, [Draft(key.encode(), content, 0, header, fill)], deadline)
    except VersionConflictError as error:
        found = error.found
    else:
        return version
    check_absent(root, key, deadline)
    raise AlreadyExistsError(f"{key!r} was there, at version {found}, and was deleted meanwhile: try again", key=key)


# --- References in pickles -------------------------------------------------------------------------------------------


EntryReference = tuple[str, str, str, int, str]  # path, store id, key, put id, mode


def reduce(module: str, restore: str, entry: MutableEntry, *arguments: Any) -> tuple[Any, ...]:
    """Pickles an entry: the function `restore` of a module is called with a reference, and with the arguments."""
    mode = "r+" if entry.writable else "r"
    reference = (entry.root.path, entry.root.settings.store, entry.key, entry.record.put_id, mode)
    return call_late, (module, restore, reference, *arguments)


@contextlib.contextmanager
def opened(
    reference: EntryReference, kind: Literal["dataset", "buffer"], capacity_of: Callable[[Record], int], timeout: float
) -> Generator[MutableEntry]:
    """Opens the entry that a reference names.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: it was deleted or sealed, or another store is there.
        CrossHostError: this is another host of its store.
    """
    path, store, key, put_id, mode = reference
    with resource_errors(path):
        use = open_root(path, "r" if mode == "r" else "r+", Creation(), timeout)
    root = use.root
    root.connect = open_elsewhere
    try:
        if is_fellow(root, store):
            host = elsewhere_of(root).name_of(bytes.fromhex(store))
            raise CrossHostError(
                f"the {kind} {key!r} is on {host}, and its rows are written in place: use it there; rows that other "
                "hosts are to have must be put, or the dataset sealed",
                key=key,
            )
        if root.settings.store != store:
            raise VersionGoneError(f"the {kind} {key!r} is gone: {path} is another store now", key=key)
        with resource_errors(path, key, root):
            deadline, writable = deadline_after(timeout), mode != "r"
            yield open_mutable(root, key, kind, capacity_of, deadline, writable=writable, put_id=put_id)
    finally:
        close_root(use)
