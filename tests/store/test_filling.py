"""Every call that fills tensors of the caller's, with every odd tensor: filled, or refused by name and untouched."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

import memstore
import memstore.integrations.torchstore as ts
from memstore import Snapshot, StateDict, TensorShard
from memstore.errors import MemstoreError, ReadOnlyError, StructureMismatchError
from memstore.integrations import dcp
from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from memstore.sharding import TensorShards
from memstore.structure import why_no_memory
from tests.children import in_child
from tests.structure import classes

pytestmark = [
    pytest.mark.embedded,  # its calls take folders
    pytest.mark.filterwarnings("ignore:.*(prototype|deprecated|Sparse|torch.distributed is disabled).*"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

Value = dict[str, Any]
SHAPE, WHOLE, OFFSETS = (4, 3), (6, 3), (1, 0)  # of a target; of the tensor that a TensorShard is a part of
DTYPE = torch.complex64
BEFORE = 7.0


def full(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.full(shape or SHAPE, BEFORE, dtype=dtype)


def inference(make: Callable[[], torch.Tensor] = full) -> torch.Tensor:
    with torch.inference_mode():
        return make()


def freed(nbytes: int = 0) -> torch.Tensor:
    tensor = full()
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return full()


class Plain(torch.Tensor):
    """A subclass whose elements lie in memory as any tensor's."""


# tensors that can be filled
FILLED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": full,
    "Parameter": lambda: torch.nn.Parameter(full()),
    "Buffer": lambda: torch.nn.Buffer(full()),
    "requires_grad": lambda: full().requires_grad_(),
    "subclass with memory": lambda: full().as_subclass(Plain),
    "conj": lambda: full().conj(),
    "neg": lambda: torch._neg_view(full()),
    "conj and neg": lambda: torch._neg_view(full().conj()),
    "imaginary part of a conj": lambda: full().conj().imag,
    "view of another dtype": lambda: full(dtype=torch.complex32).view(torch.float32),
    "view of a larger dtype": lambda: full(4, 3, 2, dtype=torch.float32).view(DTYPE).squeeze(-1),
    "columns": lambda: full(4, 9)[:, 2:5],
    "turned": lambda: full(3, 4).t(),
    "with gaps": lambda: full(8, 6)[::2, ::2],
    "interleaved": lambda: full(15).as_strided(SHAPE, (3, 2)),
    "conj with gaps": lambda: full(8, 6)[::2, ::2].conj(),
    "inference": inference,
    "conj inference": lambda: inference(lambda: full().conj()),
    "turned inference": lambda: inference(lambda: full(3, 4).t()),
    "over an array": lambda: torch.from_numpy(np.full(SHAPE, BEFORE, np.complex64)),
    "behind others": lambda: full(5, 3)[1:],
}
# tensors that can't be; beside them a lazy leaf
REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: full(3).expand(SHAPE),
    "expanded inference": lambda: inference(lambda: full(3).expand(SHAPE)),
    "overlapping": lambda: full(24).as_strided(SHAPE, (2, 1)),
    "meta": lambda: torch.empty(SHAPE, dtype=DTYPE, device="meta"),
    "fake": fake,
    "freed": freed,
    "cut": lambda: freed(16),
    "sparse": lambda: full().to_sparse(),
    "uninitialized": lambda: torch.nn.UninitializedParameter(dtype=DTYPE),
    "wrapper": lambda: TwoTensor(full(), full()),
    "unnamed wrapper": lambda: classes.Wrapper(full()),
    "wrapper that copies": lambda: classes.Copier(full()),
    "opaque subclass": lambda: torch.Tensor._make_subclass(classes.Opaque, full()),
    "expanded subclass": lambda: full(3).expand(SHAPE).as_subclass(Plain),
}
# None: lazy leaves are made with the store that they are of
TARGETS: dict[str, Callable[[], torch.Tensor] | None] = {**FILLED, **REFUSED, "lazy leaf": None}
WITH_OPERATORS = ("opaque subclass", "wrapper that copies")  # what torch's own state_dict makes of them is no view
NO_SHARDS = ("sparse", "uninitialized", *WITH_OPERATORS)  # of which no DTensor can be made


