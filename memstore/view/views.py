"""StoredTensor, the lazy leaf that users have, and the views that are made of such leaves.

A leaf has shape, dtype and strides; its bytes are read when it is used. It is made by `lazy_leaf`, read into a DTensor
by `distribute`, pickled as a reference where it is sent (`pack_leaf`), and as a plain tensor where it is saved
(`plain_tensor`). A view (`view`) has the containers of a held version with lazy leaves instead of its tensors;
`load_leaf` loads one of them, and `parts_of` gives all of a value without its containers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from memstore import contents, structure
from memstore._compat import disabled_torch_function, make_subclass, throw_on_mutable_data_ptr
from memstore._threads import between_forks
from memstore._wording import size
from memstore.contents import CHECKSUM_SIZE, StoredBox, count_read
from memstore.engine import Absent, HeldVersion, Leaf, MappedEntry, Path, PinOptions, Root, lies_in_mapping
from memstore.errors import CorruptionError, MemstoreError, ReadOnlyError
from memstore.sharding import Box, local_shape, narrow_to, place
from memstore.structure import (
    DTYPES,
    MalformedError,
    RefusedError,
    Walk,
    check_box,
    check_extent,
    contiguous_stride,
    flattens,
    has_gaps,
    modes,
    need_device,
    over,
    pack,
    traits,
)
from memstore.view.lazy import (
    LazyTensor,
    index_leaf,
    kind_of,
    name_of,
    plain_index,
    read,
    refusal,
    run,
    with_kind,
    wrap,
)
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.source import LeafBytes, PinnedSource, Source, nbytes_of, without_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# --- StoredTensor ----------------------------------------------------------------------------------------------------


_BASIC = frozenset({int, slice, type(None), type(...)})  # indices that make views
_tensor_getitem: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_grad_is_enabled = torch.is_grad_enabled


class NoPointerError(ReadOnlyError, RuntimeError):
    """Refusal of a pointer into a lazy leaf, by which it could be written. Torch's callers expect a RuntimeError."""


