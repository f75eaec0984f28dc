"""Deferred modules on real ranks: FSDP2, tensor parallel, DDP, collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import memstore
from tests.ranks import deferred
from tests.ranks.launcher import Ranks


def path_of(source: str, make: Callable[[], nn.Module], folder: Path) -> str | None:
    if source == "replayed":
        return None
    memstore.Snapshot.take(folder / "s", {"model": deferred.seeded(make)})
    return str(folder / "s")


@pytest.mark.parametrize("source", ["replayed", "snapshot"])
def test_a_module_is_sharded_by_fsdp_before_it_is_made(ranks2: Ranks, source: str, tmp_path: Path) -> None:
    ranks2.run(deferred.train_fully_sharded, path_of(source, deferred.net, tmp_path))


def test_a_module_is_made_parallel_before_it_is_made(ranks2: Ranks) -> None:
    ranks2.run(deferred.parallelize)


@pytest.mark.parametrize("source", ["replayed", "snapshot"])
def test_a_module_is_made_parallel_and_sharded_before_it_is_made(ranks4: Ranks, source: str, tmp_path: Path) -> None:
    ranks4.run(deferred.parallelize_and_shard, path_of(source, deferred.block, tmp_path))


def test_what_is_done_with_deferred_dtensors_is_an_error(ranks2: Ranks) -> None:
    ranks2.run(deferred.change_what_is_distributed)


def test_ddp_refuses_a_deferred_module_and_takes_it_afterwards(ranks2: Ranks) -> None:
    ranks2.run(deferred.replicate)


def test_collectives_are_refused_by_name(ranks2: Ranks) -> None:
    ranks2.run(deferred.collectives)
