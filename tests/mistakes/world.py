"""What the mistakes of the tables are made with: a store, and what lies in it. Each name is one of the tables' code."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import memstore
import memstore.aio
from memstore.convert import convert
from memstore.dataloader import BlockShuffle, StoreDataset
from memstore.deferred_init import deferred_init, materialize_module, materialize_tensor
from memstore.fake import fake_mode, meta_like
from memstore.integrations import dcp, torchstore

ROWS = {"x": ((2,), torch.float32), "done": ((), torch.bool)}


def make(path: str) -> dict[str, Any]:
    """The names, over stores in `path/store` and `path/small`, and files beside them."""
    Path(path).mkdir()
    store = memstore.open(f"{path}/store", timeout=2.0)
    small = memstore.open(f"{path}/small", capacity="1MiB")
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2)
    store.put("policy", OrderedDict(w=torch.ones(512, 4), b=torch.zeros(4)))
    store.put("policy/old", {"w": torch.zeros(512, 4)})
    store.put("model", module.state_dict())
    store.put("step", 3)
    store.put("seed", 7)
    store.put("note", {"text": "a", "x": torch.ones(2)})
    frames = store.create_dataset("frames", ROWS, capacity=8)
    frames.extend({"x": torch.ones(3, 2), "done": torch.zeros(3, dtype=torch.bool)})
    replay = memstore.ReplayBuffer(store, "replay", ROWS, capacity=8)
    shard = memstore.TensorShard(torch.ones(1, 4), global_shape=(2, 4), offsets=(0, 0))
    store.put_sharded("halves", shard, attempt="first", rank=0, world_size=2, wait=False)
    store.save_model("linear", module)
    snapshot = memstore.Snapshot.take(f"{path}/step-1", {"model": module, "progress": memstore.StateDict(step=1)})
    closed = memstore.open(f"{path}/store")
    closed.close()
    _write_files(path)
    return {
        "memstore": memstore,
        "torch": torch,
        "np": np,
        "asyncio": asyncio,
        "pickle": pickle,
        "threading": threading,
        "Path": Path,
        "TensorDict": TensorDict,
        "path": path,
        "store": store,
        "small": small,
        "reader": memstore.open(f"{path}/store", "r"),
        "closed": closed,
        "empty": memstore.open(f"{path}/empty"),
        "view": store.view("policy"),
        "frames": frames,
        "replay": replay,
        "shard": shard,
        "ROWS": ROWS,
        "module": module,
        "larger": torch.nn.Linear(8, 2),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "snapshot": snapshot,
        "awaited": awaited,
        "convert": convert,
        "dcp": dcp,
        "torchstore": torchstore,
        "deferred_init": deferred_init,
        "materialize_module": materialize_module,
        "materialize_tensor": materialize_tensor,
        "fake_mode": fake_mode,
        "meta_like": meta_like,
        "StoreDataset": StoreDataset,
        "BlockShuffle": BlockShuffle,
    }


def _write_files(path: str) -> None:
    torch.save({"w": torch.ones(2)}, f"{path}/weights.pt")
    Path(f"{path}/notes.txt").write_text("no tensors in here\n")
    Path(f"{path}/cut.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    np.save(f"{path}/objects.npy", np.array([{"a": 1}], dtype=object))
    Path(f"{path}/pickled.pkl").write_bytes(pickle.dumps({"a": 1}))
    Path(f"{path}/folder").mkdir()
    Path(f"{path}/folder/file").touch()
    Path(f"{path}/of-torch").mkdir()
    Path(f"{path}/of-torch/.metadata").touch()  # a checkpoint, as far as it is looked at
    Path(f"{path}/spoiled").mkdir(mode=0o700)
    Path(f"{path}/spoiled/memstore.json").write_text("{}")


def awaited(path: str, call: Callable[[memstore.aio.AsyncStore], Coroutine[Any, Any, Any]], mode: str = "a") -> Any:
    """What a task gets of its call of a store."""

    async def run() -> Any:
        async with memstore.aio.open(f"{path}/store", mode) as store:
            return await call(store)

    return asyncio.run(run())


def close(names: dict[str, Any]) -> None:
    for name in ("frames", "replay", "view"):
        names.pop(name)
    for name in ("store", "small", "reader", "empty"):
        names.pop(name).close()
