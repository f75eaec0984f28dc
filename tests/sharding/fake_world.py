"""Ranks of torch.distributed without others: its "fake" backend, one rank after the other in one process."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, world_size: int) -> Generator[None]:
    """For a child process: torch keeps much of a process group that is gone."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def each_rank(world_size: int) -> Iterator[int]:
    for rank in range(world_size):
        with as_rank(rank, world_size):
            yield rank
