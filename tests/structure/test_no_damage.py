"""What goes wrong in a process that reads whole bytes is not told as damage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

import memstore
from memstore.engine.format.records import Leaf
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure import get_into, get_like, plans, rebuild
from memstore.structure.plans import describe, plan_of
from memstore.structure.traits import Traits
from tests.structure.roundtrip import stored
from tests.support.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|deprecated).*")


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    plans._plans.clear()  # type: ignore[attr-defined]


def nested(levels: int) -> Any:
    value: Any = {"t": torch.ones(2), "deep": [[1, (2, {"x": {3}})]]}
    for _ in range(levels):
        value = [value]
    return value


def with_stack_left(frames: int, function: Callable[[], Any]) -> Any:
    """Calls it with so many levels of Python's stack left."""

    def descend(count: int) -> Any:
        return function() if count <= 0 else descend(count - 1)

    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return descend(sys.getrecursionlimit() - depth - frames)


def test_the_end_of_the_stack() -> None:
    """At any depth a get works, or runs out of stack and says so."""
    value = nested(40)
    plan, objects, memory = stored(value)
    outcomes = set()
    for frames in range(4, 200, 3):
        plans._plans.clear()  # type: ignore[attr-defined]

        def get() -> Any:
            return rebuild(plan_of(plan.description), objects, memory, None)

        try:
            assert_same(value, with_stack_left(frames, get))
            outcomes.add("got")
        except RecursionError:
            outcomes.add("out of stack")
    assert outcomes == {"got", "out of stack"}


def test_what_nests_too_deeply_for_any_stack_is_damage() -> None:
    for depth in (2_000, 100_000):
        with pytest.raises(CorruptionError):
            plan_of(b"\x91" * depth)


class Backend:
    """A pickled object whose own code fails where it is read."""

    error: Exception = ValueError("no such backend")

    def __reduce__(self) -> Any:
        return raise_again, ()


def raise_again() -> Any:
    raise Backend.error


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), KeyError("no"), ImportError("no")])
def test_objects_whose_code_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "error", error)
    plan, objects, memory = stored([torch.ones(1), Backend()], allow_pickle=True)
    with pytest.raises(UnsupportedValueError, match="stored with pickle can't be read here.*no"):
        rebuild(plan, objects, memory, None, allow_pickle=True)


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), KeyboardInterrupt()])
def test_what_ends_a_call_goes_through(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "error", error)
    plan, objects, memory = stored([torch.ones(1), Backend()], allow_pickle=True)
    out = [torch.zeros(1), None]
    for get in (rebuild, get_into, get_like):
        target = None if get is rebuild else out
        with pytest.raises(type(error)):
            get(plan, objects, memory, target, allow_pickle=True)  # type: ignore[operator]
    assert not out[0].any()


@tensorclass
class Choosy:
    x: torch.Tensor

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.refuses:
            raise RuntimeError("not in this process")
        return object.__new__(cls)


Choosy.refuses = False  # type: ignore[attr-defined]


def test_a_class_whose_new_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, objects, memory = stored(Choosy(torch.ones(2), batch_size=[2]))
    assert rebuild(plan, objects, memory, None).x.all()
    monkeypatch.setattr(Choosy, "refuses", True)
    with pytest.raises(UnsupportedValueError, match="Choosy, whose __new__ fails here"):
        rebuild(plan, objects, memory, None)


def test_devices_that_this_process_lacks() -> None:
    """As those of a backend of another vendor are, until its package is imported."""
    leaf = Leaf(("x",), "float32", (2,), None, 0, 8)
    plan = plan_of(describe(["dict", ["x"], [0]], [leaf], [Traits(0, False, "npu:1")], {}, False))
    memory = stored({"x": torch.ones(2)})[2]
    assert rebuild(plan, b"", memory, None, device="cpu")["x"].sum() == 2
    with pytest.raises(UnsupportedValueError, match=r"from the device 'npu:1', which this process can't use"):
        rebuild(plan, b"", memory, None)
    boxed = plan_of(describe(["td", [], "npu", None, False, ["x"], [0]], [leaf], [Traits(0, False, "npu")], {}, False))
    assert rebuild(boxed, b"", memory, None, device="cpu").device == torch.device("cpu")
    with pytest.raises(UnsupportedValueError, match="from the device 'npu'"):
        rebuild(boxed, b"", memory, None)
    plan, objects, memory = stored([torch.ones(1), torch.device("cuda:1")])
    objects = objects.replace(b"cuda:1", b"npus:1")
    with pytest.raises(UnsupportedValueError, match="from the device 'npus:1'"):
        rebuild(plan, objects, memory, None)


def test_dtypes_that_this_torch_lacks() -> None:
    plan = stored([torch.ones(2, dtype=torch.bfloat16)])[0]
    with pytest.raises(UnsupportedValueError, match=r"a leaf of torch\.bfloat17, which torch .* hasn't"):
        plan_of(plan.description.replace(b"bfloat16", b"bfloat17"))
    plan, objects, memory = stored([torch.ones(1), torch.float16])
    with pytest.raises(UnsupportedValueError, match=r"has torch\.float19, which torch .* hasn't"):
        rebuild(plan, objects.replace(b"float16", b"float19"), memory, None)


def test_kernels_that_a_device_lacks(store: memstore.Store) -> None:
    lines = [torch.ones(2), torch.ones(3)]
    for value in (
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor(lines),
        torch.nested.nested_tensor(lines, layout=torch.jagged),
        TensorDict({"x": torch.ones(2)}, [2]),
    ):
        store.put("key", [value])
        try:
            store.get("key", device="meta")
        except UnsupportedValueError as error:
            assert "torch can't make a leaf" in str(error)