@modes.uncompiled_methods
class StoredTensor(LazyTensor):
    """Tensor of a stored value that is read when it is used, and just the part that is used.

    Slicing, transposing or reshaping it returns another lazy leaf, and reads nothing; any other operator reads what it
    needs. It never changes, and can't be written: take a copy with `clone()`. If it is sent to a process, it is a
    reference of some hundred bytes; `torch.save` writes a plain tensor. Get one from `Store.view` or
    `Snapshot.view`.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    __torch_dispatch__ = classmethod(run)  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> StoredTensor:
        raise TypeError("a StoredTensor is part of a stored value: get one from Store.view or Snapshot.view")

    # --- slices -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> torch.Tensor:
        if _dispatch_modes() or _transform() is not None:
            with modes.put_aside():
                return self._indexed(index)
        kind = type(index)
        is_basic = kind in _BASIC or (kind is tuple and _BASIC.issuperset(map(type, index)))
        stored = self.stored
        if not is_basic or stored.wrapped is not None or self.requires_grad:
            return self._indexed(index)
        shown = self.shown[index]
        leaf = make_subclass(StoredTensor, shown)
        leaf.shown, leaf.stored = shown, stored  # what `wrap` does: a call less
        return leaf

    def _indexed(self, index: Any) -> torch.Tensor:
        if self.requires_grad and _grad_is_enabled():
            return _tensor_getitem(self, plain_index(index))  # for its history
        kind = type(index)
        if kind in _BASIC or (kind is tuple and _BASIC.issuperset(map(type, index))):
            return wrap(StoredTensor, self.shown[index], self.stored)
        return index_leaf(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refusal(self, "an assignment to its elements")

    def distribute(self, mesh: Any, placements: Sequence[Any]) -> DTensor:
        """Reads this rank's part into a DTensor. No rank waits for another: there is no collective.

        Args:
            mesh: a `torch.distributed.device_mesh.DeviceMesh`. The part goes to its kind of device.
            placements: one of torch's placements for each of its dimensions: `Shard(dim)`, `Replicate()`.

        Returns:
            A `torch.distributed.tensor.DTensor`, which requires a gradient if this tensor does.

        Raises:
            UnsupportedValueError: there is no such dimension, or a placement is Partial or unknown.
        """
        return distribute(self, mesh, placements)

    # --- as memory ----------------------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """Reads it into a numpy array, which is a copy."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Reads it into nested lists of numbers, or one number."""
        return read(self).tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.clone().__dlpack__(**options)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns a copy as a plain tensor, without autograd's history. It can't be assigned."""
        return self.detach().clone()

    @data.setter
    def data(self, _: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise refusal(self, "an assignment to .data")

    def new(self, *args: Any, **options: Any) -> torch.Tensor:
        """Makes a plain tensor of the same dtype, on the same device, as `Tensor.new`."""
        return self._plain().new(*args, **options)  # torch's own goes past the operators, and may find no memory

    def new_tensor(self, *args: Any, **options: Any) -> torch.Tensor:
        """Makes a plain tensor of the same dtype, on the same device, with the given data, as `Tensor.new_tensor`."""
        return self._plain().new_tensor(*args, **options)

    def _plain(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def share_memory_(self) -> StoredTensor:
        """Does nothing: processes share the file already. Returns the tensor."""
        return self

    def is_shared(self) -> bool:
        """Always True: processes share the file."""
        return True

    def data_ptr(self) -> int:
        """Raises ReadOnlyError: a lazy leaf has no memory that could be pointed at. Take a copy with `clone()`."""
        raise _no_memory(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns a storage of no bytes. Its methods that would read bytes raise ReadOnlyError, as `data_ptr` does."""
        storage = _NoStorage()
        storage.leaf = self
        return storage

    # --- copies and references ----------------------------------------------------------------------------------------

    def __copy__(self) -> StoredTensor:
        return with_kind(wrap(StoredTensor, self.shown, self.stored), kind_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        copied = memo[id(self)] = self.__copy__()
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor where a file is written, else a reference."""
        if modes.are_active():
            with modes.put_aside(entirely=True):
                return self.__reduce_ex__(protocol)
        if goes_to_a_file():
            return plain_tensor(self).__reduce_ex__(protocol)
        return restore_leaf, (self.stored.source, pack_leaf(self))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ("shown", "stored")]  # of memstore's own

    def __repr__(self, *, tensor_contents: object = None) -> str:
        device = "" if self.stored.place is None else f", device='{self.device}'"
        grad = ", requires_grad=True" if self.requires_grad else ""
        dtype = f"dtype={self.dtype}{device}{grad}"
        lazy = f"lazy, {size(self.numel() * self.itemsize)}"
        return f"StoredTensor({self.stored.source.title}, shape={tuple(self.shape)}, {dtype}, {lazy})"

    def __format__(self, spec: str) -> str:
        return format(read(self), spec) if spec and not self.ndim else repr(self)


class _NoStorage(torch.UntypedStorage):
    """Empty storage: many ask for its size, and then read what there is or take a copy. Its bytes are an error."""

    leaf: StoredTensor

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _no_memory(self.leaf)

    data_ptr = tolist = clone = copy_ = cpu = share_memory_ = _write_file = _refuse
    __getitem__ = __iter__ = __reduce__ = _refuse


def _no_memory(leaf: StoredTensor) -> NoPointerError:
    return NoPointerError(
        f"{name_of(leaf)} has no memory of its own that could be pointed at: take a copy with clone(), or get the key "
        "instead of its view; to write a file of it, Store.export",
        key=leaf.stored.source.key,
    )


# --- Lazy leaves, made where their bytes lie -------------------------------------------------------------------------


def lazy_leaf(source: Source, leaf: Leaf, start: int, boxes: Sequence[StoredBox], kind: traits.Traits) -> StoredTensor:
    """Makes a contiguous leaf on the CPU, whose places were checked, without checksums.

    Args:
        source: what it is a part of.
        leaf: its dtype, shape and size.
        start: where it lies whole in the source's memory, unless there are boxes.
        boxes: where its parts lie there.
        kind: Parameter, Buffer or neither, on no device of its own.
    """
    dtype, nbytes = DTYPES[leaf.dtype], leaf.nbytes
    if boxes:
        stored = LeafBoxes(source, leaf, boxes, verify=False)
        made = wrap(StoredTensor, stored.shown, stored)
    elif nbytes and not start % dtype.itemsize:
        count = nbytes // dtype.itemsize
        shown = torch.frombuffer(source.memory, dtype=dtype, count=count, offset=start).resize_(leaf.shape)
        throw_on_mutable_data_ptr(shown)
        made = wrap(StoredTensor, shown, LeafBytes(source, start, nbytes, None, start))
    else:
        made = lazy_bytes(source, dtype, start, leaf.shape, traits.contiguous_stride(leaf.shape))
    return made if kind is traits.PLAIN else with_kind(made, kind)


def lazy_bytes(
    source: Source,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    checked: tuple[int, int, bytes] | None = None,
    place: torch.device | None = None,
) -> StoredTensor:
    """Makes a lazy tensor of bytes in one place.

    Args:
        offset: of its first element in the source's memory, in bytes.
        checked: offset, size and checksum of the stored leaf that it is a part of, if that is to be compared.
        place: the device that its values go to.
    """
    nbytes = traits.reach(shape, stride) * dtype.itemsize
    memory, base = source.memory[offset : offset + nbytes], None
    if offset % dtype.itemsize:  # torch can't look at it there
        memory = memory.copy()
        base = over(torch.from_numpy(memory).untyped_storage(), dtype, 0, (0,), (1,))
    shown = over(torch.from_numpy(memory).untyped_storage(), dtype, 0, shape, stride)
    throw_on_mutable_data_ptr(shown)
    stored = LeafBytes(source, *(checked or (offset, nbytes, None)), offset, place)
    stored.base = base
    return wrap(StoredTensor, shown, stored)


# --- A rank's part, as a DTensor -------------------------------------------------------------------------------------


def distribute(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Makes a DTensor of this rank's part of a tensor, lazy or not, in memory of its own. There is no collective.

    Raises:
        UnsupportedValueError: there is no such dimension, or a placement is Partial or unknown.
    """
    with between_forks():
        from torch.distributed.tensor import DTensor
    shape = tuple(tensor.shape)
    pieces, own = place(mesh, placements, shape), local_shape(mesh, placements, shape)
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        local = torch.empty(own, dtype=dtype or tensor.dtype, device=mesh.device_type)
        for piece in pieces:
            part = narrow_to(local, piece.local)
            if isinstance(tensor, LazyTensor) and local.dtype == tensor.dtype:
                tensor.stored.copy_to(part, narrow_to(tensor.shown, piece.box))
            else:
                part.copy_(narrow_to(tensor, piece.box))
        made: Any = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
        )
        return made.requires_grad_(tensor.requires_grad)


