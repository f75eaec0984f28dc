"""Tensors are copied for a snapshot in shared memory: exactly, into memory that is used again, and within bounds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memstore.errors import MemstoreError, ResourceLimitError, StoreTimeoutError, UnsupportedValueError
from memstore.snapshot import staging
from memstore.snapshot.staging import StagedTensors, StagingArea, container_limits, stage
from memstore.snapshot.storage import FileStorage
from memstore.snapshot.writer import PendingWrite, StagedFile
from tests.children import in_child

MIB = 1 << 20
IDLE = 60.0


@pytest.fixture
def folder(tmp_path: object) -> FileStorage:
    return FileStorage.create(f"{tmp_path}/snapshot", durable=False)


@pytest.fixture
def small() -> Iterator[StagingArea]:
    """One that stages 4 MiB at once."""
    made = StagingArea(limit=4 * MIB, idle=IDLE)
    yield made
    made.close()


def staged_bytes(staged: StagedTensors) -> list[bytes]:
    return [bytes(staged.memory[offset : offset + nbytes]) for offset, nbytes in staged.places]


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else b""


def write(staged: StagedTensors, folder: FileStorage, name: str = "file") -> PendingWrite:
    files = [StagedFile(name, b"header", staged.places)]
    return staged.write(folder.path, files, durable=False)


# --- what is copied ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))).to(dtype)
    kind = draw(st.sampled_from(["as is", "transposed", "expanded", "every second", "from the middle", "conj", "neg"]))
    if kind == "transposed" and made.dim() > 1:
        return made.transpose(0, -1)
    if kind == "expanded":
        return made.unsqueeze(0).expand(3, *made.shape)
    if kind == "every second" and made.dim():
        return made[::2]
    if kind == "from the middle" and made.dim() and made.shape[0] > 2:
        return made[1:-1]
    if kind == "conj" and dtype.is_complex:
        return made.conj()
    if kind == "neg" and dtype.is_complex:
        return made.conj().imag
    return made.requires_grad_() if kind == "as is" and dtype.is_floating_point and dtype.itemsize > 1 else made


@given(st.lists(tensors(), max_size=6))
@example([torch.zeros(3)[::2][:1]])
def test_the_elements_of_any_tensors_are_copied_in_order(values: list[torch.Tensor]) -> None:
    staged = StagingArea(limit=4 * MIB).stage(values)
    assert staged_bytes(staged) == [bytes_of(value) for value in values]


def test_large_tensors_are_copied_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_SHARE", 1000 * 1000)
    values = [torch.rand(size) for size in (70_000, 1, 300_000, 0, 999_999, 80_000)]
    values.append(torch.rand(1000, 300).t())
    staged = StagingArea(limit=64 * MIB).stage(values)
    assert staged_bytes(staged) == [bytes_of(value) for value in values]


def test_modes_of_torch_change_nothing() -> None:
    values = [torch.rand(3, 3).t(), torch.nn.Parameter(torch.rand(200_000))]
    made = StagingArea(limit=4 * MIB)
    expected = [bytes_of(value) for value in values]
    with torch.inference_mode():
        assert staged_bytes(made.stage(values)) == expected
    with FakeTensorMode():
        assert staged_bytes(made.stage(values)) == expected
    with torch.device("meta"):
        assert staged_bytes(made.stage(values)) == expected


def test_a_freed_tensor_is_named() -> None:
    freed = torch.rand(10)
    freed.untyped_storage().resize_(0)
    made = StagingArea(limit=4 * MIB)
    with pytest.raises(UnsupportedValueError, match="tensor 1 .* freed"):
        made.stage([torch.rand(1), freed])
    made.stage([torch.rand(MIB)], timeout=0)  # the memory was given back


# --- the memory -------------------------------------------------------------------------------------------------------


def test_memory_is_used_again(small: StagingArea, folder: FileStorage) -> None:
    addresses: set[int] = set()
    for number in range(3):
        staged = small.stage([torch.full((3 * MIB,), number, dtype=torch.uint8)])
        addresses.add(id(staged.memory.obj))
        write(staged, folder, str(number)).wait(60)
        del staged
    assert len(addresses) == 1
    assert [folder.read_bytes(str(number), 4 * MIB)[-1] for number in range(3)] == [0, 1, 2]


def test_what_is_in_flight_is_bounded(small: StagingArea) -> None:
    first = small.stage([torch.zeros(3 * MIB, dtype=torch.uint8)])
    with pytest.raises(StoreTimeoutError, match="process 0 is still to write 4,194,304 bytes"):
        small.stage([torch.zeros(3 * MIB, dtype=torch.uint8)], timeout=0.01)
    first.release()
    first.release()
    small.stage([torch.zeros(3 * MIB, dtype=torch.uint8)], timeout=0.01)  # and is dropped, which gives it back
    small.stage([torch.zeros(3 * MIB, dtype=torch.uint8)], timeout=0.01)


def test_a_large_snapshot_is_staged_alone(small: StagingArea, folder: FileStorage) -> None:
    staged = small.stage([torch.ones(9 * MIB, dtype=torch.uint8)], timeout=0.01)
    write(staged, folder).wait(60)
    assert folder.size("file") == 9 * MIB + 6
    del staged
    small.stage([torch.zeros(MIB)], timeout=0.01)


def test_more_than_the_machine_has_is_refused(small: StagingArea) -> None:
    huge = torch.zeros(1).expand(1 << 50)
    with pytest.raises(ResourceLimitError, match=r"4,503,599,627,370,496 bytes .* Snapshot.take"):
        small.stage([huge])
    with pytest.raises(ResourceLimitError, match=r"; huge alone takes 4,503,599,627,370,496 bytes"):
        small.stage([torch.zeros(3), huge], names=["few", "huge"])
    small.stage([torch.zeros(MIB)], timeout=0.01)


def test_what_was_staged_is_written_once(small: StagingArea, folder: FileStorage) -> None:
    staged = small.stage([torch.zeros(3)])
    write(staged, folder).wait(60)
    with pytest.raises(ValueError, match="has been written"):
        write(staged, folder)
    staged = small.stage([torch.zeros(3)])
    staged.release()
    with pytest.raises(ValueError, match="or released"):
        write(staged, folder)


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_of_cuda_devices_are_copied_through_pinned_memory(small: StagingArea, folder: FileStorage) -> None:
    values = [torch.rand(100_000, device="cuda"), torch.rand(100, 30, device="cuda").t(), torch.rand(3)]
    expected = [bytes_of(value.cpu()) for value in values]
    for number in range(2):  # the second time in memory that is pinned already
        staged = small.stage([value.clone() for value in values])
        assert staged_bytes(staged) == expected
        write(staged, folder, str(number)).wait(60)


class Runtime:
    """What is asked of CUDA, on a machine that has none."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size == 4096 and flags == 1
        if not self.code:
            self.registered.append(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)


