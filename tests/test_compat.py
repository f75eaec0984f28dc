"""Each private name of torch and tensordict that memstore uses is there, and does what memstore takes it to do."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import multiprocessing
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    tensorclass,
)
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import default_collate

from memstore import _compat
from memstore.errors import MissingPackageError


@tensorclass
class Pair:
    a: torch.Tensor
    text: str


class Typed(TypedTensorDict):
    a: torch.Tensor


@pytest.fixture
def dtensor(tmp_path: Path) -> Iterator[DTensor]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        yield distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
    finally:
        dist.destroy_process_group()


# --- torch -----------------------------------------------------------------------------------------------------------


def test_marks_of_parameters_and_buffers() -> None:
    assert getattr(torch.nn.Buffer(torch.ones(1)), _compat.BUFFER_MARK) is True
    marked = torch.ones(2)
    assert not isinstance(marked, torch.nn.Parameter)
    setattr(marked, _compat.PARAMETER_MARK, True)
    assert isinstance(marked, torch.nn.Parameter)


def test_tensors_alike() -> None:
    ones = [torch.ones(2, 3), torch.nn.Parameter(torch.ones(())), torch.ones(2, dtype=torch.complex64)]
    alike = _compat.alike(ones)
    assert alike is not None
    assert alike(*[one.detach().clone().as_subclass(type(one)).requires_grad_(one.requires_grad) for one in ones])
    for i, other in (
        *((0, torch.ones(3, 3)), (0, torch.ones(3, 2).t()), (0, torch.ones(2, 3, dtype=torch.float64))),
        *((0, torch.ones(2, 3, requires_grad=True)), (0, torch.nn.Parameter(torch.ones(2, 3), requires_grad=False))),
        *((0, torch._neg_view(torch.ones(2, 3))), (0, torch.ones(2, 3, device="meta"))),
        *((1, torch.nn.Parameter(torch.ones(()), requires_grad=False)), (2, ones[2].conj())),
    ):
        assert not alike(*ones[:i], other, *ones[i + 1 :]), other
    assert _compat.alike([ones[0], ones[0]]) is None  # which is refused too if it comes twice


def test_subclasses() -> None:
    plain = torch.ones(2)
    made = _compat.make_subclass(torch.nn.Parameter, plain, True)
    assert type(made) is torch.nn.Parameter and made.requires_grad and made.data_ptr() == plain.data_ptr()


def test_shared_storages() -> None:
    storage = _compat.new_shared_storage(10)
    assert storage.is_shared() and storage.nbytes() >= 10


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError


class LoudFunctions(TorchFunctionMode):
    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError


def test_torch_functions_of_classes_and_modes_are_left_out() -> None:
    loud, plain = torch.ones(1).as_subclass(Loud), torch.ones(1)
    with pytest.raises(RuntimeError):
        loud.numel()
    with _compat.DisableTorchFunctionSubclass():
        assert loud.numel() == 1
    with LoudFunctions():
        with _compat.DisableTorchFunction():
            assert loud.numel() == plain.numel() == 1
        with _compat.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError):
            plain.numel()


def test_classes_that_leave_functions_and_operators_as_they_are() -> None:
    assert torch.Tensor.__torch_dispatch__ is _compat.disabled_torch_dispatch
    assert _compat.has_own_operators(TwoTensor) and not _compat.has_own_operators(torch.nn.Parameter)

    class Quiet(torch.Tensor):
        __torch_function__ = _compat.disabled_torch_function

    assert type(torch.ones(1).as_subclass(Quiet) + 1) is torch.Tensor


def test_tensors_in_c() -> None:
    class Wrong(torch.Tensor):
        requires_grad = True  # type: ignore[assignment]

    assert _compat.TensorBase.requires_grad.__get__(torch.ones(1).as_subclass(Wrong)) is False
    assert issubclass(torch.Tensor, _compat.TensorBase)


def test_wrappers_without_memory() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            device, strided = torch.device("meta"), torch.strided
            return _compat.make_wrapper_subclass(
                cls, inner.shape, inner.stride(), 0, None, inner.dtype, strided, device
            )

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(parts: Any, *_: Any) -> Wrapper:
            return Wrapper(parts["inner"])

        __torch_dispatch__ = classmethod(lambda *_, **__: None)  # type: ignore[assignment]

    made = Wrapper(torch.ones(2, 3))
    assert type(made) is Wrapper and made.shape == (2, 3) and made.is_meta
    assert _compat.is_traceable_wrapper_subclass_type(Wrapper)
    assert not _compat.is_traceable_wrapper_subclass_type(torch.nn.Parameter)


def test_dicts_of_hooks() -> None:
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: grad)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert [len(getattr(leaf, name)) for name in _compat.HOOK_DICTS] == [1, 1]


def test_names_of_slots() -> None:
    class Slotted:
        __slots__ = ("__hidden", "__weakref__", "shown")

    class Below(Slotted):
        __slots__ = ("more",)

    assert set(_compat.slot_names(Below)) == {"_Slotted__hidden", "more", "shown"}
    assert _compat.slot_names(dict) == ()


def test_pointers_to_write_by_are_refused() -> None:
    tensor = torch.ones(2)
    _compat.throw_on_mutable_data_ptr(tensor)
    assert tensor.sum() == 2
    with pytest.raises(RuntimeError):
        tensor.add_(1)


def test_content_of_tensors_is_swapped() -> None:
    one, other = torch.ones(1), torch.zeros(2)
    before = _compat.tensor_impl(one), _compat.tensor_impl(other)
    _compat.swap_tensor_impl(one, other)
    assert one.tolist() == [0.0, 0.0] and other.tolist() == [1.0]
    assert (_compat.tensor_impl(other), _compat.tensor_impl(one)) == before


def test_versions_of_tensors() -> None:
    tensor = torch.ones(1)
    assert _compat.version_of(tensor) == 0
    tensor.add_(1)
    assert _compat.version_of(tensor) == 1
    _compat.set_version((tensor,), (7,))
    assert _compat.version_of(tensor) == 7
    with torch.inference_mode(), pytest.raises(RuntimeError):
        _compat.version_of(torch.ones(1))


def test_views_and_users_of_tensors() -> None:
    base = torch.ones(2, requires_grad=True)
    assert _compat.use_count(base) == 1 and not _compat.is_view(base)
    view = base[1:]
    assert _compat.is_view(view) and _compat.use_count(base) > 1


def test_users_of_storages() -> None:
    tensor = torch.ones(2)
    storage = tensor.untyped_storage()
    alone = _compat.storage_use_count(storage)
    view = tensor[1:]
    assert view.untyped_storage() is storage, "one object for all tensors of a storage"
    assert _compat.storage_use_count(storage) == alone + 1


def test_views_of_negated_values() -> None:
    tensor = torch.tensor([1.0, -2.0])
    view = _compat.neg_view(tensor)
    assert view.is_neg() and view.tolist() == [-1.0, 2.0] and view.untyped_storage() is tensor.untyped_storage()


def test_arguments_of_to_are_parsed() -> None:
    assert _compat.parse_to("meta", torch.float16)[:2] == (torch.device("meta"), torch.float16)
    assert _compat.parse_to(torch.int8, non_blocking=True)[:3] == (None, torch.int8, True)


def test_operators() -> None:
    add = torch.ops.aten.add_.Tensor
    (first, *_) = _compat.schema_of(add).arguments
    assert first.name == "self" and first.alias_info.is_write
    tensor = torch.ones(2)
    assert _compat.call_of(torch.ops.aten.neg.default)(tensor).tolist() == [-1.0, -1.0]
    assert _compat.has_kernel("aten::mm", "AutocastCPU") and not _compat.has_kernel("aten::add.Tensor", "AutocastCPU")
    assert _compat.aten_to_copy(tensor).data_ptr() != tensor.data_ptr()
    assert _compat.aten_unsafe_index(tensor, [torch.tensor([1])]).tolist() == [1.0]


# --- torch: modes ----------------------------------------------------------------------------------------------------


def test_modes_for_operators() -> None:
    class Mode(_compat.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    before = _compat.count_dispatch_modes()
    with Mode() as mode:
        assert _compat.count_dispatch_modes() == before + 1 and _compat.dispatch_mode_at(before) is mode
        assert _compat.pop_dispatch_mode() is mode and _compat.count_dispatch_modes() == before
        _compat.push_dispatch_mode(mode)
        assert _compat.dispatch_mode_at(before) is mode


def test_modes_for_functions() -> None:
    before = _compat.count_function_modes()
    with LoudFunctions() as mode:
        assert _compat.count_function_modes() == before + 1
        assert _compat.pop_function_mode() is mode and torch.ones(1).numel() == 1
        _compat.push_function_mode(mode)


def test_transforms_are_taken_away() -> None:
    seen: list[int] = []

    def look(one: torch.Tensor) -> torch.Tensor:
        transform = _compat.pop_transform()
        assert _compat.current_transform() is None
        seen.append(torch.ones(2).numel())
        _compat.push_transform(transform)
        assert _compat.current_transform() is not None
        return one

    torch.func.vmap(look)(torch.ones(2))
    assert seen == [2] and _compat.current_transform() is None


def test_tracing() -> None:
    seen: list[bool] = []

    def look(one: torch.Tensor) -> torch.Tensor:
        state = _compat.tracing_state()
        _compat.set_tracing_state(None)
        seen.append(state is not None and _compat.tracing_state() is None)
        _compat.set_tracing_state(state)
        return one + 1

    torch.jit.trace(look, torch.ones(1))
    assert True in seen and _compat.tracing_state() is None


def test_modes_before_dispatch() -> None:
    seen: list[bool] = []

    def look(one: torch.Tensor) -> torch.Tensor:
        seen.append(_compat.is_before_dispatch())
        _compat.set_before_dispatch(False)
        seen.append(_compat.is_before_dispatch())
        _compat.set_before_dispatch(True)
        return one + 1

    make_fx(look, pre_dispatch=True)(torch.ones(1))
    assert seen == [True, False] and not _compat.is_before_dispatch()


def test_the_mode_of_saved_tensors() -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert isinstance(_compat.dispatch_mode_at(_compat.count_dispatch_modes() - 1), _compat.SavedTensorsMode)


def test_autocast_is_left_out() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16
        with _compat.DisableAutocast():
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32


@pytest.mark.timeout(120)
def test_compilation_is_skipped_and_seen() -> None:
    seen: list[bool] = []

    def skipped(one: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return one + 1

    _compat.skip_compilation(skipped)  # type: ignore[arg-type]
    torch.compile(lambda one: skipped(one) * 2, backend="eager")(torch.ones(1))
    assert seen == [False]
    with tracing(TracingContext(None)):
        assert _compat.is_compiling()
    assert not _compat.is_compiling()


def test_fake_tensors_of_torch() -> None:
    with FakeTensorMode():
        assert _compat.is_torch_fake(torch.ones(1))
    assert not _compat.is_torch_fake(torch.ones(1)) and not _compat.is_torch_fake(torch.ones(1, device="meta"))


def test_devices_by_default() -> None:
    assert _compat.default_device(torch.ones) is None
    with torch.device("meta"):
        assert _compat.default_device(torch.ones) == torch.device("meta")
        assert _compat.default_device(torch.add) is None


# --- torch: tensors that are made of several -------------------------------------------------------------------------


def test_transforms_are_seen() -> None:
    seen: list[bool] = []

    def look(one: torch.Tensor) -> torch.Tensor:
        seen.append(_compat.is_in_transform(one))
        return one

    torch.func.vmap(look)(torch.ones(2))
    assert seen == [True] and not _compat.is_in_transform(torch.ones(2))


def test_copies_of_many() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.int32)], [torch.ones(2), torch.ones(3)]
    _compat.copy_each(targets, sources, non_blocking=True)
    assert all(target.all() for target in targets)


def test_forward_differentiation_is_seen() -> None:
    assert not _compat.in_forward_ad()
    with forward_ad.dual_level():
        assert _compat.in_forward_ad()


def test_quantized_tensors() -> None:
    integers = torch.tensor([[1, 2]], dtype=torch.int8)
    assert _compat.make_quantized(integers, 0.5, 1).dequantize().tolist() == [[0.0, 0.5]]
    made = _compat.make_channel_quantized(integers, torch.tensor([2.0]), torch.tensor([1]), 0)
    assert made.dequantize().tolist() == [[0.0, 2.0]]


def test_parts_of_sparse_tensors() -> None:
    indices, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    found = _compat.coo_parts(torch.sparse_coo_tensor(indices, values, (3,), is_coalesced=False))
    assert torch.equal(found[0], indices) and torch.equal(found[1], values)


def test_jagged_tensors() -> None:
    made = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    made.max()  # caches its bounds, in some versions of torch
    parts = _compat.jagged_parts(made)
    assert parts.values.shape == (5,) and parts.offsets.tolist() == [0, 2, 5] and parts.lengths is None
    assert parts.ragged == 1 and parts.low in (None, 2) and parts.high in (None, 3)
    again = _compat.make_jagged(parts._replace(low=2, high=3), requires_grad=False)
    assert [one.tolist() for one in again.unbind()] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    assert _compat.jagged_parts(again)[3:] == (1, 2, 3)


def test_nested_tensors() -> None:
    sizes = torch.tensor([[2], [1]])
    made = _compat.make_nested(torch.arange(3.0), sizes, torch.tensor([[1], [1]]), torch.tensor([0, 2]))
    assert made.is_nested and [one.tolist() for one in made.unbind()] == [[0.0, 1.0], [2.0]]
    assert torch.equal(_compat.nested_sizes(made), sizes)


def test_dtensors(dtensor: DTensor) -> None:
    assert torch.equal(_compat.local_tensor(dtensor), torch.ones(4))
    assert _compat.local_tensor(torch.ones(1)) is None
    assert _compat.shard_order(dtensor) in (None, ())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (_compat.ASYNC_COLLECTIVES, "AsyncCollectiveTensor"),
        (_compat.SHARDED_TENSORS, "ShardedTensor"),
        ("torch.distributed.tensor.placement_types", _compat.STRIDED_SHARD),
        *((module, name) for module, name, _ in _compat.MODULE_WRAPPERS),
    ],
)
def test_classes_of_torch_distributed(module: str, name: str) -> None:
    assert isinstance(getattr(__import__(module, fromlist=[name]), name), type)


def test_sharded_tensors(dtensor: DTensor) -> None:
    sharded: Any = sharded_tensor.ones(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4)
    assert _compat.is_sharded_tensor(sharded) and not _compat.is_sharded_tensor(dtensor)
    (shard,) = sharded.local_shards()
    _compat.set_local_shards(sharded, [shard, shard])
    assert sharded.local_shards() == [shard, shard]


def test_wrappers_of_local_shards() -> None:
    made: Any = LocalShardsWrapper([torch.ones(2)], [(0,)])
    assert _compat.local_shards_wrapper(made) is LocalShardsWrapper
    assert _compat.local_shards_wrapper(torch.ones(2)) is None


def test_namespaces_of_collectives() -> None:
    importlib.import_module(_compat.ASYNC_COLLECTIVES)
    assert all(hasattr(torch.ops, name) for name in _compat.COLLECTIVES)
    assert torch.ops._c10d_functional.all_reduce.default.namespace in _compat.COLLECTIVES


def test_places_in_checkpoints() -> None:
    place = _compat.checkpoint_storage_info()("__0_0.distcp", 3, 4)
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 3, 4)


def test_stores_of_process_groups(dtensor: DTensor) -> None:
    """The fixture's: so there is a default group."""
    group = dist.new_group([0])
    _compat.store_of_default_group().set("word", "of all")
    _compat.store_of_group(group).set("word", "of these ranks")
    assert _compat.store_of_default_group().get("word") == b"of all"
    assert _compat.store_of_group(group).get("word") == b"of these ranks"
    assert _compat.store_of_group(dist.group.WORLD).get("word") == b"of all"


