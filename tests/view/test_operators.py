"""What torch does with lazy leaves: views stay lazy, all else reads just the box, writes are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from tests.children import in_child
from tests.examples import examples
from tests.view.strategies import tensors

# name -> an operator that makes views of a tensor of 6 x 4 x 2 floats
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "narrow": lambda x: x.narrow(0, 1, 3),
    "select": lambda x: x.select(1, 2),
    "split": lambda x: x.split(2),
    "split sizes": lambda x: x.split([1, 5]),
    "chunk": lambda x: x.chunk(4, 1),
    "unbind": lambda x: x.unbind(2),
    "iteration": lambda x: list(x),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 1),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "view": lambda x: x.view(3, 2, 8),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(0, (2, 3)),
    "expand": lambda x: x[:1].expand(5, 4, 2),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 3, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (8, 1), 3),
    "tensor_split": lambda x: x.tensor_split(3),
    "movedim": lambda x: x.movedim(0, 2),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "bytes": lambda x: x.view(torch.uint8),
    "complex": lambda x: torch.view_as_complex(x),
    "imaginary": lambda x: torch.view_as_complex(x).imag,
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to("cpu", torch.float32),
    "cpu": lambda x: x.cpu(),
}
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda x: x.clone(),
    "sum": lambda x: x.sum(),
    "add": lambda x: x + 1,
    "radd": lambda x: torch.ones(2) + x,
    "self": lambda x: x * x,
    "matmul": lambda x: x[0] @ x[1].T,
    "linear": lambda x: torch.nn.functional.linear(x, x[0]),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, torch.zeros(1, 4, 2)]),
    "double": lambda x: x.double(),
    "item": lambda x: x[2, 1, 1].item(),
    "float": lambda x: float(x[2, 1, 1]),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: torch.from_numpy(np.asarray(x)),
    "data": lambda x: x.data,
    "dlpack": lambda x: torch.from_dlpack(x),
    "reshape": lambda x: x.transpose(0, 1).reshape(-1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 0, 3])),
    "gather": lambda x: x.gather(0, torch.tensor([[[5, 0]]])),
    "take": lambda x: x.take(torch.tensor([47, 0])),
    "masked_select": lambda x: x.masked_select(x > 20),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([[1, 5]]), x[:, 0]),
    "where": lambda x: torch.where(x > 3, x, 0),
    "sort": lambda x: x.sort(0),
    "max": lambda x: x.max(1),
    "equal": lambda x: torch.equal(x, x + 0),
    "conj": lambda x: torch.view_as_complex(x).conj(),
    "tensor": lambda x: torch.stack(list(x)),
    "foreach": lambda x: torch._foreach_add([x, x[0]], 1),
    "allclose": lambda x: torch.allclose(x, x),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False) + 0,
    "unsafe view": lambda x: torch.ops.aten._unsafe_view(x, (48,)),  # a view, and its schema doesn't say so
    "einsum": lambda x: torch.einsum("abc,dbc->ad", x, x),
}


@pytest.fixture(params=["segment", "inline"])
def pair(request: pytest.FixtureRequest, scratch: str) -> tuple[torch.Tensor, memstore.StoredTensor]:
    """A tensor as it was got, and as a lazy leaf, out of a file or out of the catalog."""
    with memstore.open(scratch, inline_limit=0 if request.param == "segment" else 1536) as store:
        store.put("key", torch.arange(48.0).reshape(6, 4, 2))
        return store.get("key"), store.view("key")


def flat(value: Any) -> list[Any]:
    return [one for part in value for one in flat(part)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_lazy(name: str, pair: Any, reads: Any) -> None:
    plain, lazy = pair
    with reads() as count:
        found = flat(VIEWS[name](lazy))
        assert count() == 0
    for one, expected in zip(found, flat(VIEWS[name](plain)), strict=True):
        assert type(one) is memstore.StoredTensor
        assert (one.shape, one.stride(), one.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert torch.equal(one + 0, expected + 0)


@pytest.mark.parametrize("name", READS)
def test_all_else_reads(name: str, pair: Any) -> None:
    plain, lazy = pair
    for one, expected in zip(flat(READS[name](lazy)), flat(READS[name](plain)), strict=True):
        assert type(one) is type(expected)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, expected)
            one.fill_(7)  # it has memory of its own
        else:
            assert one == expected
    assert torch.equal(lazy.clone(), plain)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_chains_of_views_show_what_the_tensor_shows(store: memstore.Store, data: st.DataObject) -> None:
    store.put("key", data.draw(tensors(least=2)))
    plain, lazy = store.get("key"), store.view("key")
    for _ in range(3):
        a, b = data.draw(st.integers(0, plain.ndim - 1)), data.draw(st.integers(0, plain.ndim - 1))
        start = data.draw(st.integers(0, plain.shape[a]))
        step = data.draw(st.sampled_from(("transpose", "narrow", "unsqueeze", "unfold")))
        if step == "transpose":
            plain, lazy = plain.transpose(a, b), lazy.transpose(a, b)
        elif step == "narrow":
            plain, lazy = plain.narrow(a, start, plain.shape[a] - start), lazy.narrow(a, start, plain.shape[a] - start)
        elif step == "unsqueeze":
            plain, lazy = plain.unsqueeze(a), lazy.unsqueeze(a)
        elif plain.shape[a] > 1:
            plain, lazy = plain.unfold(a, 2, 1), lazy.unfold(a, 2, 1)
        assert type(lazy) is memstore.StoredTensor
        assert (lazy.shape, lazy.stride()) == (plain.shape, plain.stride())
    assert torch.equal(lazy.clone(), plain)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    {"index_select": 6 * 3 * 2 * 4, "gather": 8, "take": 8, "embedding": 2 * 2 * 4, "item": 4, "sum": 192}.items(),
)
def test_gathers_read_the_elements_that_they_give(name: str, nbytes: int, pair: Any, reads: Any) -> None:
    with reads() as count:
        READS[name](pair[1])
        assert count() == nbytes


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, lambda x: x.new_ones(3), torch.rand_like])
def test_what_takes_the_shape_alone_reads_nothing(make: Any, pair: Any, reads: Any) -> None:
    with reads() as count:
        made = make(pair[1])
        assert count() == 0
    assert type(made) is torch.Tensor
    assert made.shape == make(pair[0]).shape


def test_printing_reads_nothing(pair: Any, reads: Any) -> None:
    lazy = pair[1]
    with reads() as count:
        text = f"{lazy} {lazy!r} {[lazy]}"
        assert count() == 0
    assert "StoredTensor(key='key', version=" in text
    assert "shape=(6, 4, 2), dtype=torch.float32" in text
    assert f"{lazy[0, 1, 0]:.2f}" == "2.00"


def test_copies_of_a_leaf_are_lazy(pair: Any, reads: Any) -> None:
    with reads() as count:
        for copied in (copy.copy(pair[1]), copy.deepcopy({"a": pair[1][2:]})["a"]):
            assert type(copied) is memstore.StoredTensor
        assert count() == 0
    assert torch.equal(copied + 0, pair[0][2:])


def test_a_deep_copy_has_its_own_gradient(pair: Any) -> None:
    lazy = pair[1].requires_grad_()
    (lazy * 3).sum().backward()
    copied = copy.deepcopy({"a": lazy})["a"]
    assert torch.equal(copied.grad, lazy.grad)
    copied.grad.zero_()
    assert lazy.grad.sum() == 3 * lazy.numel()


# --- writes -----------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill": lambda x: x.fill_(1),
    "add": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(1),
    "copy": lambda x: x.copy_(torch.zeros(6, 4, 2)),
    "slice": lambda x: x[0].zero_(),
    "item": lambda x: x.__setitem__(0, 1),
    "chain": lambda x: x.transpose(0, 1)[1:].mul_(2),
    "out": lambda x: torch.add(torch.ones(6, 4, 2), 1, out=x),
    "second out": lambda x: torch.max(torch.ones(6, 4, 2), 0, out=(x[0], torch.zeros(4, 2, dtype=torch.int64))),
    "foreach": lambda x: torch._foreach_mul_([torch.ones(2), x], 2),
    "resize": lambda x: x.resize_(3),
    "set": lambda x: x.set_(torch.zeros(3)),
    "index_put": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "scatter": lambda x: x.scatter_(0, torch.tensor([[[0]]]), 1.0),
    "random": lambda x: x.normal_(),
    "data": lambda x: setattr(x, "data", torch.zeros(3)),
    "transpose in place": lambda x: x.t_() if x.ndim < 3 else x.transpose_(0, 1),
    "init": lambda x: torch.nn.init.zeros_(x),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_refused_and_says_how_to_do_it(name: str, pair: Any, reads: Any) -> None:
    plain, lazy = pair
    with reads() as count, pytest.raises(memstore.ReadOnlyError, match=r"lazy leaf of 'key'.*clone\(\)") as caught:
        WRITES[name](lazy)
    assert caught.value.key == "key"
    assert count() == 0
    assert torch.equal(lazy.clone(), plain)


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, torch.zeros(6, 4, 2)),
    "scatter": lambda x: dist.scatter(x, [torch.zeros(6, 4, 2)]),
    "functional": lambda x: torch.ops._c10d_functional.all_reduce_(x, "sum", "0"),
}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.usefixtures("group")
def test_collectives_in_place_are_refused(name: str, store: memstore.Store) -> None:
    store.put("key", torch.ones(6, 4, 2))
    lazy = store.view("key")
    with pytest.raises(memstore.ReadOnlyError, match="lazy leaf of 'key'"):
        COLLECTIVES[name](lazy)


@pytest.mark.usefixtures("group")
def test_collectives_read_what_they_send(store: memstore.Store) -> None:
    store.put("key", torch.ones(6))
    lazy, gathered = store.view("key"), [torch.zeros(6)]
    dist.all_gather(gathered, lazy)
    assert gathered[0].sum() == 6


def test_a_tensor_that_is_set_to_a_leaf_has_a_copy(pair: Any) -> None:
    other = torch.zeros(1)
    other.set_(pair[1])
    assert torch.equal(other, pair[0])
    other.fill_(7)
    assert torch.equal(pair[1].clone(), pair[0])


def through_dlpack(lazy: torch.Tensor) -> None:
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(lazy)).fill_(1)


def into_data(lazy: torch.Tensor) -> None:
    other = torch.zeros(1)
    other.data = lazy
    other.fill_(1)


@pytest.mark.parametrize("take", [through_dlpack, into_data])
def test_what_takes_the_memory_in_c_is_an_error_and_no_crash(take: Callable[..., None], pair: Any) -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        in_child(take, pair[1])


def test_a_leaf_is_made_by_a_view_alone() -> None:
    with pytest.raises(TypeError, match="Store.view"):
        memstore.StoredTensor(3)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_flow_to_a_leaf_that_asks_for_them(pair: Any) -> None:
    lazy = pair[1].requires_grad_()
    part = lazy[1:3]
    assert part.grad_fn is not None
    (part * 2 + lazy.sum()).sum().backward()
    plain = pair[0].clone().requires_grad_()
    (plain[1:3] * 2 + plain.sum()).sum().backward()
    assert torch.equal(lazy.grad, plain.grad)
    with torch.no_grad():
        assert lazy[0].requires_grad is False
    assert lazy.requires_grad_(False).detach_() is lazy


def test_a_leaf_made_in_inference_mode_trains(store: memstore.Store) -> None:
    store.put("key", torch.ones(4, 3))
    with torch.inference_mode():
        lazy = store.view("key")[1:]
    weight = torch.ones(3, requires_grad=True)
    (lazy * weight).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


# --- modes ------------------------------------------------------------------------------------------------------------


def test_fake_mode_says_why_not(pair: Any) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises(Exception, match="FakeTensor"):
        pair[1] + 1


# --- devices in inference mode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_leaf_goes_to_the_device_that_is_asked_for(mode: Any, pair: Any) -> None:
    """In inference mode torch hands `to` on as one operator, which seems to make views."""
    plain, lazy = pair
    with mode():
        assert lazy.to("meta").device == torch.device("meta")
        assert lazy.to(torch.zeros(1, device="meta", dtype=torch.float64)).dtype is torch.float64
        assert type(lazy.to("cpu")) is memstore.StoredTensor
        assert torch.equal(lazy.to(torch.float64), plain.to(torch.float64))
        tangent = torch.ones_like(plain)
        assert torch.equal(torch.func.jvp(lambda x: x * 2, (lazy,), (tangent,))[0], plain * 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_leaf_on_another_device_comes_from_there(mode: Any, store: memstore.Store) -> None:
    store.put("key", torch.rand(3))
    lazy = store.view("key", device="meta")
    with mode():
        assert lazy.to("meta").device == lazy.to(torch.float64).device == torch.device("meta")
        with pytest.raises(NotImplementedError, match="meta"):  # as of a tensor there
            lazy.to("cpu")


def test_a_copy_into_a_tensor_without_memory_reads_nothing(store: memstore.Store) -> None:
    """Loaders that count what they would copy do this: vLLM's reload, for one."""
    store.put("w", torch.randn(512, 64))
    leaf, before = store.view("w"), memstore.bytes_read()
    for target, part in ((torch.empty(512, 64, device="meta"), leaf), (torch.empty(3, 64, device="meta"), leaf[5:8])):
        assert target.copy_(part) is target
    assert memstore.bytes_read() == before
    with pytest.raises(RuntimeError):
        torch.empty(4, 4, device="meta").copy_(leaf)
    assert torch.equal(torch.empty(512, 64).copy_(leaf), store.get("w"))
