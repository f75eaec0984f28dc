"""get with out= and like=: everything is compared before anything is written."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictParams, UnbatchedTensor, lazy_stack

from memstore.errors import StructureMismatchError, UnsupportedValueError
from memstore.structure import get_into, get_like
from tests.structure.roundtrip import stored
from tests.structure.test_matrix import Pair, Point, jagged
from tests.support.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|deprecated).*")


def zeroed(value: Any) -> Any:
    """The same structure with zeros for its tensors."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, zeroed(entry)) for key, entry in value.items())
    return type(value)(map(zeroed, value)) if type(value) in (list, tuple) else value


def state() -> Any:
    return {
        "a": torch.randn(2, 3),
        "n": [torch.arange(3), {"b": torch.randn(4).bfloat16()}],
        3: {"lr": 0.1, "t": (1, 2)},
    }


def test_out_is_filled_in_place() -> None:
    value, out = state(), zeroed(state())
    out[3] = {"lr": 7, "t": ()}
    tensors = [out["a"], out["n"][0], out["n"][1]["b"]]
    assert get_into(*stored(value), out) is out
    assert_same(value, out)
    assert tensors[0] is out["a"] and tensors[2] is out["n"][1]["b"]


def test_out_may_be_another_kind_of_container() -> None:
    value = {"w": torch.randn(2), "n": {"b": torch.randn(2)}}
    for out in (
        OrderedDict(w=torch.zeros(2), n={"b": torch.zeros(2)}),
        TensorDict(w=torch.zeros(2), n={"b": torch.zeros(2)}).lock_(),
        TensorDictParams(TensorDict(w=torch.zeros(2), n={"b": torch.zeros(2)})),
    ):
        get_into(*stored(value), out)
        assert torch.equal(out["w"].data, value["w"]) and torch.equal(out["n"]["b"].data, value["n"]["b"])


