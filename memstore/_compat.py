"""Privates of torch, tensordict and Python's library, each behind a name of ours; no other module uses one.

A private is used where a public name copies, validates, takes far longer, or runs a class's code. Each docstring names
it. `tests/test_compat.py` uses each by itself, so that a release that drops or changes one is noticed there.

- Since which version: unless a docstring says otherwise, all have been there since torch 2.11, tensordict 0.14.3 and
  Python 3.10 or longer, the oldest that memstore takes.
- What is done without one: what `_private` looks up, when this is imported, raises MissingPackageError when it is used,
  and names it; so a store opens without what only fake tensors need. What objects are asked for when a function is
  called, raises AttributeError there, unless a docstring says otherwise.

Names are bound here, so that a caller pays no frame for those that it uses often. tensordict and most of
torch.distributed are not imported here: they take a second, and whoever has one of their objects has imported them.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import copyreg
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from multiprocessing import process
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils import collate as collating

from memstore._threads import between_forks
from memstore.errors import MissingPackageError


def _private(home: ModuleType, path: str) -> Any:
    """Returns what a module has at a path with dots; where it has nothing, a function that raises."""
    found: Any = home
    for name in path.split("."):
        found = getattr(found, name, None)

    def refuse(*_: Any, **__: Any) -> Any:
        version = getattr(home, "__version__", sys.version.split()[0])
        raise MissingPackageError(
            f"{home.__name__} {version} has no {path}, a private name that this needs: install a version that "
            "memstore is tested with, or a newer memstore"
        )

    return refuse if found is None else found


# --- torch: what classes of tensors do -------------------------------------------------------------------------------


DisableTorchFunction: Any = _private(torch, "_C.DisableTorchFunction")
"""A context in which neither subclasses of tensors nor modes are asked about torch functions."""

DisableTorchFunctionSubclass: Any = _private(torch, "_C.DisableTorchFunctionSubclass")
"""A context in which subclasses of tensors aren't asked about torch functions, but modes are."""

disabled_torch_function: Any = _private(torch, "_C._disabled_torch_function_impl")
"""The `__torch_function__` of a subclass that leaves torch functions as they are."""

disabled_torch_dispatch: Any = _private(torch, "_C._disabled_torch_dispatch_impl")

"""The `__torch_dispatch__` of a subclass that leaves operators as they are."""


def has_own_operators(kind: Any) -> bool:
    """Returns whether a class says what torch's operators do with its tensors: a copy or view may be anything then."""
    return kind.__torch_dispatch__ is not disabled_torch_dispatch


TensorBase: Any = _private(torch, "_C.TensorBase")
"""The class below torch.Tensor: its methods and getters are those of C, whatever a subclass has in their place."""

make_subclass: Callable[..., Any] = _private(torch, "Tensor._make_subclass")
"""Makes a tensor of a class over another one's memory: half the time of nn.Parameter(...), and no detach."""

make_wrapper_subclass: Callable[..., Any] = _private(torch, "Tensor._make_wrapper_subclass")
"""Makes a tensor of a class without memory, which says that it is on a device."""

is_traceable_wrapper_subclass_type: Callable[[type], bool] = _private(
    torch, "utils._python_dispatch.is_traceable_wrapper_subclass_type"
)
"""Returns whether a class has `__tensor_flatten__`: its instances are made of other tensors."""

BUFFER_MARK = "_is_buffer"
"""The attribute of a torch.nn.Buffer. A torch without it takes such a tensor for a plain one."""

PARAMETER_MARK = "_is_param"
"""The attribute that isinstance(..., Parameter) looks at. A torch without it takes such a tensor for a plain one."""

HOOK_DICTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of a tensor with the dicts of its hooks, from which the handles of hooks remove them."""


@cache
def slot_names(cls: type[Any]) -> tuple[str, ...]:
    """Returns the names that a class and its bases have in `__slots__`, mangled. Uses copyreg._slotnames."""
    return tuple(copyreg._slotnames(cls))  # type: ignore[attr-defined]


# --- torch: tensors, storages and operators --------------------------------------------------------------------------


throw_on_mutable_data_ptr: Callable[[torch.Tensor], None] = _private(torch, "_C._set_throw_on_mutable_data_ptr")
"""Makes torch raise when it is asked for a pointer by which the tensor's storage could be written."""

swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = _private(torch, "_C._swap_tensor_impl")
"""Swaps what two tensor objects are in C++. Raises RuntimeError if C++ has a weak reference of one."""

