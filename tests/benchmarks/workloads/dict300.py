"""A state_dict of 300 tensors of 64x64 float32 (4.7 MiB): the cost of a leaf."""

from __future__ import annotations

import torch

from tests.benchmarks.peers.limits import Memcpy, PlainFile
from tests.benchmarks.peers.memmap import Memmap, MemmapArchive, MemmapUpdate
from tests.benchmarks.peers.ray_objects import RayObjects
from tests.benchmarks.peers.redis_server import RedisServer
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store, StoreOfTensorDicts, StoreThatVerifies
from tests.benchmarks.peers.torch_queue import TorchQueue
from tests.benchmarks.peers.torch_save import TorchSave
from tests.benchmarks.report import Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most, check, compare_gets, compare_puts, times_faster

STORES = (Store, StoreOfTensorDicts, StoreThatVerifies)
OTHERS = (Memmap, MemmapArchive, SafetensorsFile, TorchSave, TorchQueue, RedisServer, RayObjects, PlainFile)


def measure(session: Session) -> Workload:
    value = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(300)}
    with session.started((*STORES, *OTHERS, MemmapUpdate, Memcpy)) as (started, absent):
        stored = [peer for peer in started if not isinstance(peer, MemmapUpdate | Memcpy)]
        in_place = [peer for peer in started if isinstance(peer, MemmapUpdate)]
        copied = [peer for peer in started if isinstance(peer, Memcpy)]
        check(stored, value)
        put = compare_puts(session, stored + copied, value, fresh=True, title="put of 300 tensors, new key")
        overwritten = stored + in_place + copied
        overwrite = compare_puts(session, overwritten, value, fresh=False, title="put of 300 tensors, same key")
        get = compare_gets(session, stored, value, title="get of 300 tensors")
        check(stored, value)
    return Workload(
        id="dict300",
        title="A state_dict of 300 tensors",
        text="300 tensors of 64x64 float32 (4.7 MiB), put under new keys and again under one key, and got. memstore "
        "takes a dict and, in a second row, a TensorDict; in a third it writes checksums and compares them. The peers "
        "take what they take. Before each put under a new key the value before it is removed and its space given "
        "back; a put under the same key uses a file again.",
        series=[get, put, overwrite],
        goals=[
            *times_faster("get of 300 tensors", get, 20, [Memmap.name]),
            *times_faster("put of 300 tensors, new key", put, 10, [Memmap.name]),
            at_most("put of 300 tensors, same key", overwrite, 1.8, Memcpy.name),
            at_most("the same as a TensorDict", overwrite, 1.8, Memcpy.name, name=StoreOfTensorDicts.name),
        ],
        absent=absent,
    )