# --- Lazy leaves as references, for pickles that are sent ------------------------------------------------------------
# A reference to a leaf is its source (pickled once, however many leaves of it go along) and a msgpack of
#
#     [dtype, offset of its first element, shape, strides or nil, flags, device or nil, checked or nil, boxes or nil]
#
# with flags = kind * 2 + requires_grad, and checked = [offset, size, checksum] of the stored leaf where its checksum is
# still to be compared. So it is self-contained: what else the value has doesn't matter.
#
# Of a leaf in boxes the offset counts from its first element, in bytes, and boxes = [dtype, shape, [[offsets, shape,
# place, rank, checksum or nil], ...]]: the stored leaf, and those of its boxes that have some of what is sent.


_encode_reference = msgspec.msgpack.Encoder().encode
_Sizes = tuple[int, ...]
_Boxes = tuple[str, _Sizes, list[tuple[tuple[_Sizes, _Sizes], int, int, bytes | None]]]
_decode_reference = msgspec.msgpack.Decoder(
    tuple[str, int, _Sizes, _Sizes | None, int, str | None, tuple[int, int, bytes] | None, _Boxes | None]
).decode


def pack_leaf(leaf: LazyTensor) -> bytes:
    """Returns where the leaf lies in its source, encoded."""
    shown, stored, kind = leaf.shown, leaf.stored, kind_of(leaf)
    offset = shown.storage_offset() * shown.dtype.itemsize if shown.numel() else 0
    stride = None if shown.is_contiguous() else shown.stride()
    dtype, flags = traits.DTYPE_NAMES[shown.dtype], kind.kind * 2 + kind.requires_grad
    checked = boxes = None
    if isinstance(stored, LeafBoxes):
        boxes = (stored.leaf.dtype, stored.leaf.shape, stored.needed(shown))
        device = None if stored.place is None else kind.device
        return _encode_reference((dtype, offset, tuple(shown.shape), stride, flags, device, checked, boxes))
    if isinstance(stored, LeafBytes):
        offset += stored.start if shown.numel() else 0
        checked = None if stored.checksum is None else (stored.offset, stored.nbytes, stored.checksum)
    return _encode_reference((dtype, offset, tuple(shown.shape), stride, flags, kind.device, checked, boxes))