@pytest.mark.parametrize("code", [0, 2])
def test_pinned_memory_is_given_up_before_it_goes(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    runtime = Runtime(code)
    monkeypatch.setattr(staging, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    made = StagingArea(limit=4 * MIB)
    staged = made.stage([torch.rand(10)])
    for _ in range(2):
        staged.block.pin(torch.device("cpu"))
    assert len(runtime.registered) == (code == 0)
    staged.release()
    assert len(runtime.registered) == (code == 0), "it is kept with the memory"
    made.pool.trim()
    assert runtime.registered == []


@pytest.mark.parametrize(
    "lines",
    [
        ["0::/job/step"],
        ["4:memory,hugetlb:/job/step", "1:cpu:/", "0::/"],
        ["0::/job/elsewhere"],  # of the host, where the container has its own as the root
    ],
)
def test_the_limits_of_control_groups_are_found(tmp_path: Path, lines: list[str]) -> None:
    legacy = "memory" in lines[0]
    mounted = tmp_path / "memory" if legacy else tmp_path
    (mounted / "job/step").mkdir(parents=True)
    name = "memory.limit_in_bytes" if legacy else "memory.max"
    for folder, text in ((mounted, "8192\n"), (mounted / "job", "max\n"), (mounted / "job/step", "4096\n")):
        (folder / name).write_text(text)
    groups = tmp_path / "groups"
    groups.write_text("\n".join(lines) + "\n")
    found = container_limits(groups, tmp_path)
    assert sorted(found) == ([8192] if "elsewhere" in lines[0] else [4096, 8192])
    assert container_limits(tmp_path / "none", tmp_path) == []


def test_the_default_limit_is_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "container_limits", lambda: [4096])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert staging.default_limit() == 512


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_stages_for_itself(folder: FileStorage) -> None:
    in_child(fork_while_something_is_staged, folder)


def fork_while_something_is_staged(folder: FileStorage) -> None:
    staged = stage([torch.ones(1000)])
    first = write(staged, folder, "parent's")
    kept = stage([torch.ones(1000)])
    in_child(stage_in_child, folder, first, kept)
    assert first.wait(60) == b""
    write(kept, folder, "parent's second").wait(60)
    assert folder.names() == ["child's", "parent's", "parent's second"]
    assert set(folder.read_bytes("parent's second", 10_000)[6:]) == {0, 0x80, 0x3F}


def stage_in_child(folder: FileStorage, parents: PendingWrite, kept: StagedTensors) -> None:
    with pytest.raises(MemstoreError, match=f"process {os.getppid()} asked for it"):
        parents.wait(0)
    assert kept.memory[:8] == bytes(8)  # of the child's own
    kept.memory[:8] = b"scrawled"
    with open("/proc/self/maps") as maps:
        assert "memfd:memstore" not in maps.read()
    kept.release()
    staged = stage([torch.zeros(1000)])
    pending = write(staged, folder, "child's")
    pending.wait(60)
    assert pending.writer != parents.writer
