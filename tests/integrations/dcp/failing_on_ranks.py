"""Calls of a storage that fail on one rank of several, as functions that the tests call on ranks."""

from __future__ import annotations

import errno
import glob
import resource
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.futures import Future

from memstore.integrations import dcp
from memstore.integrations.dcp import StorageReader, StorageWriter
from tests.integrations.dcp.on_ranks import load_rows, opened, rows, save_rows
from tests.integrations.dcp.states import save


class Failure(NamedTuple):
    """Which call fails on which rank, and who coordinates. `late`: the error is in the future that the call returns."""

    call: str
    rank: int
    coordinator: int = 0
    late: bool = False


SAVES = [
    Failure("set_up_storage_writer", 0),
    Failure("prepare_local_plan", 1),
    Failure("prepare_global_plan", 0),
    Failure("write_data", 2),
    Failure("write_data", 3, late=True),
    Failure("finish", 0),
    Failure("set_up_storage_writer", 1, coordinator=1),
    Failure("write_data", 0, coordinator=3),
    Failure("finish", 1, coordinator=1),
]
LOADS = [
    Failure("read_metadata", 0),
    Failure("read_metadata", 3, coordinator=1),
    Failure("set_up_storage_reader", 0),
    Failure("prepare_local_plan", 1),
    Failure("prepare_global_plan", 2, coordinator=2),
    Failure("read_data", 3),
    Failure("read_data", 0, coordinator=2),
    Failure("read_data", 2, coordinator=3, late=True),
]


def _failing(kind: Any, failure: Failure) -> Any:
    real = getattr(kind, failure.call)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() != failure.rank:
            return real(self, *arguments, **options)
        error = ArithmeticError(f"in {failure.call}")
        if not failure.late:
            raise error
        future: Any = Future()
        future.set_exception(error)
        return future

    return type(kind.__name__, (kind,), {failure.call: call})


def _told(function: Any, failure: Failure) -> list[tuple[int, bool]]:
    """Of which ranks torch tells errors, and whether these are the ones that the call raised there."""
    try:
        function(coordinator_rank=failure.coordinator)
    except CheckpointException as error:
        return sorted((rank, f"in {failure.call}" in str(one[0])) for rank, one in error.failures.items())
    return []


def fail_saves(place: str, key: str | None) -> list[tuple[list[tuple[int, bool]], float]]:
    """What torch tells of each save that fails, and what the checkpoint has after it."""
    source = opened(place, key)
    save_rows(place, key, 1.0)
    found: list[tuple[list[tuple[int, bool]], float]] = []
    for failure in SAVES:
        writer = _failing(StorageWriter, failure)(source, key=key)
        state = {"w": rows(2.0)}
        told = _told(partial(state_dict_saver._save_state_dict, state, writer), failure)
        found.append((told, load_rows(place, key)))
    save_rows(place, key, 3.0)
    assert load_rows(place, key) == 3.0
    return found


def fail_loads(place: str, key: str | None) -> list[tuple[list[tuple[int, bool]], float]]:
    """What torch tells of each load that fails, and what the next one gives."""
    source = opened(place, key)
    save_rows(place, key, 1.0)
    found: list[tuple[list[tuple[int, bool]], float]] = []
    for failure in LOADS:
        reader = _failing(StorageReader, failure)(source, key=key)
        state = {"w": rows(0.0)}
        told = _told(partial(state_dict_loader._load_state_dict, state, reader), failure)
        found.append((told, load_rows(place, key)))
    return found


@contextmanager
def _small_files() -> Generator[None]:
    """This process may write no files that have more than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_again_and_again(place: str) -> tuple[list[str], list[int]]:
    """Which errors saves have on rank 2, that has no room, and how many files are there after each; then one succeeds.

    The errors are kept, as in an `except` clause: by their tracebacks they refer to the writers.
    """
    errors: list[CheckpointException] = []
    there: list[int] = []
    for _ in range(3):
        try:
            if dist.get_rank() == 2:
                with _small_files():
                    save({"w": rows(2.0)}, StorageWriter(place))
            else:
                save({"w": rows(2.0)}, StorageWriter(place))
        except CheckpointException as error:
            errors.append(error)
        there.append(len(glob.glob(f"{place}/*.safetensors")))
        dist.barrier()
    save_rows(place, None, 3.0)
    return [f"{rank}: {type(one[0]).__name__}" for error in errors for rank, one in error.failures.items()], there


def save_in_vain(path: str, failing: int) -> bool:
    """memstore's own call, whose bytes one rank can't write. Returns whether the error arrived."""
    place = "memstore.integrations.dcp.places.write_boxes"

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch(place, fail) if dist.get_rank() == failing else nullcontext():
        try:
            dcp.save({"w": rows(1.0)}, checkpoint_id=path)
        except CheckpointException:
            dist.barrier()
            return True
    return False