def test_out_in_modules_and_optimizers() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    get_into(*stored(model.state_dict()), dict(other.named_parameters()))
    assert torch.equal(model.weight, other.weight) and other.weight.requires_grad
    optimizers = [torch.optim.Adam(one.parameters(), lr=lr) for one, lr in ((model, 0.1), (other, 0.2))]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        one(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    got = get_into(*stored(optimizers[0].state_dict()), optimizers[1].state_dict())
    assert_same(optimizers[0].state_dict(), got)


def test_out_of_tensordicts() -> None:
    def make(fill: float, text: str) -> TensorDict:
        return TensorDict(
            {
                "t": torch.full((2, 3), fill),
                "s": text,
                "l": NonTensorStack(text, text),
                "pair": Pair(torch.full((2,), fill), NonTensorData(text), text, batch_size=[2]),
                "lazy": lazy_stack([TensorDict(x=torch.full((1,), fill)), TensorDict(x=torch.full((2,), fill))]),
                "u": UnbatchedTensor(torch.full((5,), fill)),
            },
            [2],
        ).lock_()

    value, out = make(3.0, "stored"), make(0.0, "old")
    assert get_into(*stored(value), out) is out
    assert_same(value, out)


def test_all_differences_are_told_and_nothing_is_written() -> None:
    plan = stored({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": 1, "e": (torch.ones(1), 5)})
    out = {"a": torch.zeros(3), "b": torch.zeros(2).double(), "x": torch.zeros(2), "e": (torch.zeros(1), 6), "y": 1}
    with pytest.raises(StructureMismatchError) as caught:
        get_into(*plan, out)
    message = str(caught.value)
    for part in (
        "value['a']: stored with shape [2], here [3]",
        "value['b']: stored as torch.float32, here torch.float64",
        "value['c']: a tensor is stored, but there is none in out",
        "value['x']: a tensor in out, but none is stored",
        "value['d']: an object is stored, but there is none in out",
        "value['y']: an object in out, but none is stored",
        "value['e'][1]: 5 is stored",
    ):
        assert part in message
    assert out["e"][0].item() == 0


def test_not_strict_fills_what_both_have() -> None:
    plan = stored({"a": torch.ones(2), "b": torch.ones(2), "d": 1, "g": 2})
    out = {"a": torch.zeros(2), "x": torch.zeros(2), "d": 0, "y": 7}
    get_into(*plan, out, strict=False)
    assert_same({"a": torch.ones(2), "x": torch.zeros(2), "d": 1, "y": 7}, out)
    with pytest.raises(StructureMismatchError, match="shape"):
        get_into(*plan, {"a": torch.zeros(3)}, strict=False)


def test_targets_that_can_not_be_filled() -> None:
    plan = stored({"a": torch.ones(3, 2)})
    frozen = np.zeros((3, 2), np.float32)
    frozen.flags.writeable = False
    for bad in (
        torch.zeros(2).expand(3, 2),
        torch.zeros(3, 2).to_sparse(),
        torch.zeros(3, 2, device="meta"),
        frozen,
        1,
    ):
        with pytest.raises(StructureMismatchError, match=r"value\['a'\]"):
            get_into(*plan, {"a": bad})
    with pytest.raises(StructureMismatchError):
        get_into(*stored(torch.ones(2)), 5)
    with pytest.raises(StructureMismatchError):
        get_into(*stored({"a": 5}), 5)
    q = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(StructureMismatchError, match="quantized"):
        get_into(*stored([q]), [q])


def test_out_with_strides_gaps_and_inference() -> None:
    value = torch.randn(4, 3)
    base = torch.zeros(8, 6)
    get_into(*stored([value]), [base[::2, 1::2]])
    assert torch.equal(base[::2, 1::2], value) and base.sum().isclose(value.sum())
    turned = torch.zeros(3, 4).t()
    get_into(*stored(value.t().contiguous().t()), turned)
    assert torch.equal(turned, value)
    with torch.inference_mode():
        inside = torch.zeros(4, 3)
    get_into(*stored(value), inside)
    assert torch.equal(inside, value)
    uint4 = torch.zeros(2, dtype=torch.uint8).view(torch.uint4)
    get_into(*stored(torch.ones(2, dtype=torch.uint8).view(torch.uint4)), uint4)
    assert uint4.view(torch.uint8).sum() == 2


def test_out_counts_as_a_write_for_autograd() -> None:
    out = torch.zeros(2)
    weight = torch.ones(2, requires_grad=True)
    product = weight * out
    get_into(*stored(torch.ones(2)), out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_out_of_numpy_and_nested() -> None:
    array = np.zeros((2, 3))
    get_into(*stored({"a": np.ones((2, 3))}), {"a": array})
    assert array.sum() == 6
    value = jagged()
    out = torch.zeros_like(value)
    get_into(*stored([value]), [out])
    assert torch.equal(out.values(), value.values())
    other = torch.nested.nested_tensor([torch.zeros(4, 3), torch.zeros(2, 3)], layout=torch.jagged)
    with pytest.raises(StructureMismatchError, match="lengths"):
        get_into(*stored([value]), [other])


def test_pickled_leaves_in_out_need_permission() -> None:
    plan = stored({"a": torch.ones(1), "f": len}, allow_pickle=True)
    out = {"a": torch.zeros(1), "f": None}
    with pytest.raises(UnsupportedValueError):
        get_into(*plan, out)
    assert out["a"].item() == 0
    assert get_into(*plan, out, allow_pickle=True)["f"] is len


def test_like_makes_new_memory() -> None:
    value = {"a": torch.randn(2, 3), "n": [torch.arange(3), 5], "p": torch.randn(2)}
    like = OrderedDict(
        a=torch.zeros(3, 2, dtype=torch.float64).t(),
        n=[torch.zeros(3, dtype=torch.int32), 0],
        p=torch.nn.Parameter(torch.zeros(2)),
    )
    got = get_like(*stored(value), like)
    assert type(got) is OrderedDict and got["a"].stride() == (1, 2) and got["a"].dtype == torch.float64
    assert torch.equal(got["a"], value["a"].double()) and got["n"][1] == 5 and got["n"][0].dtype == torch.int32
    assert type(got["p"]) is torch.nn.Parameter and torch.equal(got["p"].data, value["p"])
    assert like["a"].sum() == 0 and like["n"][1] == 0
    tied = torch.zeros(2)
    got = get_like(*stored([value["p"], value["p"]]), [tied, tied])
    assert got[0] is got[1]


def test_like_not_strict_takes_what_is_not_stored_from_like() -> None:
    plan = stored({"a": torch.ones(2), "b": torch.ones(2), "d": 1, "g": 2, "n": {"o": "stored"}})
    own = object()
    like = {
        "a": torch.zeros(2).double(),
        "x": torch.full((3,), 5.0).requires_grad_(),
        "d": 0,
        "y": [7, own],
        "td": TensorDict({"s": NonTensorData("own"), "l": NonTensorStack("a", "b"), "t": torch.ones(2)}, [2]),
        "n": {"o": "old", "p": (1, 2)},
    }
    got = get_like(*plan, like, strict=False)
    assert_same({**like, "a": torch.ones(2).double(), "d": 1, "n": {"o": "stored"}}, got)  # n is one leaf: no tensors
    assert got["y"][1] is own and got["x"].data_ptr() != like["x"].data_ptr() and like["d"] == 0
    with pytest.raises(StructureMismatchError, match="value\\['x'\\]"):
        get_like(*plan, like)
    with pytest.raises(StructureMismatchError, match="shape"):
        get_like(*plan, {"a": torch.zeros(3)}, strict=False)
    assert_same({"a": torch.ones(2)}, get_like(*plan, {"a": torch.zeros(2)}, strict=False))


def test_attributes_that_are_not_stored_are_like_s() -> None:
    like = torch.nn.Linear(3, 2).state_dict()
    got = get_like(*stored(dict(torch.nn.Linear(3, 2).state_dict())), like)
    assert got._metadata == like._metadata


def test_non_tensor_data_around_tensors() -> None:
    value = {"n": NonTensorData({"t": torch.ones(2), "x": 1})}
    out = {"n": NonTensorData({"t": torch.zeros(2), "x": 2})}
    assert_same(value, get_like(*stored(value), out))
    assert out["n"].data["x"] == 2
    assert_same(value, get_into(*stored(value), out))


@pytest.mark.parametrize("left", [0, 4])
def test_targets_whose_storage_was_freed(left: int) -> None:
    plan = stored({"a": torch.ones(2)})
    bad = torch.zeros(2)
    bad.untyped_storage().resize_(left)
    for strict in (True, False):
        with pytest.raises(StructureMismatchError, match=r"value\['a'\]: a tensor whose storage was freed"):
            get_into(*plan, {"a": bad}, strict=strict)
    assert bad.untyped_storage().nbytes() == left
    get_into(*plan, {"a": torch.zeros(2), "b": bad}, strict=False)  # is left alone
    assert_same({"a": torch.ones(2)}, get_like(*plan, {"a": bad}))  # only its look matters
    with pytest.raises(StructureMismatchError, match=r"value\['b'\]: a tensor whose storage was freed"):
        get_like(*plan, {"a": torch.zeros(2), "b": bad}, strict=False)


@pytest.mark.parametrize("get", [get_into, get_like])
@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_non_blocking_reaches_the_copies(
    get: Any, non_blocking: bool, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    for owner, name in ((torch, "_foreach_copy_"), (torch.Tensor, "copy_")):
        original = getattr(owner, name)

        def spy(*arguments: Any, original: Any = original, **options: Any) -> Any:
            seen.append(options.get("non_blocking", False))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, spy)
    with torch.inference_mode(inference):
        target = {"a": torch.zeros(2)}
    got = get(*stored({"a": torch.ones(2)}), target, **({"non_blocking": True} if non_blocking else {}))
    assert got["a"].sum() == 2 and seen == [non_blocking]


def test_like_of_tensordicts() -> None:
    value = TensorDict(
        {"a": torch.randn(2, 3), "s": "new", "pair": Pair(torch.ones(2), None, "n", batch_size=[2])}, [2]
    )
    like = TensorDict(
        {"a": torch.zeros(2, 3).double(), "s": "old", "pair": Pair(torch.zeros(2), None, "o", batch_size=[2])},
        [2],
        names=["b"],
    ).lock_()
    got = get_like(*stored(value), like)
    assert got.names == ["b"] and got.is_locked and got["s"] == "new" and got["pair"].note == "n"
    assert torch.equal(got["a"], value["a"].double()) and like["s"] == "old"
    got = get_like(*stored(Point(torch.ones(2), 1)), Point(torch.zeros(2), 2))
    assert got.y == 1 and got.x.sum() == 2


def test_like_tells_all_differences() -> None:
    plan = stored({"a": torch.ones(2), "b": torch.ones(2), "d": 1, "c": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(StructureMismatchError) as caught:
        get_like(*plan, {"a": torch.zeros(3), "x": torch.zeros(2), "y": 1, "c": torch.zeros(1)})
    for part in ("value['a']", "value['b']", "value['x']", "value['d']", "value['y']", "value['c']: stored complex"):
        assert part in str(caught.value)


def test_names_that_mean_two_leaves_are_refused() -> None:
    value = {1.0: torch.ones(1), "1.0": torch.zeros(1)}
    with pytest.raises(StructureMismatchError, match="two leaves have this name"):
        get_into(*stored(value), value)
