"""get(out=): everything is written, or nothing, whatever one of the leaves refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.errors import StructureMismatchError
from tests.examples import examples
from tests.store.test_filling import DTYPE, FILLED, SHAPE, full, shown
from tests.store.test_filling import REFUSED as REFUSED_TENSORS
from tests.support.equality import is_same

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|deprecated|beta).*")


def view_of_a_parameter() -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.Parameter(full(6, 3))[1:5]


def read_only_array() -> Any:
    array = full().numpy()
    array.flags.writeable = False
    return array


def hollow(offset: int) -> torch.Tensor:
    """A tensor over a storage that states a size, and has no memory."""
    size, strides = torch.empty(SHAPE).numel(), torch.empty(SHAPE).stride()
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), (offset + size) * DTYPE.itemsize)
    return torch.empty(0, dtype=DTYPE).set_(storage, offset, SHAPE, strides)


def cut_behind_others() -> torch.Tensor:
    """All of it lies in the storage, if it is counted from the storage's start."""
    tensor = full(5, 3)[1:]
    tensor.untyped_storage().resize_(tensor.nbytes)
    return tensor


# leaves of the shape and dtype that are stored, which can be written
WRITABLE: dict[str, Callable[[], Any]] = {
    **{name: make for name, make in FILLED.items() if make().dtype is DTYPE},
    "no leaf of autograd": lambda: torch.nn.Parameter(full()) * 1,
    "view of a parameter": view_of_a_parameter,
    "one of several views": lambda: torch.nn.Parameter(full(2, *SHAPE)).unbind()[0].detach(),
    "array": lambda: full().numpy(),
}
# those that can't be
NOT_THERE: dict[str, Callable[[], torch.Tensor]] = {
    "cut behind others": cut_behind_others,
    "hollow": lambda: hollow(0),
    "hollow behind others": lambda: hollow(6),  # to whose address, 0, torch adds what stands before
}
REFUSED: dict[str, Callable[[], Any]] = {
    **REFUSED_TENSORS,
    **NOT_THERE,
    "array that is read-only": read_only_array,
    "dtype": lambda: full(dtype=torch.float32),
    "shape": lambda: full(3, 4),
    "no tensor": lambda: 5,
}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "FakeTensorMode": FakeTensorMode,
    "device": lambda: torch.device("meta"),
    "saved tensors may change": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


def structures() -> st.SearchStrategy[Any]:
    """Nested containers with None for each leaf."""
    return st.recursive(
        st.none(),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
        ),
        max_leaves=8,
    ).map(lambda inner: [inner])


def filled(structure: Any, make: Callable[[], Any]) -> Any:
    if structure is None:
        return make()
    if isinstance(structure, dict):
        return {key: filled(inner, make) for key, inner in structure.items()}
    return type(structure)(filled(inner, make) for inner in structure)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, (list, tuple)) else [value]


def content(leaf: Any) -> torch.Tensor | None:
    return shown(torch.as_tensor(leaf)) if isinstance(leaf, np.ndarray) else shown(leaf)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_all_is_written_or_nothing(store: memstore.Store, data: st.DataObject) -> None:
    structure = data.draw(structures())
    count = len(leaves(structure))
    numbers = iter(range(1, count + 1))
    value = filled(structure, lambda: torch.full(SHAPE, complex(n := next(numbers), -n)))
    kinds = [data.draw(st.sampled_from(sorted(WRITABLE))) for _ in range(count)]
    targets: list[Any] = [WRITABLE[kind]() for kind in kinds]
    bad, place = data.draw(st.none() | st.sampled_from(sorted(REFUSED))), data.draw(st.integers(0, count - 1))
    before = [content(target) for target in targets]
    if bad is not None:
        targets[place] = REFUSED[bad]()
    # an array is stored as one, so that arrays meet arrays and tensors tensors by their names
    iterator = iter(targets)
    out = filled(structure, lambda: next(iterator))
    store.put("key", value)
    with ExitStack() as stack:
        for kind in data.draw(st.lists(st.sampled_from(sorted(CONTEXTS)), max_size=2, unique=True)):
            stack.enter_context(CONTEXTS[kind]())
        if bad is None:
            assert store.get("key", out=out) is out
        else:
            with pytest.raises(StructureMismatchError):
                store.get("key", out=out)
    for i, (target, wanted) in enumerate(zip(targets, leaves(value) if bad is None else before, strict=True)):
        if bad is None or i != place:
            found = content(target)
            assert found is not None and wanted is not None and torch.equal(found, wanted), kinds[i]


@pytest.mark.parametrize("kind", NOT_THERE)
def test_a_target_whose_bytes_are_not_all_there_is_refused(store: memstore.Store, kind: str) -> None:
    store.put("key", {"a": full() + 1, "odd": full() + 1})
    out = {"a": full(), "odd": NOT_THERE[kind]()}
    with pytest.raises(StructureMismatchError, match=r"value\['odd'\]: a tensor whose storage was freed or cut"):
        store.get("key", out=out)
    assert torch.equal(out["a"], full())


