"""Deferred modules on real ranks: FSDP2, tensor parallel, DDP, collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstore
from tests.ranks import deferred
from tests.ranks.launcher import Ranks


@pytest.mark.parametrize("source", ["replayed", "snapshot"])
def test_a_module_is_sharded_by_fsdp_before_it_is_made(ranks2: Ranks, source: str, tmp_path: Path) -> None:
    path = None
    if source == "snapshot":
        path = str(tmp_path / "s")
        memstore.Snapshot.take(path, {"model": deferred.seeded(deferred.net)})
    ranks2.run(deferred.train_fully_sharded, path)


def test_a_module_is_made_parallel_before_it_is_made(ranks2: Ranks) -> None:
    ranks2.run(deferred.parallelize)


@pytest.mark.parametrize("source", ["replayed", "snapshot"])
def test_a_module_is_made_parallel_and_sharded_before_it_is_made(ranks4: Ranks, source: str, tmp_path: Path) -> None:
    path = None
    if source == "snapshot":
        path = str(tmp_path / "s")
        memstore.Snapshot.take(path, {"model": deferred.seeded(deferred.block)})
    ranks4.run(deferred.parallelize_and_shard, path)


def test_what_is_done_with_deferred_dtensors_is_an_error(ranks2: Ranks) -> None:
    ranks2.run(deferred.change_what_is_distributed)


def test_ddp_refuses_a_deferred_module_and_takes_it_afterwards(ranks2: Ranks) -> None:
    ranks2.run(deferred.replicate)


def test_collectives_are_refused_by_name(ranks2: Ranks) -> None:
    ranks2.run(deferred.collectives)
