"""Each private name of torch and tensordict that memstore uses is there, and does what memstore takes it to do."""

from __future__ import annotations

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
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from memstore import _compat


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


def test_torch_functions_of_classes_are_left_out() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError

    loud = torch.ones(1).as_subclass(Loud)
    with pytest.raises(RuntimeError):
        loud.numel()
    with _compat.without_torch_function():
        assert loud.numel() == 1


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
    [(_compat.ASYNC_COLLECTIVES, "AsyncCollectiveTensor"), (_compat.SHARDED_TENSORS, "ShardedTensor")],
)
def test_classes_of_torch_distributed(module: str, name: str) -> None:
    assert isinstance(getattr(__import__(module, fromlist=[name]), name), type)


def test_stores_of_process_groups(dtensor: DTensor) -> None:
    """The fixture's: so there is a default group."""
    group = dist.new_group([0])
    _compat.store_of_default_group().set("word", "of all")
    _compat.store_of_group(group).set("word", "of these ranks")
    assert _compat.store_of_default_group().get("word") == b"of all"
    assert _compat.store_of_group(group).get("word") == b"of these ranks"
    assert _compat.store_of_group(dist.group.WORLD).get("word") == b"of all"


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
