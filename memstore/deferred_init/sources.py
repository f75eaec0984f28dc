"""Sources of weights: a table of tensors by name, and how a module's storages get their values from it.

`SourceTable` opens a source; nothing is read before it is used. `ties_apart` finds tensors that are one in the module
and differ in the source. `WeightLoader` takes tensors out of the source, as those of the module share their storages.

a path of a snapshot, a Snapshot    its view: lazy leaves over the mapped files, or fetched from a bucket
a path of safetensors               a file, a folder of Hugging Face's, its index: tensors over the mapped files
a view, a state dict                as it is; dicts in dicts have names with dots
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from memstore._compat import DisableTorchFunction, is_torch_fake, neg_view
from memstore._wording import an, first_of, is_flattened, short
from memstore.deferred_init.slots import MaterializeOptions, TensorSlot, spread_as
from memstore.deferred_init.tensors import become, is_real, is_wrapper, keep_real, materialize, ref_in, shows_all
from memstore.engine import has_settings
from memstore.errors import NotAStoreError, StructureMismatchError, UnsupportedValueError
from memstore.fake import Mark, TensorRef, is_fake, original_class
from memstore.formats import file_format, load_files
from memstore.snapshot import Snapshot, is_snapshot
from memstore.snapshot.buckets import is_url
from memstore.structure import ByteRange, clusters_of, modes, over, traits, why_no_memory
from memstore.structure import is_wrapper as is_made_of_others
from memstore.view import Source, StoredTensor, distribute, own_leaf

# --- The table -------------------------------------------------------------------------------------------------------


_SOURCES_OF = (("state_dict", "state_dict()"), ("view", "view(key)"))  # a module's, a store's


class SourceTable:
    """Tensors of a source by the names that a module has for them.

    Args:
        source: one of those above.
        names: of each tensor of the module, all its names.

    Attributes:
        title: what errors call it.
        prefix: what stands before the module's names in the source's; see `_prefix`.

    Raises:
        StructureMismatchError: the source has none of these names, or it isn't clear which of its parts has them.
        NotAStoreError: there is nothing at the path.
        UnsupportedValueError, CorruptionError: it is of no known format, or damaged.
        TypeError: it is no source.
    """

    def __init__(self, source: Any, names: Sequence[Sequence[str]]) -> None:
        self.title, value = _opened(source)
        self._tensors = dict(_flat("", value))
        self.prefix = _prefix(self.title, self._tensors, names)
        self._sources: dict[Source, Source | None] = {}

    def find(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self.prefix + name)

    def get(self, name: str) -> torch.Tensor:
        """Returns a tensor that `find` has found."""
        return self._tensors[self.prefix + name]

    def take(self, name: str) -> torch.Tensor:
        """Takes a tensor, where it lies if it can be had there. Nobody else sees what is written to it."""
        found = self.get(name)
        if isinstance(found, StoredTensor):
            return own_leaf(found, self._sources)
        if found.is_inference() and not torch.is_inference_mode_enabled():
            return found.detach().clone()  # which can be trained
        return found.detach()


def _opened(source: Any) -> tuple[str, Any]:
    """Opens a source. Returns what errors call it, and its value."""
    if isinstance(source, Snapshot):
        return f"the snapshot {source.path}", source.view()
    if isinstance(source, (str, os.PathLike)):
        if "://" in os.fspath(source) or is_flattened(os.fspath(source)):
            found = Snapshot(source)
            if is_url(found.path):
                return f"the snapshot {found.path}", found.view()
            source = found.path
        path: str = os.path.abspath(os.fspath(source))  # pyright: ignore[reportAssignmentType]
        if is_snapshot(path):
            return f"the snapshot {path}", Snapshot(path).view()
        if not os.path.exists(path):
            hint = "" if os.path.splitext(path)[1] else "; of a store's key give store.view(key)"
            raise NotAStoreError(f"there is no snapshot, file or folder at {path}{hint}")
        return path, load_files("source", path, _format_of(path), allow_pickle=False)
    if isinstance(source, Mapping) or hasattr(source, "batch_size"):
        return f"the {type(source).__name__}", source
    instead = next((f": its {call} is one" for name, call in _SOURCES_OF if callable(getattr(source, name, None))), "")
    raise TypeError(f"source is a Snapshot, a view, a state dict or a path, and not {an(type(source))}{instead}")


def _format_of(path: str) -> Any:
    if has_settings(path):
        raise UnsupportedValueError(
            f"{path} is a store: give the view of one of its keys, memstore.open(path).view(key)"
        )
    try:
        return file_format(path)
    except UnsupportedValueError:
        kinds = "no snapshot, and no folder with safetensors"
        what = kinds if os.path.isdir(path) else "no file of safetensors or torch"
        raise UnsupportedValueError(f"{path} is {what}: check the path") from None


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors by their names, joined by dots. What is no tensor is left out."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping) or hasattr(value, "batch_size"):
        for name, one in value.items():  # type: ignore[attr-defined]
            if isinstance(name, str):
                yield from _flat(f"{prefix}.{name}" if prefix else name, one)


def _prefix(title: str, tensors: Mapping[str, Any], names: Sequence[Sequence[str]]) -> str:
    """Finds what stands before the module's names in the names of the source.

    1. A prefix that all its names have, or none: the one by which most of the module's are found.
    2. Else the one part of the source that has all of the module's tensors, if no other part has any.
    3. Else it is an error: weights of another module would fit too.
    """
    wanted = {name: number for number, group in enumerate(names) for name in group}
    first, last = (min(tensors), max(tensors)) if tensors else ("", "")  # what these share, all between them do
    shared = os.path.commonprefix([first, last])
    common = ["", *(shared[: at + 1] for at, one in enumerate(shared) if one == ".")]  # up to a dot each
    best = max(common, key=lambda prefix: sum(prefix + name in tensors for name in wanted))
    if not wanted or any(best + name in tensors for name in wanted):
        return best
    parts = _parts(tensors, wanted)
    whole = [prefix for prefix, found in parts.items() if len(found) == len(names)]
    if len(whole) == 1 and all(prefix.startswith(whole[0]) for prefix in parts):
        return whole[0]
    if parts:
        likely = sorted(parts, key=lambda prefix: -len(parts[prefix]))
        listed = ", ".join(f"{short(one[:-1])} ({len(parts[one])} of {len(names)})" for one in likely[:8])
        raise StructureMismatchError(
            f"{title} has weights of the module's names in {len(likely)} of its parts: {listed}"
            f"{', ...' if len(likely) > 8 else ''}. Say which part is the module's: give that part alone, as a view or "
            "a dict with the module's own names; or materialize the whole module, and choose the part with check_fn"
        )
    theirs = ", ".join(short(name) for name in list(tensors)[:3]) or "no tensors"
    raise StructureMismatchError(
        f"{title} has none of the module's {len(names)} weights: it has {theirs}, and the module "
        f"{', '.join(map(short, list(wanted)[:3]))}; name the part of it that is the module's"
    )


def _parts(tensors: Iterable[str], wanted: Mapping[str, int]) -> dict[str, set[int]]:
    """Returns the prefixes under which a source has names, with the numbers of the tensors whose names they are."""
    found: dict[str, set[int]] = {}
    for name in tensors:
        for at, one in enumerate(name):
            number = wanted.get(name[at + 1 :]) if one == "." else None
            if number is not None:
                found.setdefault(name[: at + 1], set()).add(number)
    return found


# --- Taking weights --------------------------------------------------------------------------------------------------
# Tensors out of a source, as those of the module share their storages.
#
# 1. A tensor that is a storage by itself becomes what the source has: mapped, if it need not be converted.
# 2. One that shows all of a storage does too, and the others that show it become parts of that.
# 3. Into a storage of which the source has several tensors, or only a part, or that was made real before, values are
#    written when it is real. So they are in all tensors that show it.
#
# What is converted, moved or spread shares nothing with others, as in torch's `Module.to`.


class WeightLoader:
    """Loader of the weights of one call.

    Args:
        slots: all that the call fills.
        todo: those of them whose tensors no former call has put into the module.

    Attributes:
        found: those of these that the source has something for, each tensor once, and its name there.
    """

    def __init__(
        self, slots: Sequence[TensorSlot], todo: Sequence[TensorSlot], table: SourceTable, options: MaterializeOptions
    ) -> None:
        found: dict[int, tuple[TensorSlot, str]] = {}
        for slot in todo:
            for name in options.names[id(slot.tensor)]:
                stored = table.find(name)
                if stored is not None and not (is_lazy(stored) and is_lazy(slot.tensor)):
                    found.setdefault(id(slot.tensor), (slot, name))
        self.found = list(found.values())
        self._todo, self._table, self._options = todo, table, options
        self._refs = {id(slot.tensor): ref_in(slot.tensor) for slot in slots if not is_wrapper(slot.tensor)}
        self._all = self._by_storage(slots)
        self._theirs = self._by_storage(slot for slot, _ in self.found)
        self._taken: dict[TensorRef, torch.Tensor] = {}
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def check(self) -> None:
        """Raises StructureMismatchError for tensors of the source that don't fit; all are listed."""
        problems: list[str] = []
        for slot, name in self.found:
            tensor, stored = slot.tensor, self._table.get(name)
            if is_fake(stored) or is_torch_fake(stored):
                problems.append(f"{name}: the source's is fake, and has no values")
            elif is_lazy(stored):
                problems.append(f"{name}: the source's is uninitialized, and has no values")
            elif stored.device.type == "meta" and self._options.device_of(tensor).type != "meta":
                problems.append(f"{name}: the source's is on meta, and has no values")
            elif (why := _why_not_taken(tensor, stored) or self._why_no_class(slot, stored)) is not None:
                problems.append(f"{name}: the source's is {why}")
            elif not is_lazy(tensor) and tuple(stored.shape) != tuple(tensor.shape):  # a lazy one takes any
                problems.append(f"{name}: shape {list(tensor.shape)} in the module, {list(stored.shape)} in the source")
            elif _kind(stored.dtype) != _kind(tensor.dtype):
                problems.append(f"{name}: {tensor.dtype} in the module, {stored.dtype} in the source")
        problems += ties_apart(self._todo, self._table, self._options)
        if problems:
            prefix = self._table.prefix
            where = f", under {short(prefix[:-1])}," if prefix else ""
            raise StructureMismatchError(
                f"{len(problems)} of {len(self.found)} tensors of {self._table.title}{where} don't fit the module:\n  "
                + "\n  ".join(problems)
            )

    def _why_no_class(self, slot: TensorSlot, stored: torch.Tensor) -> str | None:
        """Says why the module can't have a tensor of the class that the source has: one of them wraps others."""
        ours, theirs = slot.tensor, type(stored)
        if not is_wrapper(ours) and not is_wrapper(stored):
            return None
        spread = self._options.spread_of(slot)
        if is_wrapper(ours) and spread is None:
            cls = original_class(type(ours))
            if cls is theirs:
                return None
            return f"{an(theirs)}, and the module's {an(cls)}: give one, or let the module have {an(theirs)}"
        if not is_wrapper(stored):
            return None
        plain = "its full_tensor()" if hasattr(stored, "full_tensor") else "a plain tensor"
        if spread is not None:
            return f"{an(theirs)}, which wraps others, and no rank can take its part of these: give {plain}"
        if self._shares(ours):
            return f"{an(theirs)}, which wraps others, and the module's shares its memory with others: give {plain}"
        return None

    def _shares(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor can't become one that wraps others: its memory is shown by others, or written."""
        ref = self._refs.get(id(tensor))
        if ref is None or is_lazy(tensor):
            return False
        return len(self._all[ref.mark]) > 1 or self._is_written(tensor, ref)

    def take(self) -> None:
        """Reads all that can't be mapped, and changes no memory."""
        with DisableTorchFunction():  # a lazy one refuses `numel`
            largest_first = sorted(self.found, key=lambda one: -one[0].tensor.numel())
        for slot, name in largest_first:
            self._take(slot, name)

    def write(self) -> None:
        """Puts values into storages that are real by now."""
        for tensor, values in self._later:
            made = materialize([tensor])[0]
            with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
                wanted = values.to(device=made.device, dtype=made.dtype)
                if not torch.equal(made, wanted):  # else pages that are mapped would be copied for nothing
                    made.copy_(wanted)

    def _take(self, slot: TensorSlot, name: str) -> None:
        tensor, options = slot.tensor, self._options
        dtype, spread = options.dtype_of(tensor), options.spread_of(slot)
        if spread is not None and is_wrapper(tensor):
            become(tensor, distribute(self._table.get(name), *spread, dtype))
            return
        if is_wrapper(tensor):
            become(tensor, self._table.take(name).to(device=options.device_of(tensor), dtype=dtype))
            return
        ref = self._refs[id(tensor)]
        if ref in self._taken:
            become(tensor, self._taken[ref])
        elif self._is_written(tensor, ref):
            self._later.append((tensor, self._table.take(name)))
        elif spread is not None:
            self._become(tensor, ref, distribute(self._table.get(name), *spread, dtype))
        else:
            values = self._table.take(name).to(device=options.device_of(tensor), dtype=dtype)
            if not is_lazy(tensor) and options.keeps(tensor) and shows_all(tensor):
                if len(self._all[ref.mark]) > 1 and not values.is_contiguous():
                    self._later.append((tensor, values))
                    return
                if type(values) is torch.Tensor and values.is_contiguous():
                    keep_real(tensor, values, ref)
            self._become(tensor, ref, values)

    def _become(self, tensor: torch.Tensor, ref: TensorRef, values: torch.Tensor) -> None:
        self._taken[ref] = values
        lazy: Any = tensor
        become(tensor, values, original_class(lazy.cls_to_become) if is_lazy(tensor) else None)

    def _by_storage(self, slots: Iterable[TensorSlot]) -> dict[Mark, set[TensorRef]]:
        """Groups tensors by storage, with what they show of it."""
        found: dict[Mark, set[TensorRef]] = {}
        for slot in slots:
            ref = self._refs.get(id(slot.tensor))
            if ref is not None:
                found.setdefault(ref.mark, set()).add(ref)
        return found

    def _is_written(self, tensor: torch.Tensor, ref: TensorRef) -> bool:
        """Returns whether values are to be written into the tensor's storage, as others show it too."""
        if is_lazy(tensor):
            return False
        if not self._options.keeps(tensor):
            return not self._all[ref.mark] <= self._theirs[ref.mark]  # what isn't found shows what is
        if is_real(tensor) or len(self._theirs[ref.mark]) > 1:
            return True
        if shows_all(tensor):
            return False
        with DisableTorchFunction():
            shows_a_part = tensor.numel() * tensor.itemsize < tensor.untyped_storage().nbytes()
        return len(self._all[ref.mark]) > 1 or shows_a_part


def _why_not_taken(tensor: torch.Tensor, stored: torch.Tensor) -> str | None:
    """Says why a plain tensor of a source has no values for the module's, though it has a shape and a device."""
    if type(stored) not in (torch.Tensor, torch.nn.Parameter) or stored.is_meta or is_lazy(tensor):
        return None
    if stored.layout is not torch.strided and tensor.layout is torch.strided:
        return f"a {stored.layout} tensor: give its to_dense()"
    reason = None if stored.layout is not torch.strided or stored.is_quantized else why_no_memory(stored)
    return None if reason is None else "a tensor whose storage was freed or cut, and has no values"


def _kind(dtype: torch.dtype) -> int:
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


# --- Ties: tensors that show the same memory in a module, and have different values in a source ----------------------


_ALIGNMENT = 16  # bytes of the widest element
_NAMED = 4  # names in one message


class _NamedTensor(NamedTuple):
    """Name that a source has something for, and the module's tensor of that name.

    Attributes:
        ref: what it shows of its storage; None where that isn't known.
    """

    name: str
    tensor: torch.Tensor
    ref: TensorRef | None

    @property
    def start(self) -> int:
        return 0 if self.ref is None else self.ref.offset * self.ref.dtype.itemsize

    @property
    def stop(self) -> int:
        if self.ref is None:
            return 1
        return self.start + traits.reach(self.ref.size, self.ref.stride) * self.ref.dtype.itemsize


def ties_apart(slots: Sequence[TensorSlot], table: SourceTable, options: MaterializeOptions) -> list[str]:
    """Returns a line for an error for each group of names whose values in the source can't stand together.

    Only what has several names in the source is read, unless these lie at one place there.
    """
    groups: dict[Any, list[_NamedTensor]] = {}
    for slot in {id(slot.tensor): slot for slot in slots}.values():
        tensor = slot.tensor
        if is_wrapper(tensor) and spread_as(tensor) is None:
            continue  # its parts are replayed
        ref = None if is_wrapper(tensor) or is_lazy(tensor) else ref_in(tensor)
        for name in options.names[id(tensor)]:
            if _has_values(table.find(name)):
                groups.setdefault(id(tensor) if ref is None else ref.mark, []).append(_NamedTensor(name, tensor, ref))
    problems: list[str] = []
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        for group in groups.values():
            for cluster in _clusters(group):
                if not _can_be_one(cluster, table, options):
                    names = first_of([entry.name for entry in cluster], _NAMED)
                    what = "they share memory in the module (tied), and the source has different values for them"
                    problems.append(f"{names}: {what}")
    return problems


def _has_values(stored: Any) -> bool:
    if stored is None or is_fake(stored) or is_torch_fake(stored) or is_lazy(stored) or stored.is_meta:
        return False
    return type(stored) not in (torch.Tensor, torch.nn.Parameter) or why_no_memory(stored) is None


def _clusters(group: Sequence[_NamedTensor]) -> list[list[_NamedTensor]]:
    """Groups the entries of a storage that overlap others, each with all that it is joined to by such."""
    ranges = [ByteRange(entry.start, entry.stop, number) for number, entry in enumerate(group)]
    return [[group[one.leaf] for one in cluster] for cluster in clusters_of(ranges) if len(cluster) > 1]


def _can_be_one(cluster: Sequence[_NamedTensor], table: SourceTable, options: MaterializeOptions) -> bool:
    """Returns whether the source's values for all of them can be in the module at once."""
    first = cluster[0]
    others = [one for one in cluster if not is_lazy(one.tensor) and _shape(table.get(one.name)) != _shape(one.tensor)]
    if others:  # of the first name of a tensor this is told by itself
        return all(
            one.name == next(name for name in options.names[id(one.tensor)] if table.find(name) is not None)
            for one in others
        )
    if all(entry.ref == first.ref for entry in cluster):
        dtype = options.dtype_of(first.tensor)
        values = [_local(table.take(entry.name)) for entry in cluster]
        return all(_is_alike(values[0], other, dtype) for other in values[1:])
    start = first.start - first.start % _ALIGNMENT
    storage = torch.empty(max(entry.stop for entry in cluster) - start, dtype=torch.uint8, device="cpu")
    doubles = [_double(entry, storage.untyped_storage(), start) for entry in cluster]
    values = [_local(table.take(entry.name)).to(device="cpu", dtype=entry.tensor.dtype) for entry in cluster]
    for double, value in zip(doubles, values, strict=True):
        for dim, step in enumerate(double.stride()):
            if not step:  # expanded
                double, value = double.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        if not traits.overlaps_itself(double.shape, double.stride()):
            double.copy_(value)
    return all(_is_alike(double, value, value.dtype) for double, value in zip(doubles, values, strict=True))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _double(entry: _NamedTensor, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
    """Makes the tensor that the entry's would be over a storage which has the bytes from `start` on."""
    ref = entry.ref
    assert ref is not None, "it has neighbours in its storage"
    double = over(storage, ref.dtype, (entry.start - start) // ref.dtype.itemsize, ref.size, ref.stride)
    double = double.conj() if ref.conj else double
    return neg_view(double) if ref.neg else double


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _is_alike(one: Any, other: Any, dtype: torch.dtype) -> bool:
    """Returns whether two tensors become the same bits when they are converted."""
    if one is other or _place_of(one) == _place_of(other) is not None:
        return True
    if one.shape != other.shape:
        return False
    if is_made_of_others(type(one)) or is_made_of_others(type(other)):
        names = one.__tensor_flatten__()[0] if type(one) is type(other) else ()
        return bool(names) and all(
            _is_alike(getattr(one, name), getattr(other, name), getattr(one, name).dtype) for name in names
        )
    if one.layout is not torch.strided or one.is_quantized or one.is_nested:
        return type(one) is type(other) and bool(torch.equal(one, other))
    return torch.equal(_bits(one, dtype), _bits(other, dtype).to(one.device))


def _place_of(value: Any) -> tuple[Any, ...] | None:
    """Says where a plain tensor lies, and as what; None for any other tensor."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or not value.numel():
        return None
    bits = value.is_conj(), value.is_neg()
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), bits


def _bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    plain = value.detach().to(dtype).resolve_conj().resolve_neg()
    return traits.copyable(plain).contiguous().reshape(-1).view(torch.uint8)