tensor_impl: Callable[[torch.Tensor], int] = attrgetter("_cdata")
"""Returns the address of what a tensor object is in C++: `Tensor._cdata`."""

version_of: Callable[[torch.Tensor], int] = _private(torch, "_C.TensorBase._version.__get__")
"""Returns how often a tensor was written, as torch counts it. Raises RuntimeError for an inference tensor."""

set_version: Callable[[Sequence[torch.Tensor], Sequence[int]], None] = _private(
    torch, "_C._autograd._unsafe_set_version_counter"
)
"""Sets these counts."""

is_view: Callable[[torch.Tensor], bool] = _private(torch, "_C.TensorBase._is_view")
"""Returns whether autograd takes a tensor for a view of another one."""

use_count: Callable[[torch.Tensor], int] = _private(torch, "_C.TensorBase._use_count")
"""Returns how many users a tensor has in C++: its Python object, views, nodes of graphs."""

neg_view: Callable[[torch.Tensor], torch.Tensor] = _private(torch, "_neg_view")
"""Returns a view with the bit that says that its values are negated."""

is_in_transform: Callable[[torch.Tensor], bool] = _private(torch, "_C._functorch.is_functorch_wrapped_tensor")
"""Returns whether a tensor is one that vmap, grad and the like have wrapped."""

parse_to: Callable[..., tuple[Any, ...]] = _private(torch, "_C._nn._parse_to")
"""Returns device, dtype, non_blocking and memory format of the arguments of `Tensor.to`."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Returns the schema of an operator: which arguments it writes, and what it returns views of. `OpOverload._schema`."""

call_of: Callable[[Any], Callable[..., Any]] = attrgetter("_op")
"""Returns an operator's call of C: 0.3 us less than that of `OpOverload`, of which it is `_op`."""

has_kernel: Callable[[str, str], bool] = _private(torch, "_C._dispatch_has_kernel_for_dispatch_key")
"""Returns whether an operator, by name, has a kernel of its own for a dispatch key."""

aten_to_copy: Any = _private(torch, "ops.aten._to_copy")
"""The operator of `Tensor.to` that always copies."""

aten_unsafe_index: Any = _private(torch, "ops.aten._unsafe_index.Tensor")
"""The operator of indexing that doesn't look whether indices are in range, by which torch.export writes it."""


def new_shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Returns a storage in memory that processes share. Uses UntypedStorage._new_shared."""
    kind: Any = torch.UntypedStorage
    return kind._new_shared(nbytes, device="cpu")


_storage_use_count: Any = _private(torch, "_C._storage_Use_Count")


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Returns how many users a storage has in C++: its object, and each tensor. Uses torch._C._storage_Use_Count."""
    return _storage_use_count(storage._cdata)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies many tensors in a third of the time that a call each takes. Not in forward-mode differentiation.

    Uses torch._foreach_copy_.
    """
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Makes a function that tells of as many tensors whether each is like the one here at its place.

    It compares class, device, dtype, shape, strides, requires_grad, and the conj and neg bits, in 0.1 µs a tensor. It
    says no of a tensor that comes twice, and in inference mode of tensors that were made outside. Returns None where
    torch can't make it: it is what torch.compile checks before it runs what it has compiled.
    """
    try:
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        kind: Any = torch._C._dynamo.guards.TensorGuards
        check: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        is_good = check(*tensors)
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None

    def are_alike(*others: torch.Tensor) -> bool:
        return not any(map(_is_nested, others)) and check(*others)  # of strides that raise, torch ends the process

    return are_alike if is_good else None


_is_nested = attrgetter("is_nested")


def in_forward_ad() -> bool:
    """Returns whether forward-mode differentiation is on: torch.autograd.forward_ad._current_level."""
    module: Any = forward_ad
    return bool(module._current_level >= 0)


# --- torch: modes and transforms -------------------------------------------------------------------------------------


DispatchMode = TorchDispatchMode
"""The base of modes that see operators, of torch.utils._python_dispatch, without which this can't be imported."""

count_dispatch_modes: Callable[[], int] = _private(torch, "_C._len_torch_dispatch_stack")
dispatch_mode_at: Callable[[int], Any] = _private(torch, "_C._get_dispatch_stack_at")
push_dispatch_mode: Callable[[Any], None] = _private(torch, "_C._push_on_torch_dispatch_stack")
pop_dispatch_mode: Callable[[], Any] = partial(_private(torch, "_C._pop_torch_dispatch_stack"), None)
"""These four count, return, add and remove modes for operators of this thread."""

