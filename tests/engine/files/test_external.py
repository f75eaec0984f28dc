"""External files in one range of addresses."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from memstore.engine import syscalls
from memstore.engine.files import mapping
from memstore.engine.files.mapping import ExternalFiles, map_external
from memstore.engine.format.records import ExternalExtent, decode_external
from memstore.errors import CorruptionError, UnsupportedValueError
from tests.leaks import mapped_files
from tests.support.faults import at_step, raising, record


def sources_of(folder: Path, sizes: list[int]) -> ExternalFiles:
    found = ExternalFiles()
    for i, size in enumerate(sizes):
        path = folder / f"{i}"
        path.write_bytes(bytes([i + 1]) * size)
        found.add(str(path), path.stat())
    return found


SIZES = [1, 4095, 4096, 4097, 70_000, (2 << 20) + 3, 5]


def test_each_file_lies_from_its_base_on(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, SIZES)
    files = decode_external(sources.encode())
    found = map_external(files)
    memory = np.asarray(found)
    for i, file in enumerate(files):
        assert bytes(memory[file.base : file.base + file.size]) == bytes([i + 1]) * SIZES[i]
        assert file.base % 4096 == 0
        assert mapping.lies_in_mapping(memory[file.base :].__array_interface__["data"][0])
    large = files[5]
    assert (memory.__array_interface__["data"][0] + large.base) % syscalls.HUGE_PAGE == 0
    address = found.address  # type: ignore[union-attr]
    part = memory[files[3].base :][:10]
    del found, memory
    gc.collect()
    assert len(set(mapped_files(str(tmp_path)))) == len(SIZES)
    del part
    gc.collect()
    assert mapped_files(str(tmp_path)) == []
    assert not mapping.lies_in_mapping(address)


def test_an_error_halfway_unmaps_all(tmp_path: Path) -> None:
    files = sources_of(tmp_path, SIZES).files
    steps = record(lambda: map_external(files))
    gc.collect()
    before = set(mapping._live)
    for number in range(1, len(steps) + 1):
        if steps[number - 1] in ("close", "close_all"):
            continue
        with at_step(number, raising(OSError(5, "injected"))), pytest.raises(OSError):
            map_external(files)
        gc.collect()
        assert mapped_files(str(tmp_path)) == []
        assert not [name for name in _open_files() if name.startswith(str(tmp_path))]
    assert set(mapping._live) <= before  # of other tests


def _open_files() -> list[str]:
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize(
    "files",
    [
        [("a", 10, 0, 0, 4096), ("b", 10, 0, 0, 0)],
        [("a", 5000, 0, 0, 0), ("b", 10, 0, 0, 4096)],
        [("a", 10, 0, 0, 0), ("b", 10, 0, 0, 100)],
        [("a", 10, 0, 0, -4096)],
        [("a", 0, 0, 0, 0)],
        [("a", -1, 0, 0, 0)],
        [("a", 1 << 47, 0, 0, 0)],
        [("a", 10, 0, 0, 1 << 60)],
    ],
)
def test_records_that_nobody_wrote_are_refused(files: list[tuple[str, int, int, int, int]]) -> None:
    import msgspec

    with pytest.raises(CorruptionError):
        decode_external(msgspec.msgpack.encode([ExternalExtent(*file) for file in files]))
    with pytest.raises(CorruptionError):
        decode_external(b"\xc1")


def test_there_are_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MOST_FILES", 3)
    with pytest.raises(UnsupportedValueError, match="limit"):
        sources_of(tmp_path, [1, 1, 1, 1])
    large = tmp_path / "large"
    large.touch()
    status = list(large.stat())
    status[6] = 1 << 62
    with pytest.raises(UnsupportedValueError, match="can be mapped"):
        ExternalFiles().add(str(large), os.stat_result(status))
    with pytest.raises(UnsupportedValueError, match="UTF-8"):
        ExternalFiles().add("\udcff", large.stat())
