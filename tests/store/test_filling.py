"""Every call that fills tensors of the caller's, with every odd tensor: filled rightly, or refused untouched by name."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownLambdaType=false

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor

import memstore
import memstore.integrations.torchstore as ts
from memstore import Snapshot, StateDict, TensorShard
from memstore.deferred_init import deferred_init, materialize_module
from memstore.errors import MemstoreError, ReadOnlyError, StructureMismatchError
from memstore.integrations import dcp
from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from memstore.sharding import TensorShards
from memstore.structure import traits
from tests.children import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|deprecated|quantize|fake tensor).*")

SHAPE = (4, 3)
DTYPE = torch.complex64
BEFORE = 7.0


def full(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.full(shape or SHAPE, BEFORE, dtype=dtype)


def stored(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(1.0, 13.0).reshape(SHAPE)
    return torch.complex(numbers, -numbers) if dtype.is_complex else numbers.to(dtype)


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


# tensors that can be filled, all of SHAPE
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
    "interleaved": lambda: full(24).as_strided(SHAPE, (3, 2)) if False else full(30).as_strided(SHAPE, (4, 1)),
    "conj with gaps": lambda: full(8, 6)[::2, ::2].conj(),
    "inference": inference,
    "conj inference": lambda: inference(lambda: full().conj()),
    "turned inference": lambda: inference(lambda: full(3, 4).t()),
    "over an array": lambda: torch.from_numpy(np.full(SHAPE, BEFORE, np.complex64)),
    "behind others": lambda: full(5, 3)[1:],
}
# tensors that can't be
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
}


def shown(value: Any) -> torch.Tensor | None:
    """What a target shows now; None if it has no values."""
    if isinstance(value, TensorShard):
        return shown(value.local)
    if isinstance(value, DTensor):
        return shown(value._local_tensor)
    if type(value).__name__ in ("FakeTensor", "UninitializedParameter", "StoredTensor") or value.is_meta:
        return None
    if isinstance(value, TwoTensor):
        return torch.cat([value.a, value.b])
    if value.layout is not torch.strided:
        return value.to_dense().clone()
    try:
        if traits.is_cut(value):
            return None
    except RuntimeError:
        return None
    with torch.inference_mode():
        return value.detach().clone().resolve_conj().resolve_neg()


# --- the calls --------------------------------------------------------------------------------------------------------

Value = dict[str, Any]
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


class Place:
    """Where a value is stored for the calls: a store, and a folder beside it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.store = memstore.open(f"{folder}/store")

    def get(self, value: Value) -> Fill:
        self.store.put("value", value)
        return lambda target: self.store.get("value", out=target)

    def get_ref(self, value: Value) -> Fill:
        self.store.put("value", value)
        return lambda target: self.store.ref("value").get(out=target, strict=False)

    def get_boxed(self, value: Value) -> Fill:
        shards = {name: TensorShard(tensor, SHAPE, (0, 0)) for name, tensor in value.items()}
        self.store.put_sharded("boxed", shards, attempt="1", rank=0, world_size=1)
        return lambda target: self.store.get("boxed", out=target)

    def read_rows(self, value: Value) -> Fill:
        self.store.put("value", value)
        view = self.store.view("value")
        return lambda target: memstore.read_rows(view, slice(None), out=target)

    def read_rows_of_memory(self, value: Value) -> Fill:
        return lambda target: memstore.read_rows(value, slice(None), out=target)

    def read_rows_of_boxes(self, value: Value) -> Fill:
        half = {name: TensorShards(tensor.dtype, SHAPE, (((0, 0), tensor[:2]), ((2, 0), tensor[2:]))) for name, tensor in value.items()}
        self.store.put_sharded("halves", half, attempt="1", rank=0, world_size=1)
        view = self.store.view("halves")
        return lambda target: memstore.read_rows(view, [0, 1, 2, 3], out=target)

    def dataset(self, value: Value) -> Fill:
        spec = {name: (SHAPE[1:], tensor.dtype) for name, tensor in value.items()}
        dataset = self.store.create_dataset("dataset", spec, capacity=4)
        dataset.extend(value)
        return lambda target: dataset.read_rows(slice(None), out=target)

    def sample(self, value: Value) -> Fill:
        spec = {name: (SHAPE[1:], tensor.dtype) for name, tensor in value.items()}
        buffer = memstore.ReplayBuffer(self.store, "replay", spec, capacity=8, sampler="fifo")
        buffer.extend(value)

        def fill(target: Value) -> None:
            index = torch.empty(4, dtype=torch.int64)
            try:
                buffer.sample(4, out=TensorDict._new_unsafe({**target, "index": index}, [4]), timeout=0.5)
            except MemstoreError:
                assert len(buffer.sample(4, timeout=0.0)) == 4  # the rows are there yet
                raise

        return fill

    def _taken(self, value: Value, state: Any) -> str:
        Snapshot.take(f"{self.folder}/snapshot", {"state": state}, durability="process")
        return f"{self.folder}/snapshot"

    def restore_dict(self, value: Value) -> Fill:
        path = self._taken(value, StateDict(value))

        def fill(target: Value) -> Value:
            state = StateDict(target)
            Snapshot(path).restore({"state": state})
            return dict(state)

        return fill

    def restore_module(self, value: Value) -> Fill:
        path = self._taken(value, Weights(value))
        return lambda target: Snapshot(path).restore({"state": Weights(target)})

    def read_object(self, value: Value) -> Fill:
        path = self._taken(value, StateDict(value))

        def fill(target: Value) -> None:
            Snapshot(path).read_object("0/state/odd", obj_out=target["odd"])
            Snapshot(path).read_object("0/state/a", obj_out=target["a"])

        return fill

    def dcp_folder(self, value: Value) -> Fill:
        dcp.save(dict(value), checkpoint_id=f"{self.folder}/dcp")
        return lambda target: loaded(target, lambda state: dcp.load(state, checkpoint_id=f"{self.folder}/dcp"))

    def dcp_cast(self, value: Value) -> Fill:
        wider = {name: one.to(torch.complex128 if one.is_complex() else torch.float64) for name, one in value.items()}
        return self.dcp_folder(wider)

    def dcp_store(self, value: Value) -> Fill:
        import torch.distributed.checkpoint as torch_dcp

        torch_dcp.save(dict(value), storage_writer=dcp.StorageWriter(self.store, key="dcp"))
        return lambda target: loaded(target, lambda state: torch_dcp.load(state, storage_reader=dcp.StorageReader(self.store, key="dcp"), planner=dcp.LoadPlanner()))

    def load_model(self, value: Value) -> Fill:
        self.store.save_model("model", Weights(value))
        return lambda target: self.store.load_model("model", Weights(target))

    def torchstore_tensor(self, value: Value) -> Fill:
        asyncio.run(ts.put("odd", value["odd"]))
        asyncio.run(ts.put("a", value["a"]))

        def fill(target: Value) -> None:
            asyncio.run(ts.get("odd", inplace_tensor=target["odd"]))
            asyncio.run(ts.get("a", inplace_tensor=target["a"]))

        return fill

    def torchstore_slice(self, value: Value) -> Fill:
        spec = ts.TensorSlice((0, 0), (0,), SHAPE, SHAPE, (1,))
        asyncio.run(ts.put("odd", value["odd"]))

        def fill(target: Value) -> None:
            asyncio.run(ts.get("odd", inplace_tensor=target["odd"], tensor_slice_spec=spec))
            target["a"].copy_(value["a"])

        return fill

    def torchstore_leaf(self, value: Value) -> Fill:
        asyncio.run(ts.put_state_dict(value, "value"))

        def fill(target: Value) -> None:
            asyncio.run(ts.get("value/odd", inplace_tensor=target["odd"]))
            asyncio.run(ts.get("value/a", inplace_tensor=target["a"]))

        return fill

    def torchstore_dict(self, value: Value) -> Fill:
        asyncio.run(ts.put_state_dict(value, "value"))
        return lambda target: asyncio.run(ts.get_state_dict("value", target))

    def torchstore_common(self, value: Value) -> Fill:
        asyncio.run(ts.put_state_dict(value, "value"))
        return lambda target: asyncio.run(ts.get_state_dict("value", target, strict=False))

    def torchstore_cast(self, value: Value) -> Fill:
        wider = {name: one.to(torch.float64) if one.is_floating_point() else one for name, one in value.items()}
        asyncio.run(ts.put_state_dict(wider, "value"))
        return lambda target: asyncio.run(ts.get_state_dict("value", target))


