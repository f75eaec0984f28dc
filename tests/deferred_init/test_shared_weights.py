"""Weights of a source for tensors that share memory, that were looked at before, or that another call has made."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import StructureMismatchError, UnsupportedValueError


class Chunked(nn.Module):
    """Three parameters that are parts of one storage, along a dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(one) for one in torch.randn(6, 6).chunk(3, dim=dim))


def weights(module: nn.Module, first: float = 100.0) -> dict[str, torch.Tensor]:
    """Other values for each of its tensors."""
    found = {name: one.shape for name, one in module.state_dict().items()}
    return {
        name: torch.arange(float(shape.numel())).view(shape) + first * (number + 1)
        for number, (name, shape) in enumerate(found.items())
    }


def assert_has(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, one in module.state_dict().items():
        assert torch.equal(one, state[name]), name


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_that_are_parts_of_one_storage_all_get_their_weights(dim: int) -> None:
    made = deferred_init(Chunked, dim)
    state = weights(made)
    done = materialize_module(made, source=state)
    assert set(done.found) == {"q", "k", "v"}
    assert_has(made, state)
    assert made.q.untyped_storage().data_ptr() == made.v.untyped_storage().data_ptr(), "as without deferral"


def test_a_part_of_a_storage_that_the_source_lacks_is_replayed() -> None:
    torch.manual_seed(3)
    expected = Chunked(0)
    torch.manual_seed(3)
    made = deferred_init(Chunked, 0)
    state = weights(made)
    done = materialize_module(made, source={"k": state["k"]})
    assert done == (("k",), ("q", "v"))
    assert torch.equal(made.k, state["k"])
    assert torch.equal(made.q, expected.q) and torch.equal(made.v, expected.v)


def test_parts_of_a_vector_get_their_weights() -> None:
    def flat() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        vector = nn.utils.parameters_to_vector(made.parameters()).detach()
        nn.utils.vector_to_parameters(vector, made.parameters())
        return made

    for kinds in ({}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}):
        made = deferred_init(flat)
        state = weights(made)
        materialize_module(made, source=state, **kinds)
        assert_has(made, {name: one.to(kinds.get("dtype", torch.float32)) for name, one in state.items()})


def test_parts_of_one_storage_are_taken_in_several_calls() -> None:
    made = deferred_init(lambda: nn.ModuleList(nn.ParameterList([one]) for one in torch.randn(6, 4).chunk(3)))
    state = {f"{number}.0": torch.full((2, 4), number + 1.0) for number in range(3)}
    for chosen in made:
        materialize_module(made, source=state, check_fn=lambda one, chosen=chosen: one is chosen)
    assert [one.item() for part in made for one in part[0].unique()] == [1, 2, 3]


class Seen(nn.Module):
    """A buffer shows a row of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("row", self.weight.detach()[1])


@pytest.mark.parametrize("kinds", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}])
def test_what_shows_a_weight_shows_that_of_the_source(kinds: Any) -> None:
    dtype = kinds.get("dtype", torch.float32)
    made = deferred_init(Seen)
    weight = torch.arange(6.0).view(3, 2)
    materialize_module(made, source={"weight": weight}, **kinds)
    assert made.weight.dtype == made.row.dtype == dtype
    assert torch.equal(made.weight, weight.to(dtype)) and made.row.tolist() == [2, 3]
    assert (made.row.data_ptr() == made.weight[1].data_ptr()) == (not kinds), "conversions share nothing, as in torch"


def test_ties_by_storage_last_from_one_call_to_the_next() -> None:
    weight, row = torch.arange(6.0).view(3, 2), torch.tensor([2.0, 3.0])
    for first in (lambda one, source: materialize_module(one, True, source=source), parameters_of):
        made = deferred_init(Seen)
        first(made, {"weight": weight, "row": row})
        assert is_deferred(made)
        materialize_module(made, source={"weight": weight, "row": row})
        assert torch.equal(made.weight, weight) and made.row.tolist() == [2, 3]
        with torch.no_grad():
            made.weight.zero_()
        assert made.row.tolist() == [0, 0]


def parameters_of(module: Any, source: Any) -> None:
    """All that isn't a buffer."""
    row = module._buffers.pop("row")
    materialize_module(module, source=source)
    module._buffers["row"] = row


def test_the_tensors_of_a_state_dict_are_not_written() -> None:
    whole, part = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), torch.ones(2)
    versions = whole._version, part._version
    made = deferred_init(Seen)
    materialize_module(made, source={"weight": whole, "row": part})
    assert (whole._version, part._version) == versions
    assert made.row.tolist() == [1, 1] and made.weight.tolist() == [[0, 0], [1, 1], [0, 0]]


# --- tied, and stored apart -------------------------------------------------------------------------------------------


