"""What owns file descriptors and mappings of a process is neither pickled nor copied: a copy would close them too."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from memstore.distributed.transfers.transfers import Pinned
from memstore.engine import LockFile, OwnedFile, SharedMemory, syscalls
from memstore.engine.files.mapping import map_file
from memstore.engine.sync.primitives import SharedPage
from memstore.engine.syscalls import Cleanup
from tests.support.fork_server import Worker

COPIES: list[Callable[[Any], Any]] = [pickle.dumps, copy.copy, copy.deepcopy]


def mapping(path: str) -> Any:
    """One that keeps its file open."""
    fds: list[int] = []
    closing = Cleanup(syscalls.drain, (map(os.close, fds),))
    syscalls.open_into(fds, path, os.O_RDONLY)
    return map_file(fds[0], syscalls.PAGE, closing)


MADE: dict[str, Callable[[str], Any]] = {
    "a file": lambda path: OwnedFile(path, os.O_RDONLY),
    "a file to be locked": lambda path: LockFile(path, os.O_RDWR),
    "shared memory": lambda path: SharedMemory(syscalls.PAGE),
    "a page": SharedPage,
    "a mapping's cleanup": lambda path: mapping(path)._cleanup,
    "what other hosts keep": lambda path: Pinned(),
    "a worker": lambda path: Worker(0, Pipe()[0], *(os.open(path, os.O_RDONLY) for _ in range(2))),
}


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("copied", COPIES, ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_it_refuses_and_its_file_stays_open(
    tmp_path: Path, made: Callable[[str], Any], copied: Callable[[Any], Any]
) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(syscalls.PAGE))
    owner = made(str(path))
    before = open_files()
    with pytest.raises(TypeError, match="can't be pickled or copied"):
        copied(owner)
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_mapping_is_shared_by_shallow_copies_only(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"7" * syscalls.PAGE)
    mapped = mapping(str(path))
    with pytest.raises(TypeError, match="can't be pickled or copied"):
        copied(mapped)
    other = copy.copy(mapped)
    del mapped
    assert bytes(other.view()[:2]) == b"77"
