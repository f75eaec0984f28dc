"""Modes and transforms of torch around a call: what is got is real and whole, what is put is what was held."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memstore
from memstore import _modes as modes
from memstore.errors import StructureMismatchError, UnsupportedValueError
from tests.support.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about anomaly mode, prototypes and what is deprecated


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Refusing(TorchFunctionMode):
    """A mode that allows some functions only: none that makes or fills tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("empty", "empty_strided", "set_", "resize_", "copy_", "_foreach_copy_", "clone"):
            raise RuntimeError(f"no {func.__name__} here")
        return func(*args, **(kwargs or {}))


@contextmanager
def set_by(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def within(context: Callable[[], Any]) -> Callable[[Callable[[], Any]], None]:
    def call(function: Callable[[], Any]) -> None:
        with context():
            function()

    return call


def through(transform: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> Callable[[Callable[[], Any]], None]:
    def call(function: Callable[[], Any]) -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            function()
            return x.sum()

        transform(traced)

    return call


x = torch.ones(2, 2)
AROUND: dict[str, Callable[[Callable[[], Any]], None]] = {
    "fake": within(FakeTensorMode),
    "fake with real ones": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "functional": within(FunctionalTensorMode),
    "dispatch mode": within(Passing),
    "function mode": within(Refusing),
    "flop counter": within(lambda: FlopCounterMode(display=False)),
    "saved tensors may change": within(torch.autograd.graph.allow_mutation_on_saved_tensors),
    "device": within(lambda: torch.device("meta")),
    "default device": within(lambda: set_by(torch.set_default_device, "meta", None)),
    "default dtype": within(lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32)),
    "deterministic": within(lambda: set_by(torch.use_deterministic_algorithms, True, False)),
    "inference mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "autocast": within(lambda: torch.autocast("cpu")),
    "anomaly mode": within(torch.autograd.detect_anomaly),
    "grad": through(lambda f: torch.func.grad(f)(x)),
    "vmap": through(lambda f: torch.func.vmap(f)(x)),
    "jvp": through(lambda f: torch.func.jvp(f, (x,), (x,))),
    "vmap of grad": through(lambda f: torch.func.vmap(torch.func.grad(f))(x)),
    "functionalize": through(lambda f: torch.func.functionalize(f)(x)),
    "make_fx": through(lambda f: make_fx(f)(x)),
    "make_fx, fake": through(lambda f: make_fx(f, tracing_mode="fake")(x)),
    "make_fx before dispatch": through(lambda f: make_fx(f, pre_dispatch=True)(x)),
    "jit.trace": through(lambda f: torch.jit.trace(f, x, check_trace=False)),
}
everywhere = pytest.mark.parametrize("around", AROUND)


def a_value() -> dict[str, Any]:
    base = torch.arange(10.0)
    lines = [torch.ones(2), torch.ones(3)]
    return {
        "number": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "leaf": torch.ones(3, requires_grad=True),
        "large": torch.full((3000,), 2.0),
        "turned": torch.ones(4, 3).t(),
        "empty": torch.empty(0, 3),
        "no numpy": torch.ones(5, dtype=torch.bfloat16),
        "conj": torch.full((3,), 1 + 2j).conj(),
        "tied": [base, base, base[2:5]],
        "array": np.ones(4),
        "td": TensorDict({"x": torch.ones(2, 2), "s": "text"}, [2], device="cpu"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "jagged": torch.nested.nested_tensor(lines, layout=torch.jagged),
        "nested": torch.nested.nested_tensor(lines),
    }


def plain_leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, (dict, TensorDict)):
        for inner in value.values():
            yield from plain_leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from plain_leaves(inner)
    elif isinstance(value, torch.Tensor):
        yield value


def assert_real(got: Any) -> None:
    found = list(plain_leaves(got))
    assert found
    for leaf in found:
        assert type(leaf) in (torch.Tensor, torch.nn.Parameter) or leaf.is_nested
        assert not leaf.is_inference() and leaf.device.type == "cpu"
        assert not torch._C._functorch.is_functorch_wrapped_tensor(leaf)  # type: ignore[attr-defined]


@everywhere
def test_gets_are_as_without_it(store: memstore.Store, around: str) -> None:
    value = a_value()
    store.put_many({"value": value, "small": torch.arange(4.0), "large": torch.arange(4000.0)})
    got: dict[str, Any] = {}

    def get() -> None:
        got.update(store.get_many(["value", "small", "large"]))
        got["doubled"] = store.get("value", dtype=torch.float64)
        got["moved"] = store.get("value", device="cpu")
        got["weights"] = [tensor for _, tensor in memstore.iter_weights(store, "large")]

    AROUND[around](get)
    for name in ("value", "small", "large", "doubled", "moved", "weights"):
        assert_real(got[name])
    assert_same(value, got["value"])
    assert_same(value, got["moved"])
    assert got["doubled"]["large"].dtype == torch.float64
    assert torch.equal(got["weights"][0], torch.arange(4000.0)) and torch.equal(got["small"], torch.arange(4.0))


@everywhere
def test_puts_store_what_is_there(store: memstore.Store, around: str) -> None:
    value = a_value()

    def put() -> None:
        store.put_many({"value": value, "small": value["number"], "wide": value["turned"]})
        with pytest.raises(UnsupportedValueError, match="pickle"):
            store.put("refused", {**value, "object": object()})

    AROUND[around](put)
    assert "refused" not in store
    assert_same(value, store.get("value"))
    assert store.get("small") == 3 and store.get("wide").sum() == 12


@everywhere
def test_copies_into_and_like(store: memstore.Store, around: str) -> None:
    value = a_value()
    del value["quantized"]
    store.put("value", value)
    out = {**a_value(), "large": torch.zeros(3000), "number": torch.nn.Parameter(torch.zeros(())), "array": np.zeros(4)}
    del out["quantized"]
    like: list[Any] = []

    def copy() -> None:
        assert store.get("value", out=out) is out
        like.append(store.get("value", like=out))

    AROUND[around](copy)
    assert (out["large"] == 2).all() and out["number"] == 3 and out["array"].all()
    assert_real(like[0])
    assert type(like[0]["number"]) is torch.nn.Parameter
    for name in ("large", "turned", "no numpy", "conj", "empty"):
        assert torch.equal(like[0][name], value[name])


@everywhere
def test_views_and_batches_of_rows(store: memstore.Store, around: str) -> None:
    value = a_value()
    rows = torch.arange(4000.0).reshape(1000, 4)
    store.put_many({"value": value, "rows": {"a": rows, "p": torch.nn.Parameter(torch.ones(1000, 2))}})
    held, found = store.view("rows"), {}

    def use() -> None:
        found["view"] = store.view("value")
        found["slice"] = held["a"][3:5]
        found["list"] = held["a"][[3, 1]]
        found["batch"] = memstore.read_rows(held, [1, 7])
        found["reference"] = pickle.loads(pickle.dumps(held["a"][3:5]))

    AROUND[around](use)
    assert_same(value["large"], found["view"]["large"].clone())
    assert_same(value["jagged"], found["view"]["jagged"])
    assert torch.equal(found["slice"].clone(), rows[3:5]) and torch.equal(found["reference"].clone(), rows[3:5])
    assert torch.equal(torch.clone(found["list"]), rows[[3, 1]])
    assert torch.equal(torch.clone(found["batch"]["a"]), rows[[1, 7]])
    assert type(found["slice"]) is memstore.StoredTensor


@everywhere
@pytest.mark.embedded
def test_a_replay_buffer_that_is_opened_inside_is_as_any_other(store: memstore.Store, around: str) -> None:
    found: dict[str, memstore.ReplayBuffer] = {}

    def use() -> None:
        found["buffer"] = memstore.ReplayBuffer(store, "replay", {"x": ((3,), torch.float32)}, capacity=8)

    AROUND[around](use)
    found["buffer"].extend({"x": torch.ones(4, 3)})
    assert torch.equal(found["buffer"].sample(2)["x"], torch.ones(2, 3))


def test_fake_and_wrapped_tensors_are_refused_by_name(store: memstore.Store) -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
        for value in (fake, [torch.nn.Parameter(fake)], {"a": TensorDict({"b": fake}, [])}):
            with pytest.raises(UnsupportedValueError, match="a fake tensor: it has a shape, but no bytes"):
                store.put("key", value)
    with FunctionalTensorMode(), pytest.raises(UnsupportedValueError, match="no bytes of its own"):
        store.put("key", torch.ones(3))

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedValueError, match=r"\['a'\]: a tensor inside vmap, grad"):
            store.put("key", {"a": tensor})
        with pytest.raises(UnsupportedValueError, match="a tensor inside vmap, grad"):
            store.put("key", tensor)
        return tensor.sum()

    torch.func.grad(inside)(torch.ones(2))
    torch.func.vmap(inside)(torch.ones(2, 2))
    with torch.device("meta"), pytest.raises(UnsupportedValueError, match="a meta tensor"):
        store.put("key", torch.ones(3))
    with FakeTensorMode(), pytest.raises(StructureMismatchError, match="a fake tensor"):
        store.put("other", np.ones(3))
        store.put("other", 5)
        store.get("other", out=torch.ones(3))
    assert "key" not in store


def test_modes_are_as_before_afterwards() -> None:
    inner, outer = Passing(), Passing()

    def state() -> list[Any]:
        return [
            [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())],
            torch._C._len_torch_function_stack(),
            torch._C._functorch.maybe_current_level(),  # type: ignore[attr-defined]
        ]

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with outer, torch.device("meta"), FakeTensorMode(), inner:
            before = state()
            with pytest.raises(KeyboardInterrupt), modes.put_aside():
                assert state() == [[], 0, None] and not modes.are_active()
                raise KeyboardInterrupt
            assert state() == before and modes.are_active()
        return tensor.sum()

    assert torch.equal(torch.func.grad(inside)(torch.ones(2)), torch.ones(2))
    assert not modes.are_active()


def test_modes_of_other_threads_stay(store: memstore.Store) -> None:
    store.put("key", torch.ones(3))
    types: list[type] = []
    entered, got = threading.Event(), threading.Event()

    def other() -> None:
        with FakeTensorMode():
            entered.set()
            got.wait(10)
            types.append(type(torch.ones(2)))

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    assert type(store.get("key")) is torch.Tensor
    got.set()
    thread.join()
    assert types[0].__name__ == "FakeTensor"
