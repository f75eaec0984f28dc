"""A script: a dataset and a replay buffer go to an actor as arguments, are written there, and rows come back."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from monarch.actor import Actor, endpoint, shutdown_context, this_host

import memstore


class Writer(Actor):
    @endpoint
    def write(self, data: memstore.Dataset, buffer: memstore.ReplayBuffer) -> tuple[int, Any]:
        """Returns its process, and rows of the dataset, which travel as a copy."""
        data[2:4] = {"x": torch.full((2, 3), 7.0)}
        data.extend({"x": torch.full((1, 3), 8.0)})
        buffer.extend({"x": torch.full((5, 3), 9.0)})
        return os.getpid(), data[2:4]


def main(root: str) -> None:
    with memstore.open(root) as store:
        spec = {"x": ((3,), torch.float32)}
        data = store.create_dataset("data", spec, capacity=10)
        data.extend({"x": torch.zeros(4, 3)})
        buffer = memstore.ReplayBuffer(store, "replay", spec=spec, capacity=10)
        writer = this_host().spawn_procs(per_host={"procs": 1}).spawn("writer", Writer)
        pid, sent = writer.write.call_one(data, buffer).get()
        assert pid != os.getpid()
        assert data[:]["x"][:, 0].tolist() == [0, 0, 7, 7, 8]
        assert len(buffer) == 5 and buffer.sample(8)["x"].unique().tolist() == [9]
        sent["x"].zero_()
        assert data[2]["x"].tolist() == [7, 7, 7]
        print("as it should be")
    shutdown_context().get()


if __name__ == "__main__":
    main(sys.argv[1])
