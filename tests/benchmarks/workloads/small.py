"""One tensor of 1 KiB: the fixed cost of a call."""

from __future__ import annotations

import torch

from tests.benchmarks.peers.limits import BareLmdb
from tests.benchmarks.peers.memmap import Memmap, MemmapArchive
from tests.benchmarks.peers.ray_objects import RayObjects
from tests.benchmarks.peers.redis_server import RedisServer
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store
from tests.benchmarks.peers.torch_queue import TorchQueue
from tests.benchmarks.peers.torch_save import TorchSaveRead
from tests.benchmarks.report import Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import check, compare_gets, compare_puts, times_faster

PEERS = (Store, Memmap, MemmapArchive, SafetensorsFile, TorchSaveRead, TorchQueue, RedisServer, RayObjects, BareLmdb)


def measure(session: Session) -> Workload:
    value = torch.randn(256)
    with session.started(PEERS) as (peers, absent):
        check(peers, value)
        put = compare_puts(session, peers, value, fresh=True, title="put of 1 KiB, new key")
        overwrite = compare_puts(session, peers, value, fresh=False, title="put of 1 KiB, same key")
        get = compare_gets(session, peers, value, title="get of 1 KiB")
        check(peers, value)
    return Workload(
        id="small",
        title="A tensor of 1 KiB",
        text="256 float32, put under new keys and again under one key, and got. Each peer serves other processes too.",
        series=[get, put, overwrite],
        goals=[
            *times_faster("get of 1 KiB", get, 15, [SafetensorsFile.name]),
            *times_faster("put of 1 KiB, new key", put, 3, [SafetensorsFile.name]),
            *times_faster("put of 1 KiB, same key", overwrite, 3, [SafetensorsFile.name]),
        ],
        absent=absent,
    )