CALLS = [name for name in vars(Place) if not name.startswith("_")]


def outcome(fill: Fill, target: Value, want: Value) -> str:
    """What a call does with a target: "filled", "refused", or what is wrong."""
    before = {name: shown(tensor) for name, tensor in target.items()}

    def untouched() -> bool:
        now = {name: shown(tensor) for name, tensor in target.items()}
        return all((now[name] is None and before[name] is None) or torch.equal(now[name], before[name]) for name in now)

    try:
        found = fill(target)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        refused: BaseException = cause
    except Exception as error:
        refused = error
    else:
        now = found if isinstance(found, dict) else target
        for name, tensor in want.items():
            got = shown(now[name])
            if got is None or not torch.equal(got, tensor):
                return f"returned, {name} is {'untouched' if untouched() else 'wrong'}"
        return "filled" if all(now[name] is target[name] for name in want) else "replaced"
    text = f"{type(refused).__name__}: {str(refused)[:300]}"
    if not isinstance(refused, (StructureMismatchError, ReadOnlyError)):
        return f"bare {text}"
    if "odd" not in f"{refused.key} {refused}":
        return f"nameless {text}"
    return "refused" if untouched() else f"half-way {text}"


def pairs(dtype: torch.dtype, odd: Any) -> tuple[Value, Value]:
    want = {"a": stored(dtype) + 1, "odd": stored(dtype)}
    return want, {"a": torch.full(SHAPE, BEFORE, dtype=dtype), "odd": odd}
