"""Names of torch and tensordict that are private to them, each behind a name of ours.

They are used where a public name copies, validates, takes far longer, or runs a class's code. `tests/test_compat.py`
uses each of them by itself, so that a release that drops or changes one is noticed there. tensordict is not imported
here: it takes a second, and whoever has one of its objects has imported it.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from memstore._threads import between_forks

# --- torch: tensors and storages -------------------------------------------------------------------------------------


BUFFER_MARK = "_is_buffer"  # the attribute of a torch.nn.Buffer
PARAMETER_MARK = "_is_param"  # of what isinstance(..., Parameter) is told to be one

_c: Any = torch._C
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass  # half the time of nn.Parameter(...), and no detach
without_torch_function: Any = _c.DisableTorchFunctionSubclass
is_in_transform: Callable[[torch.Tensor], bool] = _c._functorch.is_functorch_wrapped_tensor


def new_shared_storage(nbytes: int) -> torch.UntypedStorage:
    kind: Any = torch.UntypedStorage
    return kind._new_shared(nbytes)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies many tensors in a third of the time that a call each takes. Not in forward-mode differentiation."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Makes a function that tells of as many tensors whether each is like the one here at its place.

    It compares class, device, dtype, shape, strides, requires_grad, and the conj and neg bits, in 0.07 µs a tensor. It
    says no of a tensor that comes twice, and in inference mode of tensors that were made outside. Returns None where
    torch can't make it: it is what torch.compile checks before it runs what it has compiled.
    """
    try:
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        kind = _c._dynamo.guards.TensorGuards
        check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None


def in_forward_ad() -> bool:
    module: Any = forward_ad
    return bool(module._current_level >= 0)


# --- torch: tensors that are made of several -------------------------------------------------------------------------


make_quantized: Callable[..., torch.Tensor] = torch._make_per_tensor_quantized_tensor
make_channel_quantized: Callable[..., torch.Tensor] = torch._make_per_channel_quantized_tensor


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and values of a sparse tensor, whether it is coalesced or not."""
    return [tensor._indices(), tensor._values()]


class JaggedParts(NamedTuple):
    """A nested tensor of the jagged layout, taken apart.

    Attributes:
        low, high: the least and the largest length, where torch has been told.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor | None
    ragged: int
    low: int | None
    high: int | None


_BOUNDS = ("min_seqlen", "max_seqlen")


def jagged_parts(tensor: Any) -> JaggedParts:
    cached = tensor._metadata_cache
    low, high = (None if cached.get(name) is None else int(cached[name].shape[0]) for name in _BOUNDS)
    return JaggedParts(tensor._values.detach(), tensor._offsets, tensor._lengths, tensor._ragged_idx, low, high)


def make_jagged(parts: JaggedParts, *, requires_grad: bool) -> Any:
    bounds = {name: bound for name, bound in zip(_BOUNDS, (parts.low, parts.high), strict=True) if bound is not None}
    with between_forks():
        from torch.nested._internal.nested_tensor import NestedTensor

        if bounds:
            importlib.import_module("torch._dynamo")  # its constructor does, to mark them
    return NestedTensor(
        parts.values,
        parts.offsets,
        lengths=parts.lengths,
        _ragged_idx=parts.ragged,
        requires_grad=requires_grad,
        _metadata_cache={name: torch.zeros(bound, 0, device="cpu") for name, bound in bounds.items()},
    )


def nested_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sizes of a nested tensor of the strided layout: [tensors, dimensions]."""
    return tensor._nested_tensor_size()  # type: ignore[attr-defined]


def make_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Returns a nested tensor of the strided layout over `buffer`. torch trusts the numbers."""
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets).detach()  # type: ignore[attr-defined]


# --- torch.distributed, which is not imported here -------------------------------------------------------------------


ASYNC_COLLECTIVES = "torch.distributed._functional_collectives"  # the module of AsyncCollectiveTensor
SHARDED_TENSORS = "torch.distributed._shard.sharded_tensor"  # the module of ShardedTensor


def local_tensor(value: Any) -> Any:
    """Returns the local tensor of a DTensor as it is, or None for what is no DTensor."""
    return getattr(value, "_local_tensor", None)


def shard_order(dtensor: Any) -> tuple[int, ...] | None:
    """Returns the mesh dimensions in the order in which they shard; None for left to right.

    No public name says it, and torch 2.11 has none at all.
    """
    entries = getattr(dtensor._spec, "shard_order", None)
    return None if entries is None else tuple(mesh_dim for entry in entries for mesh_dim in entry.mesh_dims)