count_function_modes: Callable[[], int] = _private(torch, "_C._len_torch_function_stack")
push_function_mode: Callable[[Any], None] = _private(torch, "_C._push_on_torch_function_stack")
pop_function_mode: Callable[[], Any] = _private(torch, "_C._pop_torch_function_stack")
"""These three count, add and remove modes for torch functions of this thread."""

current_transform: Callable[[], Any] = _private(torch, "_C._functorch.peek_interpreter_stack")
push_transform: Callable[[Any], None] = _private(torch, "_C._functorch.push_dynamic_layer_stack")
pop_transform: Callable[[], Any] = _private(torch, "_C._functorch.pop_dynamic_layer_stack")
"""These three return, add and remove the innermost transform of torch.func; outside of one the first returns None."""

tracing_state: Callable[[], Any] = _private(torch, "_C._get_tracing_state")
set_tracing_state: Callable[[Any], None] = _private(torch, "_C._set_tracing_state")
"""These two return and set what torch.jit.trace has in this thread: copies can crash under it."""

_PRE_DISPATCH: Any = _private(torch, "_C.DispatchKey.PreDispatch")
is_before_dispatch: Callable[[], bool] = partial(
    _private(torch, "_C._dispatch_tls_is_dispatch_key_included"), _PRE_DISPATCH
)
set_before_dispatch: Callable[[bool], None] = partial(
    _private(torch, "_C._dispatch_tls_set_dispatch_key_included"), _PRE_DISPATCH
)
"""These two return and say whether modes of torch.export and make_fx see operators: they have a stack of their own."""

SavedTensorsMode: type[Any] = getattr(torch.autograd.graph, "_CloneArgBeforeMutateMode", type(None))
"""The mode of allow_mutation_on_saved_tensors, which copies what autograd has saved before it is written.

A torch without torch.autograd.graph._CloneArgBeforeMutateMode has its mode put aside as all others are.
"""

DisableAutocast: Any = _private(torch, "_C._DisableAutocast")
"""A context without torch.autocast."""

_eval_frame: Any = _private(torch, "_C._dynamo.eval_frame")


def skip_compilation(function: FunctionType) -> None:
    """Keeps torch.compile away from a function and from what it calls.

    Uses `_torchdynamo_disable`, by which it isn't inlined into a graph, and set_code_exec_strategy of
    torch._C._dynamo.eval_frame, by which it isn't compiled itself. (`torch.compiler.disable` does the same, and imports
    the compiler, which takes seconds.)
    """
    plain: Any = function
    plain._torchdynamo_disable = True
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(plain.__code__, _eval_frame._FrameExecStrategy(skip, skip))


_tracing_context: Any = _private(torch, "_guards.TracingContext.try_get")


def is_compiling() -> bool:
    """Returns whether torch.compile traces this thread's code, as torch._guards.TracingContext says."""
    return _tracing_context() is not None


def is_torch_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is one of torch's own FakeTensorMode, whose class is in torch._subclasses."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)


_function_modes: Any = _private(torch, "overrides._get_current_function_mode_stack")


def default_device(function: Any) -> torch.device | None:
    """Returns the device that `with torch.device(...)` gives what a torch function makes; None where it gives none.

    Uses torch.overrides._get_current_function_mode_stack and torch.utils._device.
    """
    module: Any = sys.modules.get("torch.utils._device")  # the context imports it
    if module is None or function not in module._device_constructors():
        return None
    found = (mode.device for mode in _function_modes() if isinstance(mode, module.DeviceContext))
    return next(found, None)


# --- torch: tensors that are made of several -------------------------------------------------------------------------


make_quantized: Callable[..., torch.Tensor] = _private(torch, "_make_per_tensor_quantized_tensor")
"""Makes a quantized tensor of its integers, scale and zero point."""

make_channel_quantized: Callable[..., torch.Tensor] = _private(torch, "_make_per_channel_quantized_tensor")
"""Makes one of its integers, scales, zero points and their dimension."""


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and values of a sparse tensor, coalesced or not. Uses Tensor._indices and _values."""
    return [tensor._indices(), tensor._values()]


class JaggedParts(NamedTuple):
    """Nested tensor of the jagged layout, taken apart.

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
    """Takes a tensor apart: NestedTensor._values, _offsets, _lengths, _ragged_idx and _metadata_cache."""
    cached = tensor._metadata_cache
    low, high = (None if cached.get(name) is None else int(cached[name].shape[0]) for name in _BOUNDS)
    return JaggedParts(tensor._values.detach(), tensor._offsets, tensor._lengths, tensor._ragged_idx, low, high)


