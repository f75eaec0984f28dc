"""Conversions that are killed, meet a full disk, a faulty one, or one another: the target is whole, or not there."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest
import torch

import memstore
from memstore.convert import convert
from memstore.engine import syscalls
from tests.children import in_child
from tests.convert.values import FLAT, read, weights, write
from tests.small_tmpfs import free_bytes, on_small_tmpfs
from tests.support import faults
from tests.support.equality import assert_same


def steps(format: str) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write(f"{folder}/source.pt", "torch", weights())
        return faults.record(lambda: convert(f"{folder}/source.pt", f"{folder}/target", target_as=format))


def _die_after(folder: str, format: str, step: int) -> None:
    with faults.at_step(step, faults.die, after=True):
        convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)


def check_whats_left(folder: str, format: str) -> None:
    """The whole target, or none; then the next conversion works, and nothing else is left."""
    if os.path.lexists(f"{folder}/target"):
        with pytest.raises(memstore.errors.AlreadyExistsError):
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
    else:
        convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
        assert sorted(os.listdir(folder)) == ["source.pt", "target"]
    found = read(f"{folder}/target", format)
    assert_same(weights(), {name: found[name] for name in weights()}, ties=False)


def kill(parent: str, format: str, step: int) -> None:
    """Kills a conversion after one of its steps: that is before the next one."""
    folder = f"{parent}/{step}"
    os.mkdir(folder)
    write(f"{folder}/source.pt", "torch", weights())
    with pytest.raises(RuntimeError, match="-9"):
        in_child(_die_after, folder, format, step)
    check_whats_left(folder, format)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_conversion_that_is_killed_at_a_step(folder: str, format: str) -> None:
    names = steps(format)
    published = max(i for i, name in enumerate(names) if name in ("link", "rename", "replace")) + 1
    for step in {2, len(names) // 2, published - 1, published}:
        kill(folder, format, step)


@pytest.mark.full
@pytest.mark.parametrize("format", FLAT)
def test_a_conversion_that_is_killed_at_every_step(folder: str, format: str) -> None:
    for step in range(1, len(steps(format)) + 1):
        kill(folder, format, step)


def test_what_was_written_is_synced_before_it_gets_its_name() -> None:
    names = steps("safetensors")
    published = max(i for i, name in enumerate(names) if name == "link")
    assert "sync" in names[:published] and "sync_folder" in names[published:]


def test_the_next_conversion_leaves_one_alone_that_still_runs(folder: str) -> None:
    """What another process fills is locked, and no leftover."""
    write(f"{folder}/source.pt", "torch", weights())
    seen: list[list[str]] = []

    def look_in_between(done: int, total: int) -> None:
        if not seen:
            seen.append(os.listdir(folder))
            in_child(convert, f"{folder}/source.pt", f"{folder}/target.safetensors")

    with pytest.raises(memstore.errors.AlreadyExistsError):
        convert(f"{folder}/source.pt", f"{folder}/target.safetensors", progress=look_in_between)
    assert len(seen[0]) == 2
    assert sorted(os.listdir(folder)) == ["source.pt", "target.safetensors"]
    assert len(read(f"{folder}/target.safetensors", "safetensors")) == len(weights())


def test_a_progress_that_raises_ends_the_conversion(folder: str) -> None:
    write(f"{folder}/source.pt", "torch", weights())

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for format in FLAT:
        with pytest.raises(KeyboardInterrupt):
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format, progress=stop)
        assert os.listdir(folder) == ["source.pt"]


def test_progress_ends_with_all(folder: str) -> None:
    write(f"{folder}/source.pt", "torch", weights())
    for format in FLAT:
        told: list[tuple[int, int]] = []
        done = convert(
            f"{folder}/source.pt",
            f"{folder}/{format}",
            target_as=format,
            progress=lambda *said, told=told: told.append(said),
        )
        assert told[-1] == (2 * done.nbytes, 2 * done.nbytes), format
        assert sorted(told) == told


# --- full and faulty disks --------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_leaves_nothing() -> None:
    on_small_tmpfs(12, _on_a_full_disk)


def _on_a_full_disk(folder: str) -> None:
    torch.save({"x": torch.ones(2 << 20)}, f"{folder}/source.pt")
    free = free_bytes(folder)
    for format in FLAT:
        with pytest.raises(memstore.StoreFullError, match="no room for") as caught:
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(folder) == ["source.pt"] and free_bytes(folder) == free, format


def test_a_disk_that_gives_back_other_bytes_is_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(f"{folder}/source.pt", "torch", weights())
    write_parts = syscalls.write_parts_at
    inside = weights()["w"].numpy().tobytes()[4000:4100]

    def faulty(fd: int, parts: list[memoryview], offset: int) -> None:
        joined = bytearray(b"".join(parts))
        at = joined.find(inside)
        if at >= 0:
            joined[at] ^= 1
        write_parts(fd, [memoryview(joined)], offset)

    monkeypatch.setattr(syscalls, "write_parts_at", faulty)
    for format in FLAT:
        with pytest.raises(memstore.CorruptionError, match="checksum"):
            convert(f"{folder}/source.pt", f"{folder}/target", target_as=format)
        assert os.listdir(folder) == ["source.pt"]


@pytest.mark.parametrize("step", ["sync", "truncate", "link", "make_folder"])
def test_a_step_that_fails_leaves_nothing(folder: str, step: str) -> None:
    write(f"{folder}/source.pt", "torch", weights())
    names = steps("safetensors")
    with faults.at_step(names.index(step) + 1, faults.raising(OSError(errno.EIO, "injected"))), pytest.raises(OSError):
        convert(f"{folder}/source.pt", f"{folder}/target", target_as="safetensors")
    assert os.listdir(folder) == ["source.pt"]