def store_of_group(group: Any) -> Any:
    """Returns the store through which the ranks of a process group found each other."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def store_of_default_group() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


# --- tensordict ------------------------------------------------------------------------------------------------------


TENSORCLASS_MARK = "_is_tensorclass"  # an attribute of its classes


class TensorDictParts(NamedTuple):
    entries: dict[str, Any]
    batch_size: torch.Size
    device: torch.device | None
    names: tuple[str | None, ...] | None
    is_locked: bool


def tensordict_parts(value: Any) -> TensorDictParts:
    names = value._td_dim_names
    return TensorDictParts(
        value._tensordict,
        value._batch_size,
        value._device,
        None if names is None else tuple(names),
        bool(value._is_locked),
    )


def new_tensordict(kind: Any, entries: dict[str, Any], batch_size: torch.Size, **options: Any) -> Any:
    """Returns a TensorDict over these entries, unchecked; `kind` is the class, since this file doesn't import it."""
    return kind._new_unsafe(entries, batch_size=batch_size, **options)


def inner_tensordict(value: Any, otherwise: Any = None) -> Any:
    """Returns the TensorDict in a tensorclass (which all NonTensorData are), or the entries of a TensorDict."""
    return getattr(value, "_tensordict", otherwise)


def other_fields(value: Any) -> dict[str, Any] | None:
    """Returns the fields of a tensorclass that are no entries of its TensorDict; None where it has none, or is none."""
    return getattr(value, "_non_tensordict", None)


def is_tensorclass_object(value: Any) -> bool:
    return hasattr(value, "_non_tensordict")


def is_non_tensor(fields: dict[str, Any]) -> bool:
    """Returns whether the other fields of a tensorclass are those of a NonTensorData: its value is in "data"."""
    return "_is_non_tensor" in fields


def non_tensor_value(value: Any) -> Any:
    """Returns the value of a NonTensorData as it is."""
    return value._non_tensordict["data"]


def fill_tensorclass(made: Any, inner: Any, others: dict[str, Any]) -> Any:
    """Gives a tensorclass that was made without its constructor what it is made of."""
    made.__dict__["_tensordict"] = inner
    made.__dict__["_non_tensordict"] = others
    return made


def fill_non_tensor(made: Any, inner: Any, data: Any) -> Any:
    """Does the same for a NonTensorData or MetaData, whose constructor would convert some data."""
    return fill_tensorclass(made, inner, {"data": data, "_metadata": None, "_is_non_tensor": True})


def metadata_type(kind: type) -> Any:
    """Returns the T of the class MetaData[T]; None for other classes."""
    return vars(kind).get("_expected_type")


is_locked: Callable[[Any], bool] = attrgetter("_is_locked")
stack_dim_name: Callable[[Any], str | None] = attrgetter("_td_dim_name")
empty_stack_names: Callable[[Any], Sequence[str | None] | None] = attrgetter("_empty_stack_names")
batch_size_of: Callable[[Any], torch.Size] = attrgetter("_batch_size")


def has_hooks(stack: object) -> bool:
    """Returns whether a LazyStackedTensorDict is inside of vmap."""
    # in tensordict 0.15 these names are properties
    is_new = isinstance(getattr(type(stack), "hook_in", None), property)
    names = ("_hook_in", "_hook_out") if is_new else ("hook_in", "hook_out")
    return any(getattr(stack, name) is not None for name in names)


def typed_source(typed: Any) -> Any:
    return typed._source


def fill_typed(made: Any, source: Any) -> Any:
    """Gives a TypedTensorDict that was made without its constructor the TensorDict that it shows."""
    object.__setattr__(made, "_source", source)
    return made


def params_inner(value: Any) -> Any:
    """Returns the TensorDict in a TensorDictParams; None for other values."""
    return getattr(value, "_param_td", None)


def locks_content(params: Any) -> bool:
    """Returns the argument `lock` of a TensorDictParams."""
    return bool(params._lock_content)


class UnbatchedParts(NamedTuple):
    tensor: torch.Tensor
    batch_size: tuple[int, ...] | None


def unbatched_parts(value: Any) -> UnbatchedParts:
    batch = getattr(value, "_batch_size", None)
    return UnbatchedParts(value._base_tensor(), None if batch is None else tuple(batch))