def make_jagged(parts: JaggedParts, *, requires_grad: bool) -> Any:
    """Makes a tensor of its parts. Uses NestedTensor of torch.nested._internal, with arguments that are private."""
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
    """Returns the sizes of a nested tensor of the strided layout: [tensors, dimensions]. `_nested_tensor_size`."""
    return tensor._nested_tensor_size()  # type: ignore[attr-defined]


def make_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Returns a nested tensor of the strided layout over `buffer`. torch trusts the numbers.

    Uses torch._nested_view_from_buffer.
    """
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets).detach()  # type: ignore[attr-defined]


# --- torch.nn, torch.optim and torch.utils.data ----------------------------------------------------------------------


class ModuleDicts(NamedTuple):
    """Dicts that a module has its tensors in.

    Attributes:
        passing: the names of buffers that a state dict doesn't have.
    """

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    passing: set[str]


MODULE_DICTS = frozenset(("_parameters", "_buffers", "_modules"))
"""The attributes of a module that are dicts of its parameters, buffers and children."""


def module_dicts(module: torch.nn.Module) -> ModuleDicts:
    """Returns `_parameters`, `_buffers` and `_non_persistent_buffers_set` of nn.Module, past a class's __getattr__."""
    inside = vars(module)
    return ModuleDicts(inside["_parameters"], inside["_buffers"], inside["_non_persistent_buffers_set"])


_PLAIN_LOAD: Any = _private(torch, "nn.Module._load_from_state_dict")


def may_rename_what_it_loads(module: torch.nn.Module) -> bool:
    """Returns whether a module's load_state_dict may be another than torch's, or have hooks that change its argument.

    Uses nn.Module._load_from_state_dict and _load_state_dict_pre_hooks.
    """
    one: Any = module
    kind: Any = type(one)
    load = kind._load_from_state_dict
    return bool(
        one._load_state_dict_pre_hooks
        or kind.load_state_dict is not torch.nn.Module.load_state_dict
        or (load is not _PLAIN_LOAD and not load.__module__.startswith("torch.nn.modules."))
    )


def copy_module_versions(state: Any, loaded: Any) -> None:
    """Gives a state dict the versions of modules that another one has: `_metadata`, or none where there is none."""
    loaded._metadata = getattr(state, "_metadata", {})


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether hooks change what an optimizer loads: `_optimizer_load_state_dict_pre_hooks`.

    None does where there is no such attribute, as in an optimizer that isn't torch's.
    """
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


MODULE_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
"""Classes of modules that wrap another one: module, name, and the attribute that has it.

A torch without one has no such modules, and a state dict then has the attribute's name in its names.
"""

collate: Callable[..., Any] = collating.collate
collate_functions: dict[Any, Any] = collating.default_collate_fn_map
"""What torch.utils.data.default_collate calls, and its table of functions by type, which torch documents for others to
extend: both are in torch.utils.data._utils.collate, without which this module can't be imported."""


def child_processes() -> Iterable[Any]:
    """Returns the Processes that multiprocessing has started and not joined: multiprocessing.process._children.

    `multiprocessing.active_children` also reaps them, and a DataLoader waits for its own.
    """
    return tuple(process._children)  # type: ignore[attr-defined]


# --- torch.distributed, which is not imported here -------------------------------------------------------------------


ASYNC_COLLECTIVES = "torch.distributed._functional_collectives"
"""The module of AsyncCollectiveTensor. Without it no tensor is taken for one."""

SHARDED_TENSORS = "torch.distributed._shard.sharded_tensor"
"""The module of ShardedTensor. Without it no tensor is taken for one."""

STRIDED_SHARD = "_StridedShard"
"""The class of a placement that FSDP over tensor parallelism has. Without it such a placement is unknown."""


COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"))
"""The namespaces of operators in which other processes take part. One that a torch lacks has none."""


def is_sharded_tensor(value: Any) -> bool:
    """Returns whether a value is a ShardedTensor; False where its module wasn't imported."""
    kind = getattr(sys.modules.get(SHARDED_TENSORS), "ShardedTensor", None)
    return kind is not None and isinstance(value, kind)


