"""Mappings of files: they go with the last reference to them, whatever comes between, and never before."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from memstore.engine import syscalls
from memstore.engine.files.mapping import Mapping, lies_in_mapping, map_file
from memstore.engine.syscalls import buffer_address
from tests.engine.files.interrupts import interrupted
from tests.leaks import mapped_files

SIZE = 5 << 20


@pytest.fixture
def path(scratch: str) -> Iterator[str]:
    os.mkdir(scratch)
    with open(f"{scratch}/file", "wb") as file:
        file.write(b"7" * SIZE)
    yield f"{scratch}/file"
    shutil.rmtree(scratch)


def mapped(path: str, size: int = SIZE) -> Mapping:
    with open(path, "rb") as file:
        return map_file(file.fileno(), size)


def count(path: str) -> int:
    return len(mapped_files(os.path.dirname(path)))


@pytest.mark.parametrize("size", [1, syscalls.PAGE, syscalls.HUGE_PAGE - 1, syscalls.HUGE_PAGE, SIZE])
def test_the_last_array_unmaps_it(path: str, size: int) -> None:
    array = np.asarray(mapped(path, size))
    assert array.shape == (size,) and (array == ord("7")).all()
    part = array[size // 2 :].reshape(-1, 1)
    del array
    gc.collect()
    assert count(path) == 1 and part[-1] == ord("7")
    del part
    assert count(path) == 0


@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
def test_an_interrupt_at_any_point_loses_none(path: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may raise before each instruction; so does a tracer, and at no other places."""

    def use() -> None:
        array = np.asarray(mapped(path))
        assert array[0] == ord("7")
        del array

    use()
    held = [mapped(path)] if taken else []
    points = 0
    while interrupted(use, points):
        assert count(path) == len(held), f"at point {points}"
        for mapping in held:
            monkeypatch.setattr(syscalls, "_hints", [mapping.address + SIZE, 0])
        points += 1
    assert points > 100, "few points: this tests nothing"


class Revived:
    """Comes back to life when a collection is about to free it."""

    last: Revived | None = None

    def __init__(self, mapping: Mapping) -> None:
        self.mapping: Mapping | None = mapping
        self.itself = self

    def __del__(self) -> None:
        Revived.last = self


def test_a_collection_unmaps_nothing_that_comes_back_to_life(path: str) -> None:
    Revived(mapped(path))
    gc.collect()
    revived, Revived.last = Revived.last, None
    assert revived is not None and count(path) == 1
    assert np.asarray(revived.mapping)[-1] == ord("7")
    revived.mapping = None
    assert count(path) == 0


def test_it_is_aligned_wherever_others_lie(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel maps huge pages only there."""
    held = [mapped(path) for _ in range(3)]
    for taken in held:
        monkeypatch.setattr(syscalls, "_hints", [taken.address + SIZE, 0])
        assert syscalls._hint(SIZE) == taken.address
        monkeypatch.setattr(syscalls, "_hints", [taken.address + SIZE, 0])
        held.append(mapped(path))
        if len(held) == 6:
            break
    assert all(mapping.address % syscalls.HUGE_PAGE == 0 for mapping in held)
    assert len({mapping.address for mapping in held}) == 6 == count(path)


def test_mappings_stay_in_one_part_of_the_address_space(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hole = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # elsewhere, others may have mapped something
    lowest = buffer_address(hole)
    monkeypatch.setattr(syscalls, "_hints", [lowest + len(hole), lowest])
    hole.close()
    first, second = mapped(path), mapped(path)
    assert lowest <= second.address < first.address < lowest + (64 << 20)
    del first, second
    lowest = syscalls._hints[0]
    monkeypatch.setattr(syscalls, "_hints", [lowest, lowest])
    again = mapped(path).address
    assert again > lowest and again % syscalls.HUGE_PAGE == 0
    assert syscalls._hints[1] < again


def test_a_failure_maps_nothing(path: str) -> None:
    """Of a size that no address space has, of no file, of a file that can't be mapped."""
    read_end, write_end = os.pipe()
    with open(path, "rb") as file:
        for fd, size in ((file.fileno(), 1 << 60), (file.fileno(), 0), (-1, 1), (-1, SIZE), (read_end, SIZE)):
            with pytest.raises(OSError, match=r"Errno|mmap"):
                map_file(fd, size)
    os.close(read_end)
    os.close(write_end)
    assert count(path) == 0


def test_it_is_known_as_long_as_it_lives(path: str) -> None:
    mapping = mapped(path)
    address = mapping.address
    assert lies_in_mapping(address) and lies_in_mapping(address + SIZE - 1)
    assert not lies_in_mapping(address + SIZE) and not lies_in_mapping(address - 1)
    del mapping
    assert not lies_in_mapping(address)


def test_one_that_lives_until_the_end_is_no_trouble(path: str) -> None:
    """Others' finalizers may read it then."""
    code = """if True:
        import os, sys
        import numpy as np
        from memstore.engine.files.mapping import map_file

        class Last:
            def __init__(self, array):
                self.array = array
            def __del__(self, write=os.write):
                write(1, self.array[-1:].tobytes())

        with open(sys.argv[1], "rb") as file:
            array = np.asarray(map_file(file.fileno(), int(sys.argv[2])))
        last, sys.last_of_all = Last(array[:3]), Last(array)
    """
    done = subprocess.run([sys.executable, "-c", code, path, str(SIZE)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "77", "")
