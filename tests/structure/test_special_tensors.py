"""Sparse tensors, tensors of classes that say what they are made of, and tensordict's typed classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, MetaData, TensorDict, TypedTensorDict, lazy_stack

import memstore
from memstore.errors import CorruptionError, StructureMismatchError, UnsupportedValueError
from memstore.structure import flatten, get_into, get_like, rebuild
from memstore.structure.tensors import is_wrapper
from tests.structure import classes
from tests.structure.roundtrip import round_trip, serve, stored
from tests.support.equality import assert_same, is_same

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|beta).*")

BASE = torch.tensor([[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 4], [5, 0, 0, 0]])


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.randn(3, 2), (4, 2))


SPARSE = {
    "coo": lambda: BASE.to_sparse(),
    "uncoalesced": uncoalesced,
    "hybrid": lambda: BASE.to_sparse(1),
    "no elements": lambda: torch.sparse_coo_tensor(size=(3, 0, 4)),
    "scalar": lambda: torch.tensor(3.0).to_sparse(),
    "integers": lambda: BASE.long().to_sparse(),
    "grad": lambda: BASE.to_sparse().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(BASE.to_sparse()),
    "expanded values": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]).expand(2, 2), torch.ones(1).expand(2), (4, 4), check_invariants=True
    ),
    "csr": lambda: BASE.to_sparse_csr(),
    "csr of int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), torch.ones(2), (2, 2)
    ),
    "csr, batch": lambda: torch.stack([BASE, BASE]).to_sparse_csr(),
    "csr, grad": lambda: BASE.to_sparse_csr().requires_grad_(),
    "csc": lambda: BASE.bfloat16().to_sparse_csc(),
    "bsr": lambda: BASE.to_sparse_bsr((2, 2)),
    "bsc": lambda: BASE.to_sparse_bsc((2, 1)),
}
WRAPPERS = {
    "weight": lambda: classes.Int8Weight.of(BASE),
    "context": lambda: classes.Int8Weight.of(BASE.double(), {"granularity": classes.Color.RED, "block": (1, 4)}),
    "context with tensors": lambda: classes.Int8Weight.of(BASE, [torch.ones(2), classes.Frozen(1)]),
    "inherited": lambda: classes.Int4Weight.of(BASE),
    "parameter": lambda: torch.nn.Parameter(classes.Int8Weight.of(BASE), requires_grad=False),
    "trained": lambda: torch.nn.Parameter(classes.Int8Weight.of(BASE)),
    "of wrappers": lambda: classes.Int8Weight(torch.ones(4, 4, dtype=torch.int8), classes.Int8Weight.of(BASE)),
}
SPECIAL = {**SPARSE, **{f"wrapper: {name}": make for name, make in WRAPPERS.items()}}


@pytest.mark.parametrize("name", SPECIAL)
def test_they_come_back(name: str) -> None:
    value = SPECIAL[name]()
    for whole in (value, {"a": [value, 1], "same": value}, TensorDict({"n": TensorDict({"s": value})})):
        assert_same(whole, round_trip(whole), ties=False)


@pytest.mark.parametrize("inline", [True, False])
def test_a_store_serves_them_in_every_way(inline: bool, root: str, tmp_path: Any) -> None:
    with memstore.open(root, checksum=True, verify=True) as store:
        for name, make in SPECIAL.items():
            value = {"v": make(), "pad": torch.zeros(0 if inline else 1000)}
            kept = not isinstance(value["v"], classes.Int8Weight) and "grad" not in name  # torch loses more than we
            serve(store, name, value, value, tmp_path / "k", saved_by_torch=kept)
            assert store.info(name).kind == ("inline" if inline else "segment")
            assert_same(value["v"], store.view(name)["v"])
            with pytest.raises(
                StructureMismatchError, match=r"value\['v'\]: a .*can't be filled in place; get it without"
            ):
                store.get(name, out=value)
            with pytest.raises(UnsupportedValueError, match=r"value\['v'\].*export as 'torch'"):
                store.export(name, tmp_path / "k")
            with pytest.raises(UnsupportedValueError, match=r"value\['v'\]: an? .*can't be exported as memmap"):
                store.export(name, tmp_path / "k", format="memmap")
        assert store.verify().ok


@pytest.mark.parametrize("name", ["coo", "uncoalesced", "csr", "bsr"])
def test_a_torch_save_file_of_them_is_served_in_place(name: str, root: str, tmp_path: Any) -> None:
    value = {"v": SPARSE[name](), "x": torch.ones(5)}
    torch.save(value, tmp_path / "k.pt")
    with memstore.open(root) as store:
        store.attach("k", tmp_path / "k.pt")
        assert_same(value, store.get("k"), ties=False)


def test_a_gradient_comes_back_as_a_leaf() -> None:
    leaf = BASE.to_sparse().requires_grad_()
    got = round_trip({"x": leaf * 2})["x"]
    assert got.is_leaf and got.requires_grad and torch.equal(got.detach().to_dense(), BASE * 2)


def test_they_compute() -> None:
    got = round_trip([BASE.to_sparse(), BASE.to_sparse_csr()])
    assert torch.equal(got[0] @ BASE, BASE @ BASE) and torch.equal(got[1] @ BASE, BASE @ BASE)


def test_a_template_of_another_size_gets_the_stored_one() -> None:
    value, like = [BASE.to_sparse(), 1], [torch.sparse_coo_tensor(torch.zeros(2, 5).long(), torch.zeros(5), (9, 9)), 2]
    got = get_like(*stored(value), like)
    assert_same(value, got)
    with pytest.raises(StructureMismatchError, match="stored with shape"):
        get_like(*stored(value), [BASE[:2].to_sparse(), 2])


def test_dtype_leaves_what_belongs_together_alone() -> None:
    value = [classes.Int8Weight.of(BASE), BASE.to_sparse()]
    weight, sparse = round_trip(value, dtype=torch.float16)
    assert_same(value[0], weight)
    assert sparse.dtype == torch.float16 and sparse._indices().dtype == torch.int64


def changed(parts: Any, name: Any, numbers: list[int]) -> Any:
    """The stored value with other indices."""
    plan, objects, memory = parts
    leaf = next(leaf for leaf in plan.leaves if leaf.name[-1] == name)
    memory = memory.copy()
    memory[leaf.offset : leaf.offset + leaf.nbytes] = np.array(numbers, np.int64).view(np.uint8)
    return plan, objects, memory


@pytest.mark.parametrize(
    ("name", "leaf", "numbers"),
    [
        ("coo", "indices", [0, 0, 2, 2, 9, 0, 3, 1, 3, 0]),
        ("coo", "indices", [0, 0, 2, 2, -1, 0, 3, 1, 3, 0]),
        ("coo", "indices", [2**62] * 10),
        ("coo", "indices", [3, 2, 2, 0, 0, 0, 3, 1, 3, 0]),  # coalesced, it says
        ("csr", "crow_indices", [0, 2, 2, 4, 50]),
        ("csr", "crow_indices", [0, 4, 2, 4, 5]),
        ("csr", "crow_indices", [2**62, 2, 2, 4, 5]),
        ("csr", "col_indices", [0, 3, 1, 77, 0]),
        ("csr", "col_indices", [0, 3, -1, 3, 0]),
        ("csc", "row_indices", [0, 3, 2, 0, 9]),
        ("bsr", "col_indices", [0, 1, 0, 5]),
    ],
)
def test_indices_that_lead_out_of_the_tensor_are_damage(name: str, leaf: str, numbers: list[int]) -> None:
    parts = changed(stored({"v": SPARSE[name]()}), leaf, numbers)
    with pytest.raises(CorruptionError):
        rebuild(*parts, None)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_wrappers_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"w": classes.Int8Weight.of(BASE)}
    parts = stored(value)

    def fail(*_: Any) -> Any:
        raise AttributeError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(classes.Int8Weight, "__tensor_unflatten__", fail)
        with pytest.raises(UnsupportedValueError, match=r"classes\.Int8Weight, which can't be made again here: .*gone"):
            rebuild(*parts, None)
        patch.setattr(classes.Int8Weight, "__tensor_unflatten__", lambda *_: torch.zeros(1))
        with pytest.raises(UnsupportedValueError, match="makes a Tensor of another"):
            rebuild(*parts, None)
        patch.setattr(classes.Int8Weight, "__tensor_flatten__", fail)
        with pytest.raises(UnsupportedValueError, match=r"value\['w'\]: .*__tensor_flatten__ fails: gone"):
            flatten(value)
        patch.delattr(classes, "Int8Weight")
        with pytest.raises(UnsupportedValueError, match="import the module"):
            rebuild(*parts, None)


def test_half_a_protocol_is_none() -> None:
    classes.ran.clear()
    assert not is_wrapper(classes.Half) and not is_wrapper(torch.Tensor)
    with pytest.raises(UnsupportedValueError, match="unknown subclass"):
        flatten(torch.zeros(3).as_subclass(classes.Half))
    assert classes.ran == []


def test_a_context_that_can_not_be_stored_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"value\['w'\].*lambda"):
        flatten({"w": classes.Int8Weight.of(BASE, lambda: 1)})


def test_the_comparison_sees_differences() -> None:
    one = BASE.to_sparse()
    two = torch.sparse_coo_tensor(one._indices(), one._values(), one.shape)
    pairs = [(one, two), (one, (one * 2).coalesce()), (one, BASE.to_sparse_csr())]
    pairs += [(classes.Int8Weight.of(BASE), other) for other in (classes.Int8Weight.of(BASE, 1), WRAPPERS["trained"]())]
    for first, second in pairs:
        assert is_same(first, first) and not is_same(first, second)


# -- tensordict ------------------------------------------------------------------------------------------------------


def state(**options: Any) -> Any:
    return classes.State(x=torch.randn(3, 2), y=torch.arange(3), batch_size=[3], **options)


TYPED = {
    "plain": state,
    "locked": lambda: state(lock=True),
    "names": lambda: state(names=["time"], device="cpu"),
    "inherited": lambda: classes.Deeper(x=torch.ones(2), y=torch.ones(2), z=torch.ones(2, 1), batch_size=[2]),
    "partly filled": lambda: classes.State.from_tensordict(TensorDict(x=torch.ones(2)), check=False),
    "lazy": lambda: classes.State.from_tensordict(
        lazy_stack([TensorDict(x=torch.ones(2), y=torch.ones(n)) for n in (1, 2)])
    ),
    "in a TensorDict": lambda: TensorDict({"s": state(), "t": torch.zeros(3)}, [3]),
    "in a locked TensorDict": lambda: TensorDict({"s": state(), "t": torch.zeros(3)}, [3]).lock_(),
    "locked in a locked TensorDict": lambda: TensorDict({"s": state(lock=True), "t": torch.zeros(3)}, [3]).lock_(),
    "with another inside": lambda: classes.State(x=state(), y=torch.arange(3), batch_size=[3]),
    "in a lazy stack": lambda: LazyStackedTensorDict(state(), state()),
}


@pytest.mark.parametrize("name", TYPED)
def test_typed_tensordicts(name: str) -> None:
    value = TYPED[name]()
    for whole in (value, {"a": [value]}):
        assert_same(whole, round_trip(whole))


def test_a_view_of_a_typed_tensordict(root: str) -> None:
    with memstore.open(root) as store:
        value = state()
        store.put("s", value)
        view = store.view("s")
        assert type(view) is classes.State and type(view.x) is memstore.StoredTensor
        assert torch.equal(view[1:].x + 0, value[1:].x)
        out = state()
        assert get_into(*stored(value), out) is out
        assert_same(value, out)


def test_attributes_of_a_typed_tensordict_are_refused() -> None:
    value = state()
    value.note = 1
    with pytest.raises(UnsupportedValueError, match="State with attributes that are no entries: note"):
        flatten([value])
    assert issubclass(classes.State, TypedTensorDict)


@pytest.mark.parametrize(
    ("kind", "data"), [(str, "x"), (int, 3), (dict, {"a": [1]}), (classes.Config, classes.Config(1)), (object, None)]
)
def test_metadata_of_a_type(kind: type, data: Any) -> None:
    value = MetaData[kind](data, batch_size=[2], device="cpu")
    got = round_trip(TensorDict({"m": value, "t": torch.zeros(2)}, [2]))
    assert type(got._tensordict["m"]) is MetaData[kind]
    for whole in (value, [value, torch.ones(1)]):
        assert_same(whole, round_trip(whole))