def local_shards_wrapper(value: Any) -> Any:
    """Returns the class LocalShardsWrapper, of torch.distributed.tensor, if the value is one; else None."""
    kind = getattr(sys.modules.get("torch.distributed.tensor._shards_wrapper"), "LocalShardsWrapper", None)
    return kind if kind is not None and isinstance(value, kind) else None


def set_local_shards(sharded: Any, shards: list[Any]) -> None:
    """Gives a ShardedTensor other shards: `_local_shards`."""
    sharded._local_shards = shards


def local_tensor(value: Any) -> Any:
    """Returns the local tensor of a DTensor as it is, or None for what is no DTensor. Uses DTensor._local_tensor."""
    return getattr(value, "_local_tensor", None)


def shard_order(dtensor: Any) -> tuple[int, ...] | None:
    """Returns the mesh dimensions in the order in which they shard; None for left to right.

    Uses DTensor._spec, whose shard_order is there since torch 2.12; without it, None. No public name says it.
    """
    entries = getattr(dtensor._spec, "shard_order", None)
    return None if entries is None else tuple(mesh_dim for entry in entries for mesh_dim in entry.mesh_dims)


def store_of_group(group: Any) -> Any:
    """Returns the store through which the ranks of a process group found each other: _get_process_group_store."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def store_of_default_group() -> Any:
    """Returns that of the default group. Uses _get_default_store of torch.distributed.distributed_c10d."""
    return torch.distributed.distributed_c10d._get_default_store()


def checkpoint_storage_info() -> Any:
    """Returns the class that says where a checkpoint of DCP has an item: checkpoint.filesystem._StorageInfo."""
    with between_forks():
        from torch.distributed.checkpoint import filesystem
    return filesystem._StorageInfo


# --- tensordict ------------------------------------------------------------------------------------------------------


TENSORCLASS_MARK = "_is_tensorclass"
"""An attribute of the classes that @tensorclass has made. A class without it isn't taken for one."""


class TensorDictParts(NamedTuple):
    """TensorDict, taken apart."""

    entries: dict[str, Any]
    batch_size: torch.Size
    device: torch.device | None
    names: tuple[str | None, ...] | None
    is_locked: bool


def tensordict_parts(value: Any) -> TensorDictParts:
    """Takes one apart: TensorDict._tensordict, _batch_size, _device, _td_dim_names and _is_locked."""
    names = value._td_dim_names
    return TensorDictParts(
        value._tensordict,
        value._batch_size,
        value._device,
        None if names is None else tuple(names),
        bool(value._is_locked),
    )


entries_of: Callable[[Any], dict[str, Any]] = attrgetter("_tensordict")
"""Returns the dict that a TensorDict has its entries in."""


def new_tensordict(kind: Any, entries: dict[str, Any], batch_size: torch.Size, **options: Any) -> Any:
    """Returns a TensorDict over these entries, unchecked: TensorDict._new_unsafe. `kind` is the class."""
    return kind._new_unsafe(entries, batch_size=batch_size, **options)


def set_entry(value: Any, key: str, entry: Any) -> None:
    """Puts an entry into a TensorDict, also into one that is locked. Uses TensorDict._tensordict and _erase_cache."""
    value._tensordict[key] = entry
    value._erase_cache()


def raw_getter(value: Any) -> Callable[..., Any]:
    """Returns the `get` of a mapping, and of a TensorDict `_get_str`: its `get` unwrapped NonTensorData before 0.15."""
    return getattr(value, "_get_str", value.get)


def inner_tensordict(value: Any, otherwise: Any = None) -> Any:
    """Returns the TensorDict in a tensorclass (which all NonTensorData are), or the entries of a TensorDict.

    Uses `_tensordict`; `otherwise` for a value that has none.
    """
    return getattr(value, "_tensordict", otherwise)


def other_fields(value: Any) -> dict[str, Any] | None:
    """Returns the fields of a tensorclass that are no entries of its TensorDict; None where it has none, or is none.

    Uses `_non_tensordict`.
    """
    return getattr(value, "_non_tensordict", None)


def is_tensorclass_object(value: Any) -> bool:
    """Returns whether a value is an object of a tensorclass: it has `_non_tensordict`."""
    return hasattr(value, "_non_tensordict")


def is_non_tensor(fields: dict[str, Any]) -> bool:
    """Returns whether the other fields of a tensorclass are those of a NonTensorData: its value is in "data".

    Uses the field `_is_non_tensor`.
    """
    return "_is_non_tensor" in fields