def _array_of(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements of a contiguous tensor, past its class."""
    with torch._C.DisableTorchFunctionSubclass():
        storage, dtype = value.untyped_storage(), value.dtype
        return torch.empty(0, dtype=dtype).set_(storage, 0, value.shape).numpy()


def shown(value: Any) -> torch.Tensor | None:
    """What a target shows; None if it has no values that could be looked at."""
    if isinstance(value, TensorShard):
        return shown(value.local)
    if isinstance(value, DTensor):
        return shown(value._local_tensor)
    if type(value).__name__ in ("FakeTensor", "UninitializedParameter", "StoredTensor") or value.is_meta:
        return None
    if isinstance(value, classes.Wrapper):
        return value.held.clone()
    if isinstance(value, classes.Opaque):
        return torch.from_numpy(_array_of(value).copy())
    if isinstance(value, TwoTensor):
        return value.a.clone() if torch.equal(value.a, value.b) else torch.cat([value.a, value.b])
    if value.layout is not torch.strided:
        return value.to_dense().clone()
    if why_no_memory(value) is not None:
        return None
    with torch.inference_mode():
        return value.detach().clone().resolve_conj().resolve_neg()


# --- the calls --------------------------------------------------------------------------------------------------------

Fill = Callable[[Value], Any]  # returns what holds the values then, if it isn't the target


class Weights(torch.nn.Module):
    """A module that has these tensors: Parameters as parameters, others as buffers."""

    def __init__(self, tensors: Value) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def loaded(target: Value, load: Callable[[Value], object]) -> Value:
    state = dict(target)
    load(state)
    return state


class Calls:
    """Each method stores a value, and returns what fills a target with it."""

    def __init__(self, store: memstore.Store, folder: str) -> None:
        self._store, self._folder = store, folder

    def get(self, value: Value) -> Fill:
        self._store.put("value", value)
        return lambda target: self._store.get("value", out=target)

    def get_what_both_have(self, value: Value) -> Fill:
        self._store.put("value", value)
        return lambda target: self._store.ref("value").get(out=target, strict=False)

    def _put_halves(self, value: Value) -> None:
        halves = {
            name: TensorShards(tensor.dtype, tuple(tensor.shape), (((0, 0), tensor[:2]), ((2, 0), tensor[2:])))
            for name, tensor in value.items()
        }
        self._store.put_sharded("halves", halves, attempt="1", rank=0, world_size=1)

    def get_of_boxes(self, value: Value) -> Fill:
        self._put_halves(value)
        return lambda target: self._store.get("halves", out=target)

    def read_rows(self, value: Value) -> Fill:
        self._store.put("value", value)
        view = self._store.view("value")
        return lambda target: memstore.read_rows(view, slice(None), out=target)

    def read_rows_of_memory(self, value: Value) -> Fill:
        return lambda target: memstore.read_rows(value, [0, 1, 2, 3], out=target)

    def read_rows_of_boxes(self, value: Value) -> Fill:
        self._put_halves(value)
        view = self._store.view("halves")
        return lambda target: memstore.read_rows(view, [0, 1, 2, 3], out=target)

    def _spec(self, value: Value) -> Any:
        return {name: (SHAPE[1:], tensor.dtype) for name, tensor in value.items()}

    def read_rows_of_a_dataset(self, value: Value) -> Fill:
        dataset = self._store.create_dataset("dataset", self._spec(value), capacity=4)
        dataset.extend(value)
        return lambda target: dataset.read_rows(slice(None), out=target)

    def sample(self, value: Value) -> Fill:
        return self._sample(value, "uniform")

    def sample_fifo(self, value: Value) -> Fill:
        return self._sample(value, "fifo")

    def sample_lifo(self, value: Value) -> Fill:
        return self._sample(value, "lifo")

    def _sample(self, value: Value, sampler: Any) -> Fill:
        rows = {name: tensor[:1].expand(SHAPE) for name, tensor in value.items()}  # their order is the sampler's
        buffer = memstore.ReplayBuffer(self._store, sampler, self._spec(value), capacity=8, sampler=sampler)
        want = dict(value)

        def fill(target: Value) -> None:
            buffer.extend(rows)
            index = torch.empty(4, dtype=torch.int64)
            try:
                buffer.sample(4, out=TensorDict._new_unsafe({**target, "index": index}, [4]), timeout=0.5)
            except MemstoreError:
                assert len(buffer.sample(4, timeout=0.0)) == 4, "none of the rows was handed out"
                raise

        for name in value:
            value[name] = want[name][:1].expand(SHAPE).clone()  # what is to be there then
        return fill

    def _take(self, state: Any) -> Snapshot:
        return Snapshot.take(f"{self._folder}/snapshot", {"state": state}, durability="process")

    def restore_dict(self, value: Value) -> Fill:
        snapshot = self._take(StateDict(value))

        def fill(target: Value) -> Value:
            state = StateDict(target)
            snapshot.restore({"state": state})
            return dict(state)

        return fill

    def restore_module(self, value: Value) -> Fill:
        snapshot = self._take(Weights(value))
        return lambda target: snapshot.restore({"state": Weights(target)})

    def read_object(self, value: Value) -> Fill:
        snapshot = self._take(StateDict(value))

        def fill(target: Value) -> None:
            for name in ("odd", "a"):
                snapshot.read_object(f"0/state/{name}", obj_out=target[name])

        return fill

    def dcp_load(self, value: Value) -> Fill:
        path = f"{self._folder}/dcp"
        dcp.save(dict(value), checkpoint_id=path)
        return lambda target: loaded(target, lambda state: dcp.load(state, checkpoint_id=path))

    def dcp_load_of_another_dtype(self, value: Value) -> Fill:
        wider = {True: torch.complex128, False: torch.float64}
        return self.dcp_load({name: tensor.to(wider[tensor.is_complex()]) for name, tensor in value.items()})

    def dcp_load_of_a_key(self, value: Value) -> Fill:
        torch_dcp.save(dict(value), storage_writer=dcp.StorageWriter(self._store, key="dcp"))
        reader = dcp.StorageReader(self._store, key="dcp")
        return lambda target: loaded(
            target, lambda state: torch_dcp.load(state, storage_reader=reader, planner=dcp.LoadPlanner())
        )

    def load_model(self, value: Value) -> Fill:
        self._store.save_model("model", Weights(value))
        return lambda target: self._store.load_model("model", Weights(target))

    def torchstore_get(self, value: Value) -> Fill:
        for name, tensor in value.items():
            asyncio.run(ts.put(name, tensor))

        def fill(target: Value) -> None:
            for name in ("odd", "a"):
                asyncio.run(ts.get(name, inplace_tensor=target[name]))

        return fill

    def torchstore_get_slice(self, value: Value) -> Fill:
        asyncio.run(ts.put("odd", value["odd"]))
        spec = ts.TensorSlice((0, 0), (0,), SHAPE, SHAPE, (1,))

        def fill(target: Value) -> None:
            asyncio.run(ts.get("odd", inplace_tensor=target["odd"], tensor_slice_spec=spec))
            target["a"].copy_(value["a"])

        return fill

    def torchstore_get_leaf(self, value: Value) -> Fill:
        asyncio.run(ts.put_state_dict(value, "value"))

        def fill(target: Value) -> None:
            for name in ("odd", "a"):
                asyncio.run(ts.get(f"value/{name}", inplace_tensor=target[name]))

        return fill

    def torchstore_get_state_dict(self, value: Value) -> Fill:
        asyncio.run(ts.put_state_dict(value, "value"))
        return lambda target: asyncio.run(ts.get_state_dict("value", target))

    def torchstore_get_what_both_have(self, value: Value) -> Fill:
        asyncio.run(ts.put_state_dict(value, "value"))
        return lambda target: asyncio.run(ts.get_state_dict("value", target, strict=False))

    def torchstore_get_of_another_dtype(self, value: Value) -> Fill:
        wider = {name: one if one.is_complex() else one.to(torch.float64) for name, one in value.items()}
        return self.torchstore_get_state_dict(wider)


CALLS = [name for name in vars(Calls) if not name.startswith("_")]
OF_SHARDS = ("get", "get_what_both_have", "get_of_boxes", "restore_dict", "read_object")
OF_DTENSORS = (
    *("get", "get_of_boxes", "restore_dict", "restore_module", "read_object", "load_model"),
    *(name for name in CALLS if name.startswith(("dcp", "torchstore")) and name != "torchstore_get_slice"),
)


def expected(call: str, target: str, form: str) -> str:
    if call == "restore_module" and target == "uninitialized":
        return "ValueError"  # torch's own, of state_dict()
    if call == "restore_dict" and form == "plain" and target not in FILLED:
        return "replaced"  # a dict can have another tensor
    if call.startswith("dcp") and form == "DTensor" and target == "meta":
        return "replaced"  # by torch, where there is a process group
    if target == "wrapper" and call.startswith("dcp"):
        return "filled"  # by its class
    if call.startswith("sample") and "inference" in target:
        return "refused"
    return "filled" if target in FILLED else "refused"


def outcome(fill: Fill, target: Value, want: Value) -> str:
    """What a call does with a target: "filled", "replaced", "refused", or what is wrong."""
    before = {name: shown(tensor) for name, tensor in target.items()}
    try:
        found = fill(target)
    except CheckpointException as error:
        ((raised, _),) = error.failures.values()
    except Exception as error:
        raised = error
    else:
        now = found if isinstance(found, dict) else target
        wrong = [name for name in want if (got := shown(now[name])) is None or not torch.equal(got, want[name])]
        if wrong:
            return f"returned, and {wrong} is wrong"
        return "filled" if all(now[name] is target[name] for name in want) else "replaced"
    now = {name: shown(tensor) for name, tensor in target.items()}
    written = [name for name, old in before.items() if old is not None and not torch.equal(old, now[name])]
    if written:
        return f"{written} was written before {raised!r}"
    if not isinstance(raised, StructureMismatchError | ReadOnlyError):
        return type(raised).__name__
    return "refused" if "odd" in f"{raised.key} {raised}" else f"refused without a name: {raised}"


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    found = torch.arange(1.0, 1.0 + shape[0] * shape[1]).reshape(shape)
    return torch.complex(found, -found) if dtype.is_complex else found.to(dtype)


def surprises(call: str, folder: str, form: str, mesh: Any = None) -> dict[str, str]:
    """What a call does with targets that it should do something else with.

    Args:
        form: "plain", or the odd tensor is the local one of a "TensorShard" or "DTensor".
    """
    found: dict[str, str] = {}
    for dtype in (torch.complex64, torch.float32):
        with memstore.open(f"{folder}/{dtype}") as store, job(f"{folder}/{dtype}-job"):
            value = {"a": numbers(SHAPE, dtype) + 1, "odd": numbers(WHOLE if form == "TensorShard" else SHAPE, dtype)}
            fill = getattr(Calls(store, f"{folder}/{dtype}"), call)(value)
            want = {**value, "odd": value["odd"][1:5]} if form == "TensorShard" else value
            store.put("lazy", full())
            for name, make in TARGETS.items():
                odd: Any = store.view("lazy") if make is None else make()
                left_out = {"DTensor": NO_SHARDS}.get(form, WITH_OPERATORS if call == "restore_module" else ())
                if odd.dtype is not dtype or name in left_out:
                    continue
                if form == "TensorShard":
                    odd = TensorShard(odd, WHOLE, OFFSETS)
                elif form == "DTensor":
                    odd = DTensor.from_local(odd, mesh, [Replicate()], run_check=False).detach()
                got = outcome(fill, {"a": full(dtype=dtype), "odd": odd}, want)
                if got != expected(call, name, form):
                    found[name] = got
    return found


@contextmanager
def job(folder: str) -> Generator[None]:
    """With TorchStore's functions initialized."""
    before = os.environ.get(ROOT_VARIABLE)
    os.environ[ROOT_VARIABLE] = folder
    asyncio.run(ts.initialize())
    try:
        yield
    finally:
        asyncio.run(ts.shutdown())
        os.environ.pop(ROOT_VARIABLE)
        if before is not None:
            os.environ[ROOT_VARIABLE] = before


@pytest.mark.parametrize("call", CALLS)
def test_an_odd_tensor_is_filled_or_refused_untouched(scratch: str, call: str) -> None:
    os.mkdir(scratch)
    assert surprises(call, scratch, "plain") == {}


@pytest.mark.parametrize("call", OF_SHARDS)
def test_a_shard_that_is_an_odd_tensor_is_filled_or_refused_untouched(scratch: str, call: str) -> None:
    os.mkdir(scratch)
    assert surprises(call, scratch, "TensorShard") == {}


def surprises_with_dtensors(folder: str) -> dict[str, dict[str, str]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    found: dict[str, dict[str, str]] = {}
    for call in OF_DTENSORS:
        os.mkdir(f"{folder}/{call}")
        found[call] = surprises(call, f"{folder}/{call}", "DTensor", mesh)
    dist.destroy_process_group()
    return {call: one for call, one in found.items() if one}


def test_a_dtensor_of_an_odd_tensor_is_filled_or_refused_untouched(scratch: str) -> None:
    os.mkdir(scratch)
    assert in_child(surprises_with_dtensors, scratch) == {}


def test_a_load_looks_at_all_targets_before_its_first_batch(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.integrations.dcp.storage._BATCH", 100)
    want = {f"w{number}": torch.full((16,), float(number)) for number in range(6)}
    dcp.save(dict(want), checkpoint_id=scratch)
    state = {name: torch.full((16,), BEFORE) for name in want}
    dcp.load(state, checkpoint_id=scratch)
    assert all(torch.equal(state[name], want[name]) for name in want)
    state = {name: torch.full((16,), BEFORE) for name in want}
    state["w5"] = torch.zeros(1).expand(16)
    with pytest.raises(CheckpointException, match="w5: an expanded tensor"):
        dcp.load(state, checkpoint_id=scratch)
    assert all(torch.equal(tensor, torch.full((16,), BEFORE)) for name, tensor in state.items() if name != "w5")