def strided_array(number: float, *, step: int) -> Any:
    """Three numbers, so many bytes apart, from the last one if that is negative."""
    memory = np.zeros(60, np.uint8)
    array = np.ndarray((3,), np.float64, memory.data, offset=0 if step > 0 else 40, strides=(step,))
    array[:] = number
    return array


def nested(number: float) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((2, 3), number), torch.full((4, 3), number)])


def quantized(number: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.full((3,), number), 0.1, 0, torch.qint8)


def quantized_by_channel(number: float) -> torch.Tensor:
    ones = torch.ones(3)
    return torch.quantize_per_channel(torch.full((3, 2), number), ones, torch.zeros(3), 0, torch.qint8)


# Values that are stored, and have no memory to write them to: each is what is stored and what is to be filled.
NEVER_FILLED: dict[str, tuple[Callable[[float], Any], str]] = {
    "sparse": (lambda number: torch.full((2, 2), number).to_sparse(), "a sparse tensor can't be filled"),
    "sparse rows": (lambda number: torch.full((2, 2), number).to_sparse_csr(), "a sparse tensor can't be filled"),
    "quantized": (quantized, "a quantized tensor can't be filled"),
    "quantized by channel": (quantized_by_channel, "a quantized tensor can't be filled"),
    "wrapper": (lambda number: TwoTensor(torch.full((3,), number), torch.ones(3)), "a TwoTensor can't be filled"),
    "turned nested": (lambda number: nested(number).transpose(1, 2), "a nested tensor that is not contiguous"),
    "array from its end": (partial(strided_array, step=-8), "a numpy array that can't be written, or not"),
    "array with odd steps": (partial(strided_array, step=12), "a numpy array that can't be written, or not"),
}


@pytest.mark.parametrize("kind", NEVER_FILLED)
def test_a_target_that_is_alike_and_cant_be_written_is_refused_untouched(store: memstore.Store, kind: str) -> None:
    make, told = NEVER_FILLED[kind]
    store.put("key", {"a": torch.ones(3), "odd": make(1.0)})
    out = {"a": torch.zeros(3), "odd": make(0.0)}
    with pytest.raises(StructureMismatchError, match=rf"value\['odd'\]: {told}"):
        store.get("key", out=out)
    same = np.array_equal if isinstance(out["odd"], np.ndarray) else is_same
    assert not out["a"].any() and same(out["odd"], make(0.0))


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_inference_tensor_beside_a_parameter(store: memstore.Store, context: str) -> None:
    store.put("key", {"a": torch.ones(2), "b": torch.ones(3)})
    with torch.inference_mode():
        out = {"a": torch.zeros(2)}
    out["b"] = torch.nn.Parameter(torch.zeros(3))
    with CONTEXTS[context]():
        store.get("key", out=out)
    assert out["b"].requires_grad and out["b"].grad_fn is None and out["b"].sum() == 3 and out["a"].sum() == 2


def test_a_lazy_leaf_is_refused_and_its_version_stays(store: memstore.Store) -> None:
    store.put("old", {"a": torch.zeros(600), "b": torch.zeros(2)})
    store.put("new", {"a": torch.ones(600), "b": torch.ones(2)})
    view = store.view("old")
    plain = torch.zeros(600)
    for out in (view, {"a": plain, "b": view["b"]}):
        with pytest.raises(StructureMismatchError, match="a lazy leaf of a view, whose version never changes"):
            store.get("new", out=out)
    assert not view["a"].any() and not view["b"].any() and not plain.any()


@pytest.mark.parametrize("same", [True, False])
def test_targets_that_share_memory(store: memstore.Store, same: bool) -> None:
    base = torch.zeros(10)
    out = {"whole": base, "part": base[2:5], "other": torch.zeros(2)}
    stored = torch.arange(1.0, 11.0)
    part = stored[2:5].clone() if same else torch.zeros(3)
    store.put("key", {"whole": stored, "part": part, "other": torch.ones(2)})
    if same:
        store.get("key", out=out)
        assert torch.equal(base, stored) and out["other"].all()
        return
    for _ in range(2):
        with pytest.raises(StructureMismatchError, match=r"value\['whole'\]: it shares memory with another leaf"):
            store.get("key", out=out)
    assert not base.any() and not out["other"].any()
    store.get("key", out={**out, "part": torch.zeros(3)})
    columns = torch.zeros(3, 2)
    store.put("key", [torch.ones(3), torch.full((3,), 2.0)])
    store.get("key", out=[columns[:, 0], columns[:, 1]])  # side by side, not one over the other
    assert columns.tolist() == [[1, 2]] * 3