def non_tensor_value(value: Any) -> Any:
    """Returns the value of a NonTensorData as it is. Uses `_non_tensordict`."""
    return value._non_tensordict["data"]


def fill_tensorclass(made: Any, inner: Any, others: dict[str, Any]) -> Any:
    """Gives a tensorclass that was made without its constructor its `_tensordict` and `_non_tensordict`."""
    made.__dict__["_tensordict"] = inner
    made.__dict__["_non_tensordict"] = others
    return made


def tensorclass_like(value: Any, inner: Any) -> Any:
    """Returns a tensorclass like another one, with other tensors. Uses _from_tensordict and _non_tensordict."""
    return type(value)._from_tensordict(inner, dict(value._non_tensordict or {}))


def fill_non_tensor(made: Any, inner: Any, data: Any) -> Any:
    """Fills a NonTensorData or MetaData as `fill_tensorclass` does: its constructor would convert some data."""
    return fill_tensorclass(made, inner, {"data": data, "_metadata": None, "_is_non_tensor": True})


def metadata_type(kind: type) -> Any:
    """Returns the T of the class MetaData[T]: `_expected_type`; None for other classes."""
    return vars(kind).get("_expected_type")


is_locked: Callable[[Any], bool] = attrgetter("_is_locked")
"""Returns whether a TensorDict is locked: `_is_locked`, which a lazy stack's `is_locked` computes anew."""

stack_dim_name: Callable[[Any], str | None] = attrgetter("_td_dim_name")
"""Returns the name of the dimension along which a LazyStackedTensorDict stacks."""

empty_stack_names: Callable[[Any], Sequence[str | None] | None] = attrgetter("_empty_stack_names")
"""Returns the names of the dimensions of a lazy stack without members."""

batch_size_of: Callable[[Any], torch.Size] = attrgetter("_batch_size")
"""Returns the batch size of a lazy stack without members."""


def has_hooks(stack: object) -> bool:
    """Returns whether a LazyStackedTensorDict is inside of vmap.

    Uses `hook_in` and `hook_out`, which are properties since tensordict 0.15, and `_hook_in` and `_hook_out` then.
    """
    is_new = isinstance(getattr(type(stack), "hook_in", None), property)
    names = ("_hook_in", "_hook_out") if is_new else ("hook_in", "hook_out")
    return any(getattr(stack, name) is not None for name in names)


def typed_source(typed: Any) -> Any:
    """Returns the TensorDict that a TypedTensorDict shows: `_source`."""
    return typed._source


def fill_typed(made: Any, source: Any) -> Any:
    """Gives a TypedTensorDict that was made without its constructor the TensorDict that it shows: `_source`."""
    object.__setattr__(made, "_source", source)
    return made


def params_inner(value: Any) -> Any:
    """Returns the TensorDict in a TensorDictParams: `_param_td`; None for other values."""
    return getattr(value, "_param_td", None)


def locks_content(params: Any) -> bool:
    """Returns the argument `lock` of a TensorDictParams: `_lock_content`."""
    return bool(params._lock_content)


class UnbatchedParts(NamedTuple):
    """UnbatchedTensor, taken apart."""

    tensor: torch.Tensor
    batch_size: tuple[int, ...] | None


def unbatched_parts(value: Any) -> UnbatchedParts:
    """Takes one apart: UnbatchedTensor._base_tensor and _batch_size; a batch size that isn't there is None."""
    batch = getattr(value, "_batch_size", None)
    return UnbatchedParts(value._base_tensor(), None if batch is None else tuple(batch))


def saved_classes() -> Iterable[type]:
    """Returns the classes that TensorDict.load_memmap knows: tensordict.base._ACCEPTED_CLASSES."""
    with between_forks():
        from tensordict import base
    return base._ACCEPTED_CLASSES


def saved_dtypes() -> Mapping[str, torch.dtype]:
    """Returns the dtypes that it knows, by their text: tensordict.utils._STR_DTYPE_TO_DTYPE."""
    with between_forks():
        from tensordict import utils
    return utils._STR_DTYPE_TO_DTYPE


def saved_file_name(key: str) -> str:
    """Returns the file name of an entry, without its ending: tensordict.utils._encode_key_for_filesystem."""
    with between_forks():
        from tensordict import utils
    return utils._encode_key_for_filesystem(key)