def restore_leaf(source: Source, packed: bytes) -> StoredTensor:
    """Returns the leaf that was packed. Raises CorruptionError if it isn't in the bytes of its source."""
    try:
        dtype_name, offset, shape, stride, flags, device, checked, boxes = _decode_reference(packed)
        dtype = traits.DTYPES[dtype_name]
        stride = traits.contiguous_stride(shape) if stride is None else stride
        nbytes = traits.reach(shape, stride) * dtype.itemsize
        if len(stride) != len(shape) or not 0 <= flags < 8:
            raise ValueError("it is none")
        end = max((offset + nbytes, *((checked[0] + checked[1],) if checked else ())))
        limit = source.memory.nbytes
        in_boxes = None if boxes is None else _read_boxes(boxes)
        if in_boxes is not None:
            whole, apart = in_boxes
            for one in apart:
                check_box(whole, one, limit)
            limit = whole.nbytes
        if min((0, offset, *shape, *stride, *(checked or ())[:2])) < 0 or end > limit:
            raise ValueError("it lies outside of the value")
    except (msgspec.MsgspecError, KeyError, ValueError, MalformedError) as error:
        raise source.damaged(f"a reference to a leaf is damaged: {error}") from None
    kind, requires_grad = divmod(flags, 2)
    found = traits.Traits(kind, bool(requires_grad), device)
    with modes.put_aside(), torch.inference_mode(False):
        place = need_device(device)
        if in_boxes is None:
            return with_kind(lazy_bytes(source, dtype, offset, shape, stride, checked, place), found)
        stored = LeafBoxes(source, *in_boxes, place)
        shown = over(stored.shown.untyped_storage(), dtype, offset // dtype.itemsize, shape, stride, "meta")
        return with_kind(wrap(StoredTensor, shown, stored), found)


def _read_boxes(boxes: _Boxes) -> tuple[Leaf, list[StoredBox]]:
    """Returns the stored leaf, without a name, and its boxes. Raises MalformedError."""
    dtype, shape, found = boxes
    size = check_extent(shape, None, traits.DTYPES[dtype]) * traits.DTYPES[dtype].itemsize
    leaf = Leaf((), dtype, shape, None, 0, size)
    return leaf, [StoredBox(Box(*box), place, rank, checksum) for box, place, rank, checksum in found]


# --- Plain tensors, in files -----------------------------------------------------------------------------------------
# Lazy leaves in files: `torch.save` writes their bytes, as plain tensors. Who sends a leaf sends a reference.
#
# A reference is good for a minute, so a checkpoint must not have any. But whoever saves and whoever sends call the same
# `__reduce_ex__`, and neither says what becomes of the pickle. So the stack is searched for one of the modules that
# write files and nothing else. `pickle.dump` can't be told from `pickle.dumps`, and sends.
#
# Nothing else tells the two apart. Those who send are too many to be told: pickle.dumps, the cloudpickle of Ray and of
# Monarch, torch.distributed's collectives of objects; multiprocessing's ForkingPickler alone has a table of reducers.
# Those who write have no hook either. torch.save asks its `persistent_id` for storages only, and of a tensor that it
# makes from one, all picklers would get the same function. joblib and shelve take any object as pickle does.


_WRITERS = frozenset({"torch.serialization", "joblib.numpy_pickle", "shelve"})


def goes_to_a_file() -> bool:
    """Returns whether what is pickled now is written to a file, as far as can be told."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _WRITERS:
            return True
        frame = frame.f_back
    return False


def plain_tensor(leaf: LazyTensor) -> torch.Tensor:
    """Returns the tensor that is saved: over the mapping, without a copy, or of a part of a stored leaf just that part.

    So leaves that share their bytes still do when they are loaded. Not to be written, nor to be given to a user.
    """
    with torch.inference_mode(False), torch.no_grad():
        plain = read(leaf).detach()
        if plain.untyped_storage().nbytes() != nbytes_of(plain):
            plain = _copy_apart(plain)
        return traits.with_traits(plain, kind_of(leaf)._replace(requires_grad=leaf.requires_grad))


def _copy_apart(part: torch.Tensor) -> torch.Tensor:
    """Copies the bytes of a part; with its strides, unless there are gaps."""
    if has_gaps(part.shape, part.stride()):
        packing = pack(part.shape, part.stride())
        once = part.as_strided(packing.shape, packing.stride)
        return traits.copyable(once).contiguous().view(part.dtype).as_strided(part.shape, packing.kept)
    reach = traits.reach(part.shape, part.stride())
    return (
        traits.copyable(part.as_strided((reach,), (1,))).clone().view(part.dtype).as_strided(part.shape, part.stride())
    )


# --- Views -----------------------------------------------------------------------------------------------------------


def view(root: Root, key: str, held: MappedEntry, options: PinOptions, device: torch.device | str | None = None) -> Any:
    """Returns the held version's containers with lazy leaves. References to them are pins with these options."""
    if modes.are_active():
        with modes.put_aside():
            return _view(root, key, held, options, device)
    return _view(root, key, held, options, device)


def _view(root: Root, key: str, held: MappedEntry, options: PinOptions, device: torch.device | str | None) -> Any:
    record, mapping = held.record, held.mapping
    wanted = None if device is None else torch.device(device)
    try:
        plan, objects, memory, boxes = contents.locate(root, key, held)
        source = PinnedSource(HeldVersion(root, key, without_leaves(record), held, options), memory)
        place = None if wanted is None or wanted.type == "cpu" else wanted
        sums, loaded = record.checksums if options.verify else None, plan.loaded

        def make_leaf(i: int, tensor: torch.Tensor) -> torch.Tensor:
            stored, kind = plan.leaves[i], plan.traits[i]
            apart = structure.boxes_of_leaf(plan, boxes, i) if boxes else ()
            if apart and (options.verify or not structure.lies_in_order(stored, apart)):
                own = place if wanted is not None else need_device(kind.device)
                leaf_boxes = LeafBoxes(source, stored, apart, own, verify=options.verify)
                leaf = wrap(StoredTensor, leaf_boxes.shown, leaf_boxes)
                return leaf if kind is traits.PLAIN else with_kind(leaf, kind)
            checksum = None if sums is None else sums[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
            item = tensor.dtype.itemsize
            start = stored.offset - int(tensor.storage_offset()) * item
            own = place if wanted is not None or kind is traits.PLAIN else need_device(kind.device)
            leaf_bytes = LeafBytes(source, stored.offset, stored.nbytes, checksum, start, own)
            if stored.offset % item:  # it had to be copied
                leaf_bytes.base = tensor
            if loaded or leaf_bytes.base is not None:  # others may write into this storage
                tensor = _twin(tensor)
            throw_on_mutable_data_ptr(tensor)
            leaf = wrap(StoredTensor, tensor, leaf_bytes)
            return leaf if kind is traits.PLAIN else with_kind(leaf, kind)

        if held.absent is not None and loaded:
            _bring_loaded(held.absent, source, plan, boxes)
        for i in loaded:
            stored = plan.leaves[i]
            apart = structure.boxes_of_leaf(plan, boxes, i)
            if apart:
                leaf_boxes = LeafBoxes(source, stored, apart, verify=options.verify)
                leaf_boxes.copy_to(structure.leaf_tensor(stored, memory), leaf_boxes.shown)
            elif sums is not None:
                checksum = sums[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
                LeafBytes(source, stored.offset, stored.nbytes, checksum, stored.offset).check()
            count_read(stored.nbytes)
        return structure.rebuild_lazily(
            plan, objects, memory, mapping, make_leaf, allow_pickle=options.allow_pickle, device=wanted
        )
    except MemstoreError as error:
        if isinstance(error, CorruptionError) and error.key is None:
            raise contents.blame(root, key, record, error) from error
        error.key = key
        raise


def _bring_loaded(absent: Absent, source: PinnedSource, plan: structure.Plan, boxes: contents.Boxes) -> None:
    """Brings all leaves that a view loads, by one request a host."""
    leaves = [plan.leaves[i] for i in plan.loaded]
    found = [
        structure.box_tensor(leaf, one, source.memory)
        for i, leaf in zip(plan.loaded, leaves, strict=True)
        for one in structure.boxes_of_leaf(plan, boxes, i)
    ]
    whole = [torch.from_numpy(source.memory[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in leaves]
    contents.bring(absent, [*found, *whole])


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor over a second storage of the same bytes."""
    whole = over(tensor.untyped_storage(), torch.uint8, 0, (tensor.untyped_storage().nbytes(),), (1,))
    storage = torch.from_numpy(whole.numpy()).untyped_storage()
    return over(storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


@flattens(StoredTensor)
def _flatten_leaf(value: StoredTensor, walk: Walk) -> Any:
    """Flattens a lazy leaf: a put of a view stores what it shows."""
    if walk.in_place:
        raise RefusedError("a lazy leaf of a view, whose version never changes")
    return walk.visit(traits.with_traits(read(value).detach(), kind_of(value)._replace(device=None)))


# --- Lazy leaves, loaded one by one ----------------------------------------------------------------------------------


@modes.uncompiled
def load_leaf(leaf: LazyTensor) -> torch.Tensor:
    """Returns the leaf as a get gives it: where it lies; or, if it is in boxes that lie apart, in memory of its own.

    Only for a view that nobody else has: what is written to the tensor, the view would show.
    """
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        values, source = read(leaf), leaf.stored.source
        plain = over(values.untyped_storage(), values.dtype, values.storage_offset(), values.shape, values.stride())
        if plain.numel() and lies_in_mapping(plain.data_ptr()):  # the storage keeps it: see structure/rebuilding.py
            keep = source.memory if source.mapping is None else source.mapping
            plain.untyped_storage()._memstore_mapping = keep  # type: ignore[attr-defined]
        return traits.with_traits(plain, kind_of(leaf))


def bytes_shown(leaf: LazyTensor) -> Hashable:
    """Returns what is equal for leaves of one view that are the same tensor, as tied weights are. Reads nothing.

    Of a leaf that ranks put in parts it is the leaf itself: nobody else has it.
    """
    stored = leaf.stored
    if isinstance(stored, LeafBytes):
        return stored.offset, leaf.dtype, tuple(leaf.shape), leaf.shown.stride()
    return id(leaf)


def own_leaf(leaf: LazyTensor, sources: dict[Source, Source | None]) -> torch.Tensor:
    """Returns the leaf in memory that nobody else sees: mapped once more, copy on write; copied where that can't be.

    Args:
        sources: those that were mapped for former leaves.
    """
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        stored = leaf.stored
        if isinstance(stored, LeafBytes) and stored.place is None and not stored.start % leaf.dtype.itemsize:
            if stored.source not in sources:
                sources[stored.source] = stored.source.again()
            source = sources[stored.source]
            if source is not None:
                own = LeafBytes(source, stored.offset, stored.nbytes, stored.checksum, stored.start)
                values = own.tensor(leaf.shown)
                if source.absent is not None:
                    source.bring(values)
                own.use(0)  # compares it with its checksum, if it has one
                values.untyped_storage()._memstore_mapping = source.mapping  # type: ignore[attr-defined]
                return values
        return read(leaf).clone()


# --- The tensors and objects of a value, without its containers ------------------------------------------------------
# A stored value as its tensors and objects, by name: for who looks at it, and needs none of its containers.
#
# No container is built, no class is looked up and no pickle is read; a tensor that a container would look into (the
# parts of a nested or a sparse one) comes lazily too.


class ValueParts(NamedTuple):
    """Parts that a value consists of.

    Attributes:
        structure: "TensorDict[3] of 12 leaves".
        tensors: each leaf, as it is stored.
        objects: all else; a Pickled stands for what was stored with pickle.
    """

    structure: str
    tensors: dict[Path, torch.Tensor]
    objects: dict[Path, Any]


@modes.put_aside()
def parts_of(root: Root, key: str, held: MappedEntry, options: PinOptions) -> ValueParts:
    """Returns the parts of a held version: lazy leaves on the CPU. Raises CorruptionError."""
    record = held.record
    try:
        plan, encoded, memory, boxes = contents.locate(root, key, held)
        source = PinnedSource(HeldVersion(root, key, without_leaves(record), held, options), memory)
        tensors: dict[Path, torch.Tensor] = {}
        for i, leaf in enumerate(plan.leaves):
            apart = structure.boxes_of_leaf(plan, boxes, i)
            if apart:
                stored = LeafBoxes(source, leaf, apart, verify=options.verify)
                tensors[leaf.name] = wrap(StoredTensor, stored.shown, stored)
            else:
                stride = traits.contiguous_stride(leaf.shape) if leaf.stride is None else leaf.stride
                tensors[leaf.name] = lazy_bytes(source, DTYPES[leaf.dtype], leaf.offset, leaf.shape, stride)
        objects = structure.show_objects(encoded, plan.object_count)
    except CorruptionError as error:
        raise error if error.key is not None else contents.blame(root, key, record, error) from error
    return ValueParts(structure.structure_text(plan), tensors, dict(zip(plan.object_names, objects, strict=True)))
