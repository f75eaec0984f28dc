"""What is measured. Each module has `measure(session) -> Workload`, its goals and the peers it is compared with.

`long` takes the minutes too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from tests.benchmarks.report import Workload

# In the order of the report.
WORKLOADS = {
    "small": "put and get of a 1 KiB tensor",
    "dict300": "put and get of a state_dict of 300 tensors",
    "large-warm": "put of a large tensor, again and again under one key",
    "cast": "put of a large tensor with dtype=bfloat16, again and again under one key",
    "large-fresh": "first put of a large tensor, and its huge pages",
    "large-get": "get of a large tensor: the call alone, until summed, and by size",
    "put-by-size": "bandwidth of a put by size: new files, and files used again",
    "slice": "256 KiB out of a tensor of 1 GiB, stored whole and as 16 shards",
    "view": "view of 300 leaves, and lazy slices of them",
    "row": "rows of a view and of a memory map, one by one",
    "gather-warm": "256 random rows out of 100,000, in memory",
    "gather-cold": "the same, their pages dropped: from the disk",
    "dataset": "rows written into a dataset: in place, and behind the others",
    "dataloader": "an epoch of stored rows, by the workers of a DataLoader",
    "replay": "replay buffers that some processes fill while another samples them",
    "replay-write": "batches and single rows written into replay buffers",
    "replay-priorities": "256 of 1,000,000 rows by their priorities",
    "keys": "get, put and listing among 100, 10,000 and 1,000,000 keys",
    "readers": "1 to 64 processes that read a key while it is overwritten",
    "reshard": "1 GiB of DTensors from 4 ranks to 2 of another mesh",
    "follow": "weights of 4 ranks, followed by 2 ranks of another mesh",
    "engine": "a trainer's weights, copied into the model of a worker that serves it",
    "torchstore": "a script for TorchStore, with its import changed and with TorchStore",
    "remote-small": "1 KiB and 64 KiB between two hosts",
    "remote": "large values, slices and state_dicts of another host",
    "broadcast": "one value for eight hosts at once, and what its host sends",
    "remote-rdma": "large values of another host through Monarch's RDMABuffer",
    "served": "a served root's own keys, and lookups after an index process was killed",
    "replicated": "puts whose values lie on two hosts, beside one transfer",
    "snapshot": "a state_dict of 1 GiB saved and restored, at once and asynchronously",
    "dcp": "checkpoints of torch.distributed.checkpoint, and 64 rows out of a tensor of 1 GiB",
    "dcp-cold": "the same, their pages dropped: loaded from the disk",
    "convert": "checkpoints converted from one format to another, beside a copy of the file",
    "buckets": "a state_dict of 1 GiB put into a bucket, parts of it read, and increments",
    "wake": "wait() in another process: from the put to the wake",
    "aio": "calls that tasks await, and a thousand waits at once",
    "deferred": "modules without memory: recorded, and their weights out of a snapshot",
    "memory": "what held gets and a large put add to a process",
    "start": "import, open and the first get of a new process",
}

# By themselves only: `python -m tests.benchmarks long --minutes 10`.
LONG = {"long": "minutes of overwrites with a reader that holds versions: does anything grow?"}


def load(id: str) -> Callable[..., Workload]:
    """A workload's `measure`; imported when asked for, so that `--list` needs nothing installed."""
    return importlib.import_module(f"tests.benchmarks.workloads.{id.replace('-', '_')}").measure