class Shown(nn.Module):
    """One weight under two names, of which a buffer shows a part, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("first", self.head.weight.detach()[0])


TABLE = torch.tensor([[float("nan"), 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"head.weight": TABLE.flip(0)}, ("embedding.weight", "head.weight")),
        ({"first": torch.full((2,), 9.0)}, ("embedding.weight", "first")),
        ({"head.weight": TABLE + 1, "first": torch.ones(2)}, ("embedding.weight", "head.weight", "first")),
        ({"head.weight": torch.zeros(2, 4)}, ("embedding.weight", "head.weight")),
    ],
    ids=["names", "part", "all", "shape"],
)
@pytest.mark.parametrize("kinds", [{}, {"dtype": torch.bfloat16}])
def test_ties_that_differ_in_the_source_are_refused(
    store: memstore.Store, changed: Any, named: Any, kinds: Any
) -> None:
    source = {"embedding.weight": TABLE.clone(), "head.weight": TABLE.clone(), "first": TABLE[0].clone(), **changed}
    store.put("apart", source)
    for given in (source, store.view("apart")):
        made = deferred_init(Shown)
        with pytest.raises(StructureMismatchError, match="share memory in the module") as caught:
            materialize_module(made, source=given, **kinds)
        assert all(name in str(caught.value) for name in named)
        assert is_deferred(made.head.weight) and is_deferred(made.first), "nothing was made"


@pytest.mark.parametrize("kinds", [{}, {"dtype": torch.bfloat16}])
def test_ties_that_are_alike_in_the_source_are_taken(store: memstore.Store, kinds: Any) -> None:
    source = {"embedding.weight": TABLE, "head.weight": TABLE.clone(), "first": TABLE[0].clone()}
    store.put("apart", source)
    store.put("tied", {"embedding.weight": TABLE, "head.weight": TABLE, "first": TABLE[0]})
    for given in (source, store.view("apart"), store.view("tied"), {**source, "head.weight": TABLE.double()}):
        made = deferred_init(Shown)
        materialize_module(made, source=given, **kinds)
        want = TABLE.to(kinds.get("dtype", torch.float32))
        assert made.head.weight is made.embedding.weight
        assert torch.equal(made.head.weight.nan_to_num(), want.nan_to_num())
        assert torch.equal(made.first.nan_to_num(), want[0].nan_to_num())


def without_memory(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(4, 3)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def torchs_fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 3)


@pytest.mark.parametrize(
    "make",
    [partial(without_memory, 0), partial(without_memory, 16), torchs_fake, lambda: torch.ones(4, 3).to_sparse()],
    ids=["freed", "cut", "fake", "sparse"],
)
def test_tensors_of_a_source_without_values_are_refused_by_name(make: Any) -> None:
    made = deferred_init(nn.Linear, 3, 4)
    with pytest.raises(StructureMismatchError, match="weight: the source's is"):
        materialize_module(made, source={"weight": make(), "bias": torch.ones(4)})
    assert is_deferred(made.weight) and is_deferred(made.bias)


def test_inference_tensors_of_a_source_become_weights_that_can_be_trained() -> None:
    with torch.inference_mode():
        source = nn.Linear(3, 4).state_dict()
    made = deferred_init(nn.Linear, 3, 4)
    materialize_module(made, source=source)
    assert torch.equal(made.weight, source["weight"])
    made(torch.ones(2, 3)).sum().backward()
    assert made.weight.grad is not None


# --- looked at before -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", [lambda one: one.weight, lambda one: one.weight[0], lambda one: one.weight.detach()])
@pytest.mark.parametrize("kinds", [{}, {"dtype": torch.bfloat16}])
def test_weights_that_were_looked_at_before_come_from_the_source_too(look: Any, kinds: Any) -> None:
    made = deferred_init(nn.Linear, 3, 2)
    seen = materialize_tensor(look(made))
    state = weights(made)
    done = materialize_module(made, source=state, **kinds)
    assert set(done.found) == {"weight", "bias"} and not is_deferred(made)
    assert_has(made, {name: one.to(kinds.get("dtype", torch.float32)) for name, one in state.items()})
    if not kinds:
        assert seen.data_ptr() == made.weight.data_ptr(), "tensors that share memory share it when they are real"
        assert torch.equal(seen, look(made))


def test_what_is_looked_at_later_shares_what_was_taken() -> None:
    made = deferred_init(nn.Linear, 3, 2)
    before, state = made.state_dict(), weights(made)
    materialize_module(made, source=state)
    seen = materialize_tensor(before["weight"])
    assert seen.data_ptr() == made.weight.data_ptr() and torch.equal(seen, state["weight"])


@pytest.mark.parametrize("kinds", [{}, {"dtype": torch.bfloat16}])
def test_a_deferred_tensor_that_was_taken_from_a_source_is_written_no_more(kinds: Any) -> None:
    made = deferred_init(nn.Linear, 3, 2)
    weight = made.weight.detach()
    materialize_module(made, source=weights(made), **kinds)
    with pytest.raises(UnsupportedValueError, match="aten.fill_.*materialized before"), torch.no_grad():
        weight.fill_(1)


# --- made by another call ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_that_is_real_already_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    made = deferred_init(Tied)
    materialize_module(made.embed)
    with torch.no_grad():
        made.embed.weight.fill_(7)
    with caplog.at_level("INFO", "memstore"):
        done = materialize_module(made, source={"embed.weight": torch.ones(4, 2), "head.weight": torch.ones(4, 2)})
    assert done == ((), ()) and made.head.weight is made.embed.weight, "it is the same object, and real"
    assert made.head.weight.unique().tolist() == [7] and "lacks" not in caplog.text


def test_ties_last_when_a_part_is_converted() -> None:
    made = deferred_init(Tied)
    materialize_module(made.embed, dtype=torch.bfloat16)
    materialize_module(made)
    assert made.head.weight is made.embed.weight and made.head.weight.dtype == torch.bfloat16


def test_a_tie_by_storage_with_what_is_real_already_stays(caplog: pytest.LogCaptureFixture) -> None:
    def tied() -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        made[1].weight.data = made[0].weight.data
        return made

    made, state = deferred_init(tied), {"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}
    materialize_module(made, source=state, check_fn=lambda one: one is made[0])
    with torch.no_grad():
        made[0].weight.fill_(7)
    with caplog.at_level("INFO", "memstore"):
        assert materialize_module(made, source=state) == ((), ("1.weight",))
    assert "weights that were not taken" in caplog.text and "lacks" not in caplog.text
    assert made[1].weight.unique().tolist() == [7] and made[1].weight.data_ptr() == made[0].weight.data_ptr()
