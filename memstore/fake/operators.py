"""Operators: what each does, by its schema, and its arguments as refs and as meta tensors."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from memstore.fake.tensors import META, Mark, is_meta, map_tensors, mark_of, meta_twin, ref_of, tensors_in

# --- What an operator does -------------------------------------------------------------------------------------------


_tag: Any = torch.Tag
_RANDOM = _tag.nondeterministic_seeded
_BY_VALUES = (_tag.data_dependent_output, _tag.dynamic_output_shape)
_aten: Any = torch.ops.aten
# They say of which storage a tensor is, and change none.
_SETS = {
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.default,
}

_BATCH_NORM = _aten.native_batch_norm.default
_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
# What remains of the functions that torch.autocast has on its lists of lower precision.
_LOWERED = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution"}
_LOWER = {torch.bfloat16, torch.float16}
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key


class OperatorKind(NamedTuple):
    """
    Attributes:
        makes: it makes a tensor on a device that it is told.
        takes_shape: of a tensor that it is given, it takes no values.
        random: it draws random numbers.
        by_values: what it returns depends on values.
        sets: it gives a tensor another storage.
        collective: other processes take part in it.
        averages: in training it writes a running mean and variance, of which its schema says nothing.
        quantizes: it returns a quantized tensor, of which its meta kernel says nothing.
        lowered: torch.autocast runs it in lower precision.
        autocast: torch.autocast knows it: of tensors of lower precision it may make others.
        written: the places of arguments that it writes, and the names of those that come by name.
    """

    makes: bool
    takes_shape: bool
    random: bool
    by_values: bool
    sets: bool
    collective: bool
    averages: bool
    quantizes: bool
    lowered: bool
    autocast: bool
    written: tuple[int | str, ...]


@functools.cache
def kind_of(operator: Any) -> OperatorKind:
    arguments = operator._schema.arguments
    written = tuple(
        one.name if one.kwarg_only else place
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    tags = operator.tags
    return OperatorKind(
        any(one.name == "device" for one in arguments),
        operator.namespace == "aten" and operator._schema.name.endswith(_LIKE),
        _RANDOM in tags or any(one.name == "generator" for one in arguments),
        any(tag in tags for tag in _BY_VALUES),
        operator in _SETS,
        operator.namespace in _COLLECTIVES,
        operator is _BATCH_NORM,
        operator._schema.name.startswith("aten::quantize_per"),
        operator._schema.name.removeprefix("aten::") in _LOWERED,
        any(_has_kernel(operator.name(), f"Autocast{device}") for device in ("CPU", "CUDA")),
        written,
    )


def is_autocast(kind: OperatorKind, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether torch.autocast would run an operator on these in another dtype."""
    return kind.lowered or kind.autocast and any(one.dtype in _LOWER for one in tensors)


def written_in(kind: OperatorKind, args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments, or lists of them, that are written."""
    found: list[Any] = []
    for place in kind.written:
        if isinstance(place, str):
            found.append(options.get(place))
        elif place < len(args):
            found.append(args[place])
    if kind.averages and args[5]:
        found.extend(args[3:5])
    return found


# --- Arguments -------------------------------------------------------------------------------------------------------


Options = Mapping[str, Any]


def as_ref(tensor: torch.Tensor) -> Any:
    mark = mark_of(tensor)
    return tensor if mark is None else ref_of(tensor, mark)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else meta_twin(tensor)


def map_options(change: Callable[[torch.Tensor], Any], options: Options) -> dict[str, Any]:
    return {name: map_tensors(change, one) for name, one in options.items()}


def on_meta(options: Options, *, makes: bool = False) -> dict[str, Any]:
    """Options for the same on meta tensors, which are not pinned, and draw nothing."""
    changed = {name: one for name, one in options.items() if name != "pin_memory"}
    if makes or changed.get("device") is not None:
        changed["device"] = META
    if changed.get("generator") is not None:
        changed["generator"] = None
    return changed


def with_arguments(result: Any, written: list[torch.Tensor]) -> Any:
    """Replaces values that in-place operators return by the fake arguments that they stand for."""
    if not written:
        return result
    found = list(tensors_in((result,)))
    if len(found) != len(written) or all(one.is_meta for one in found):
        return result
    by_id = {id(one): fake for one, fake in zip(found, written, strict=True)}
    return map_tensors(lambda one: by_id[id(one)], result)


def leaves_meta(tensor: torch.Tensor, options: Options) -> bool:
    """Whether it is a plain meta tensor, and one like it is asked for elsewhere: `to_empty`, `skip_init`."""
    asked = options.get("device")
    return tensor.is_meta and asked is not None and asked.type != "meta"


def with_index(device: torch.device) -> torch.device:
    """Returns the device itself: "cuda" is the one that is current in this process. It doesn't initialize CUDA."""
    index = cast("int | None", device.index)  # torch says that it is never None
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def device_of(tensors: Sequence[torch.Tensor], marks: Sequence[Mark | None]) -> torch.device:
    """Returns the device of an operator's results, if some arguments are fake.

    A number on the CPU goes to the others.
    """
    first: torch.device | None = None
    for one, mark in zip(tensors, marks, strict=True):
        if mark is not None:
            if mark.device.type != "cpu" or one.dim():
                return mark.device
            first = first or mark.device
    assert first is not None, "one is fake"
    return first


def is_about_meta(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error)


# --- set_ and .data --------------------------------------------------------------------------------------------------
# Which storage a fake tensor shows: `set_` and `.data =` change that, and write none.


_source_tensor: Any = torch.ops.aten.set_.source_Tensor


def lend(tensor: torch.Tensor) -> None:
    """Notes that a tensor is moved from its storage, or was moved to it; views keep sharing its count of writes."""
    mark = mark_of(tensor)
    if mark is not None:
        mark.is_lent = True


def set_storage(operator: Any, args: tuple[Any, ...], lift: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Handles an overload of `set_` on a fake tensor.

    From real memory (`torch.load` has some) it gets the values of now.

    Args:
        lift: makes a fake tensor for a real one.
    """
    fake, source = args[0], args[1] if len(args) > 1 else None
    lend(fake)
    if isinstance(source, torch.UntypedStorage) and source.device.type != "meta":
        real = torch.empty(0, dtype=fake.dtype, device=source.device)
        operator(real, *args[1:])
        source = real
    elif not isinstance(source, torch.Tensor):
        operator(*args)
        lend(fake)
        return fake
    if not is_meta(source):
        source = lift(source)
    _source_tensor(fake, source)
    lend(fake)
    return fake
