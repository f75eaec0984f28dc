"""Shared memory without a name: what one process writes there, those that have its descriptor read."""

from __future__ import annotations

import os

import pytest

from memstore.engine import SharedMemory, syscalls
from tests.children import in_child


@pytest.mark.parametrize("size", [1, syscalls.PAGE, syscalls.HUGE_PAGE + 1])
def test_two_processes_have_the_same_bytes(size: int) -> None:
    memory = SharedMemory(size)
    memory.populate(0, size)
    memory.allocate()
    assert syscalls.status(memory.fd).st_blocks * 512 >= size
    memory.bytes[-1] = 7
    assert in_child(read_and_write, memory.fd) == 7
    assert memory.bytes[-1] == 8
    assert memory.make_huge(0, size) in (0, size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE)
    assert memory.bytes[-1] == 8


def read_and_write(fd: int) -> int:
    memory = SharedMemory(fd=os.dup(fd))
    found = memory.bytes[-1]
    memory.bytes[-1] = 8
    return found


def test_memory_goes_with_the_last_reference() -> None:
    memory = SharedMemory(syscalls.PAGE)
    fd, address = memory.fd, memory.address
    identity = os.fstat(fd).st_ino
    del memory
    with open("/proc/self/maps") as file:
        assert not any(line.startswith(f"{address:x}-") and f" {identity} " in line for line in file)


def test_more_than_there_are_addresses_is_an_error() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        SharedMemory(1 << 60)
    assert len(os.listdir("/proc/self/fd")) <= before