def test_all_mismatches_of_all_kinds_are_told_at_once(store: memstore.Store) -> None:
    value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
    store.put("key", {"n": value, "s": torch.ones(2), "f": torch.ones(2)})
    gone = torch.zeros(2)
    gone.untyped_storage().resize_(0)
    out = {"n": other, "s": torch.zeros(3), "f": gone}
    with pytest.raises(StructureMismatchError) as caught:
        store.get("key", out=out)
    for part in ("lengths of the stored nested", "['s']: stored with shape", "['f']: a tensor whose storage was freed"):
        assert part in str(caught.value)
    assert not other.values().any()


def test_dual_tensors_of_forward_mode(store: memstore.Store) -> None:
    store.put("key", [torch.ones(2), torch.ones(3)])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(3), torch.full((3,), 7.0))
        store.get("key", out=[torch.zeros(2), dual])
        made = torch.autograd.forward_ad.unpack_dual(dual)
        assert made.primal.sum() == 3 and (made.tangent is None or not made.tangent.any())


def test_inside_transforms_wrapped_tensors_are_refused(store: memstore.Store) -> None:
    store.put("key", [torch.ones(2), torch.ones(2)])
    plain = torch.zeros(2)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(StructureMismatchError, match=r"value\[1\]: a tensor inside vmap, grad"):
            store.get("key", out=[plain, x])
        assert not plain.any()
        store.get("key", out=[plain, other])
        return x.sum()

    for transform in (torch.func.grad, torch.func.vmap):
        other, plain = torch.zeros(2), torch.zeros(2)
        transform(inside)(torch.zeros(2) if transform is torch.func.grad else torch.zeros(1, 2))
        assert plain.all() and other.all()


def test_what_autograd_has_saved_is_kept_where_that_was_asked_for(store: memstore.Store) -> None:
    store.put("key", [torch.zeros(3)])
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        leaf = torch.ones(3, requires_grad=True)
        factor = torch.full((3,), 5.0)
        product = (leaf * factor).sum()
        store.get("key", out=[factor])
        product.backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [5.0] * 3
    assert not factor.any()


# --- cast -------------------------------------------------------------------------------------------------------------

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_floating_dtypes_are_cast_if_it_is_asked_for(
    store: memstore.Store, stored: torch.dtype, wanted: torch.dtype
) -> None:
    values = torch.randn(5, 3).to(stored)
    store.put("k", {"a": values, "b": [values.t(), torch.arange(3)]})
    out = {"a": torch.zeros(5, 3).to(wanted), "b": [torch.zeros(3, 5).to(wanted), torch.zeros(3).long()]}
    if stored != wanted:
        with pytest.raises(StructureMismatchError, match="cast=True casts it"):
            store.get("k", out=out)
        assert not out["a"].float().any()
    for source in (partial(store.get, "k"), store.ref("k").get):
        assert source(out=out, cast=True) is out
        assert torch.equal(out["a"].float(), values.to(wanted).float())
        assert torch.equal(out["b"][0].float(), values.to(wanted).t().float())
        assert torch.equal(out["b"][1], torch.arange(3))
        out["a"].zero_()


@pytest.mark.parametrize("stored", [torch.int64, torch.complex64, torch.bool])
def test_only_floating_dtypes_are_cast(store: memstore.Store, stored: torch.dtype) -> None:
    store.put("k", {"a": torch.ones(3, dtype=stored), "b": torch.ones(2)})
    out = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(StructureMismatchError, match=r"\['a'\]: stored as") as error:
        store.get("k", out=out, cast=True)
    assert "['b']" not in str(error.value) and not out["b"].any()


def test_a_cast_needs_a_target(store: memstore.Store) -> None:
    store.put("k", torch.ones(3))
    for options in ({}, {"like": torch.ones(3)}, {"dtype": torch.bfloat16}):
        with pytest.raises(TypeError, match="out="):
            store.get("k", cast=True, **options)


def test_targets_that_share_memory_are_cast_if_all_of_them_get_their_values(store: memstore.Store) -> None:
    values = torch.randn(8).bfloat16()
    store.put("k", {"all": values, "end": values[4:]})
    out = torch.zeros(8)
    store.get("k", out={"all": out, "end": out[4:]}, cast=True)
    assert torch.equal(out, values.float())
    out.zero_()  # at the same distance in bytes, which is another one in elements
    with pytest.raises(StructureMismatchError, match="shares memory"):
        store.get("k", out={"all": out, "end": out[2:6]}, cast=True)
    assert not out.any()


def test_a_cast_of_parameters_and_of_bits_that_are_pending(store: memstore.Store) -> None:
    values = torch.randn(4)
    store.put("k", {"parameter": values, "neg": values, "row": values})
    neg = torch.zeros(4, dtype=torch.complex128).conj().imag
    out = {
        "parameter": torch.nn.Parameter(torch.zeros(4).double()),
        "neg": neg,
        "row": torch.zeros(4, 3).double()[:, 1],
    }
    store.get("k", out=out, cast=True)
    assert out["neg"].is_neg()
    assert all(torch.equal(one.detach(), values.double()) for one in out.values())