# --- torch.nn, torch.optim, torch.utils.data -------------------------------------------------------------------------


def test_dicts_of_modules() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    dicts = _compat.module_dicts(module)
    assert set(dicts.parameters) == {"weight", "bias"} and "running_mean" in dicts.buffers
    assert dicts.passing == {"passing"} and set(vars(module)) > _compat.MODULE_DICTS


def test_modules_that_may_rename_what_they_load() -> None:
    class Own(torch.nn.Linear):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            return super().load_state_dict(*args, **options)

    class OwnPart(torch.nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)

    hooked = torch.nn.Linear(1, 1)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    assert all(map(_compat.may_rename_what_it_loads, (Own(1, 1), OwnPart(1, 1), hooked)))
    plain = torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)  # the latter's version of the method is torch's own
    assert not any(map(_compat.may_rename_what_it_loads, plain))


def test_versions_of_modules() -> None:
    state, loaded = torch.nn.BatchNorm1d(1).state_dict(), OrderedDict[str, Any]()
    _compat.copy_module_versions(state, loaded)
    assert getattr(loaded, "_metadata")[""]["version"] == 2  # noqa: B009
    _compat.copy_module_versions({}, loaded)
    assert getattr(loaded, "_metadata") == {}  # noqa: B009


def test_hooks_of_optimizers() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert not _compat.has_load_hooks(optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    assert _compat.has_load_hooks(optimizer)


def test_wrapped_modules() -> None:
    linear = torch.nn.Linear(1, 1)
    by_class = {name: attribute for _, name, attribute in _compat.MODULE_WRAPPERS}
    assert getattr(checkpoint_wrapper(linear), by_class["ActivationWrapper"]) is linear
    assert getattr(torch.compile(linear), by_class["OptimizedModule"]) is linear
    assert getattr(torch.nn.DataParallel(linear), by_class["DataParallel"]) is linear


def test_functions_that_collate() -> None:
    assert torch.Tensor in _compat.collate_functions
    made = _compat.collate([1, 2], collate_fn_map=_compat.collate_functions)
    assert torch.equal(made, torch.tensor([1, 2]))
    assert torch.equal(made, default_collate([1, 2]))


def test_child_processes() -> None:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    assert child in _compat.child_processes()
    child.join()
    assert child not in _compat.child_processes()


# --- tensordict ------------------------------------------------------------------------------------------------------


def test_parts_of_tensordicts() -> None:
    value = TensorDict({"a": torch.ones(2, 3)}, [2], device="cpu", names=["rows"]).lock_()
    parts = _compat.tensordict_parts(value)
    assert list(parts.entries) == ["a"] and parts.entries is _compat.inner_tensordict(value)
    assert parts[1:] == (torch.Size([2]), torch.device("cpu"), ("rows",), True)
    assert _compat.tensordict_parts(TensorDict({}, []))[1:] == (torch.Size([]), None, None, False)
    assert _compat.inner_tensordict(5) is None and _compat.inner_tensordict(5, 6) == 6
    assert _compat.is_locked(value) is True and _compat.batch_size_of(value) == (2,)


def test_tensordicts_over_entries() -> None:
    entries = {"a": torch.ones(2)}
    made = _compat.new_tensordict(TensorDict, entries, torch.Size([2]), device=None, names=["rows"], nested=False)
    assert type(made) is TensorDict and made["a"] is entries["a"] and made.names == ["rows"] and not made.is_locked
    made["b"] = torch.ones(2)
    assert list(entries) == ["a"], "the dict of the caller has been taken"


def test_entries_of_tensordicts() -> None:
    value = TensorDict({"a": torch.ones(2), "text": NonTensorData("text", [2])}, [2]).lock_()
    assert _compat.entries_of(value)["a"] is value["a"]
    entry = torch.zeros(2)
    _compat.set_entry(value, "b", entry)
    assert value["b"] is entry and set(value.keys()) == {"a", "b", "text"} and value.is_locked
    get = _compat.raw_getter(value)
    assert isinstance(get("text", None), NonTensorData) and get("c", None) is None
    assert _compat.raw_getter({"a": 1})("a", None) == 1


def test_tensorclasses() -> None:
    kind: Any = Pair
    value: Any = kind(torch.ones(2), "text", batch_size=[2])
    assert hasattr(Pair, _compat.TENSORCLASS_MARK)
    others = _compat.other_fields(value)
    assert others is not None and not _compat.is_non_tensor(others)
    assert _compat.is_tensorclass_object(value) and not _compat.is_tensorclass_object({})
    inner = _compat.inner_tensordict(value)
    assert type(inner) is TensorDict and "a" in inner
    again = _compat.fill_tensorclass(Pair.__new__(Pair), inner, others)
    assert again.text == "text" and again.a is inner["a"] and again.batch_size == (2,)
    bare = _compat.fill_tensorclass(Pair.__new__(Pair), TensorDict({"a": torch.ones(2)}, [2]), {"text": "text"})
    like = _compat.tensorclass_like(bare, TensorDict({"a": torch.zeros(3)}, [3]))
    assert type(like) is Pair and like.text == "text" and like.batch_size == (3,)
    assert _compat.other_fields({}) is None


@pytest.mark.parametrize("kind", [NonTensorData, MetaData])
def test_values_that_are_no_tensors(kind: Any) -> None:
    made = _compat.fill_non_tensor(kind.__new__(kind), TensorDict({}, []), {"a": 1})
    assert made.data == {"a": 1} and made.batch_size == ()
    fields = _compat.other_fields(kind(5))
    assert fields is not None and _compat.is_non_tensor(fields) and fields["data"] == 5
    assert fields.keys() == (_compat.other_fields(made) or {}).keys()
    assert _compat.non_tensor_value(kind(5)) == 5


def test_types_of_metadata() -> None:
    assert _compat.metadata_type(MetaData[int]) is int and _compat.metadata_type(int) is None


def test_lazy_stacks() -> None:
    value = LazyStackedTensorDict(TensorDict({}, [2]), TensorDict({}, [2]), stack_dim=1, stack_dim_name="time")
    assert _compat.stack_dim_name(value) == "time" and not _compat.has_hooks(value)
    empty = LazyStackedTensorDict(stack_dim=0, batch_size=torch.Size([2]), names=["a"])
    assert _compat.empty_stack_names(empty) == ["a"] and _compat.empty_stack_names(value) is None
    assert _compat.batch_size_of(empty) == (0, 2)
    seen: list[bool] = []

    def look(one: Any) -> torch.Tensor:
        seen.append(_compat.has_hooks(one))
        return torch.ones(())

    torch.vmap(look, (1,))(value)
    assert seen == [True]


def test_typed_tensordicts() -> None:
    value = Typed(a=torch.ones(2), batch_size=[2])
    source = _compat.typed_source(value)
    assert type(source) is TensorDict
    again = _compat.fill_typed(object.__new__(Typed), source)
    assert again.a is source["a"]


def test_params() -> None:
    value = TensorDictParams(TensorDict({"a": torch.ones(2)}, []), lock=True)
    assert type(_compat.params_inner(value)) is TensorDict and _compat.locks_content(value) is True
    assert _compat.params_inner(TensorDict({}, [])) is None


def test_unbatched_tensors() -> None:
    tensor, batch = _compat.unbatched_parts(UnbatchedTensor(torch.ones(3), batch_size=(2,)))
    assert torch.equal(tensor, torch.ones(3)) and type(tensor) is torch.Tensor and batch == (2,)


def test_what_tensordict_saves(tmp_path: Path) -> None:
    assert TensorDict in _compat.saved_classes() and LazyStackedTensorDict in _compat.saved_classes()
    assert _compat.saved_dtypes()["torch.bfloat16"] is torch.bfloat16
    TensorDict({"a/b": torch.ones(2)}, []).memmap(tmp_path)
    assert (tmp_path / f"{_compat.saved_file_name('a/b')}.memmap").exists()


# --- all of them -----------------------------------------------------------------------------------------------------


def test_each_is_tested() -> None:
    """A name of `_compat` that no test here uses could change without a word."""
    public = {name for name, one in vars(_compat).items() if not name.startswith("_") and is_of_compat(name, one)}
    used = set(re.findall(r"\b_compat\.(\w+)", Path(__file__).read_text()))
    assert len(public) > 90 and public - used == {"JaggedParts", "ModuleDicts", "TensorDictParts", "UnbatchedParts"}


def is_of_compat(name: str, one: Any) -> bool:
    imported = ast.parse(inspect.getsource(_compat)).body
    return not any(
        name in {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        for node in imported
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )


def test_what_a_release_lacks_is_named_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    spec = importlib.util.spec_from_file_location("memstore._compat_again", _compat.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.version_of(torch.ones(1)) == 0
    with pytest.raises(MissingPackageError, match=r"torch 2\..* has no _C\._storage_Use_Count"):
        again.storage_use_count(torch.ones(1).untyped_storage())
