"""The writer is a process that completes snapshots when its trainer dies, and whose own failures and death are told."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memstore import errors
from memstore.engine import syscalls
from memstore.errors import (
    AlreadyExistsError,
    MemstoreError,
    ResourceLimitError,
    StoreFullError,
    StoreTimeoutError,
    UnknownOutcomeError,
    UnsupportedValueError,
)
from memstore.snapshot import staging, writer
from memstore.snapshot.chunks import FilePart
from memstore.snapshot.staging import StagedTensors, StagingArea, container_limits, stage
from memstore.snapshot.storage import FileStorage
from memstore.snapshot.writer import PendingWrite, StagedFile, WriteJob, WriteOutcome, error_of, failure_of
from tests.children import Child, Wire, in_child
from tests.huge_pages import require_huge_pages, warm_huge_pages
from tests.patience import wait_until
from tests.small_tmpfs import on_small_tmpfs
from tests.support import faults

MIB = 1 << 20
ROOT = Path(__file__).parent.parent.parent
STEPS = faults.STEPS - faults.CLEANUPS


@pytest.fixture
def folder(tmp_path: Path) -> FileStorage:
    return FileStorage.create(tmp_path / "snapshot", durable=False)


@pytest.fixture
def stager() -> Iterator[StagingArea]:
    made = StagingArea(limit=16 * MIB, idle=60.0)
    yield made
    made.close()


def start(stager: StagingArea, folder: FileStorage, *names: str, size: int = 1000) -> PendingWrite:
    """Writes files of ones."""
    return write(stager.stage([torch.ones(size, dtype=torch.uint8)]), folder, *names)


def write(staged: StagedTensors, folder: FileStorage, *names: str) -> PendingWrite:
    files = [StagedFile(name, b"header", staged.places) for name in names or ("file",)]
    return staged.write(folder.path, files, durable=False)


def wait_for_end(pid: int) -> None:
    """Of any process, reaped or not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = poll.poll(60_000)
    os.close(fd)
    assert ended, f"process {pid} still runs"


@contextlib.contextmanager
def stopped(pid: int) -> Generator[None]:
    """Inside it, the process does nothing."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGSTOP)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)


# --- the process ------------------------------------------------------------------------------------------------------


def test_the_writer_has_no_torch_no_terminal_and_no_interrupts(stager: StagingArea, folder: FileStorage) -> None:
    pending = start(stager, folder, "file")
    pending.wait(60)
    pid = pending.writer
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(2)] == ["/dev/null"] * 2
    assert os.readlink(f"/proc/{pid}/fd/2").startswith("/memfd:")
    assert os.getsid(pid) == pid
    ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    assert int(ignored.split()[1], 16) & 1 << signal.SIGINT - 1
    assert not os.path.samefile(f"/proc/{pid}/cwd", os.getcwd())


def test_one_writer_does_many_jobs_in_order(stager: StagingArea, folder: FileStorage) -> None:
    pending = [start(stager, folder, f"file{number:03}") for number in range(50)]
    assert [one.wait(60) for one in pending] == [b""] * 50
    assert len({one.writer for one in pending}) == 1
    assert folder.names() == [f"file{number:03}" for number in range(50)]


def test_an_idle_writer_ends_and_is_reaped_and_the_memory_goes(folder: FileStorage) -> None:
    stager = StagingArea(limit=16 * MIB, idle=0.05)
    pids: set[int] = set()
    for number in range(2):
        staged = stager.stage([torch.ones(3 * MIB, dtype=torch.uint8)])
        block = weakref.ref(staged.block)
        pending = write(staged, folder, str(number))
        pending.wait(60)
        pids.add(pending.writer)
        wait_until(lambda pid=pending.writer, block=block: block() is None and not os.path.exists(f"/proc/{pid}"))
    assert len(pids) == 2


def test_jobs_that_race_with_the_end_of_an_idle_writer_are_done(folder: FileStorage) -> None:
    stager = StagingArea(limit=16 * MIB, idle=0.0)
    for number in range(6):
        start(stager, folder, str(number)).wait(60)
    assert len(folder.names()) == 6


@pytest.mark.full
def test_a_program_ends_while_its_writer_runs(folder: FileStorage) -> None:
    """Neither the end of the program nor that of its output waits for a writer, which is idle for ten minutes."""
    code = """if True:
        import sys, torch
        from memstore.snapshot.writer import StagedFile; from memstore.snapshot.staging import stage
        staged = stage([torch.ones(1000)])
        pending = staged.write(sys.argv[1], [StagedFile("file", b"", staged.places)])
        print(pending.writer)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", code, folder.path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    wait_for_end(int(done.stdout))
    assert folder.size("file") == 4000


def test_the_memory_is_made_huge_when_the_writer_has_time(folder: FileStorage) -> None:
    require_huge_pages("/dev/shm")
    assert any(has_become_huge(folder, f"file {turn}") for turn in range(6))  # the kernel leaves pages that are in use


def has_become_huge(folder: FileStorage, name: str) -> bool:
    warm_huge_pages(200 * MIB)  # for the file and for the memory
    stager = StagingArea(limit=64 * MIB)
    staged = stager.stage([torch.ones(20 * MIB, dtype=torch.uint8)])
    address = staged.block.bytes.ctypes.data
    files = [StagedFile(name, b"", staged.places)]
    staged.write(folder.path, files, durable=False).wait(60)
    del staged
    deadline = time.monotonic() + 10
    while (found := huge_bytes(address)) < 20 * MIB and time.monotonic() < deadline:
        time.sleep(0.005)
    again = stager.stage([torch.ones(20 * MIB, dtype=torch.uint8)])
    assert again.block.bytes.ctypes.data == address
    assert set(again.memory) == {1}
    stager.close()
    return found == 20 * MIB


def huge_bytes(address: int) -> int:
    """Of the mapping at an address, those that the kernel maps by huge pages once they are touched."""
    syscalls.memory_at(address, 20 * MIB).tobytes()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    found = next(line for line in lines[start:] if line.startswith("ShmemPmdMapped:"))
    return int(found.split()[1]) << 10


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_raised_with_its_type_and_leaves_nothing(stager: StagingArea, folder: FileStorage) -> None:
    folder.write("second", 1, [FilePart(0, b"1")], durable=False)
    pending = start(stager, folder, "first", "second", "third")
    for _ in range(2):
        with pytest.raises(AlreadyExistsError, match=f"{folder.path}/second exists"):
            pending.wait(60)
    assert folder.names() == ["second"] and pending.done()
    start(stager, folder, "first").wait(60)


def test_a_full_disk_is_told_with_its_type() -> None:
    on_small_tmpfs(2, write_more_than_fits)


def write_more_than_fits(path: str) -> None:
    stager, folder = StagingArea(limit=16 * MIB), FileStorage(path)
    with pytest.raises(StoreFullError, match="second has no room") as caught:
        start(stager, folder, "first", "second", size=3 * MIB // 2).wait(60)
    assert caught.value.errno == errno.ENOSPC and folder.names() == []
    start(stager, folder, "first", size=MIB).wait(60)
    stager.close()


@pytest.mark.parametrize(("pieces", "message"), [([(0, 1 << 30)], "bytes 0 to 1,073,741,824"), ([(-1, 4)], "bytes -1")])
def test_jobs_that_make_no_sense_fail_alone(
    stager: StagingArea, folder: FileStorage, pieces: list[tuple[int, int]], message: str
) -> None:
    staged = stager.stage([torch.ones(10)])
    pending = staged.write(folder.path, [StagedFile("file", b"h", pieces)])
    with pytest.raises(MemstoreError, match=message):
        pending.wait(60)
    assert folder.names() == []
    after = start(stager, folder, "file")
    after.wait(60)
    assert after.writer == pending.writer


ERRORS = [
    *(
        kind("said")
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, MemstoreError) and name[0] != "_"
    ),
    ResourceLimitError("said", code=errno.EFBIG),
    OSError(errno.EIO, "Input/output error", "/path"),
    PermissionError(errno.EACCES, "denied", b"/b\xff"),
    OSError("no code"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_keep_their_types(error: Exception) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(failure_of(error)), type=writer.WriteFailure)
    found = error_of(sent)
    assert type(found) is type(error)
    assert (getattr(found, "errno", None) or None) == getattr(error, "errno", None)
    assert ("said" in str(found)) == ("said" in str(error))


def test_other_errors_are_told_by_name() -> None:
    found = error_of(failure_of(ZeroDivisionError("\ud800" + "x" * 100_000)))
    assert type(found) is MemstoreError and str(found).startswith("ZeroDivisionError: \\ud800xxx")
    assert len(str(found)) < writer.OUTCOME_LIMIT


def test_a_timeout_says_who_is_waited_for(stager: StagingArea, folder: FileStorage) -> None:
    first = start(stager, folder, "first")
    first.wait(60)
    with stopped(first.writer):
        second = start(stager, folder, "second")
        with pytest.raises(StoreTimeoutError, match=f"process {first.writer} has been writing"):
            second.wait(0.01)
        assert not second.done()
    second.wait(60)


def test_what_keeps_writers_from_starting_is_told(folder: FileStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    stager = StagingArea(limit=16 * MIB)
    monkeypatch.setattr(writer, "_CODE", "raise ImportError('no such thing')")
    with pytest.raises(UnknownOutcomeError, match=r"exit code 1 \(ImportError: no such thing\)"):
        start(stager, folder, "file").wait(60)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ResourceLimitError, match="/nowhere/python"):
        start(stager, folder, "file")
    monkeypatch.undo()
    start(stager, folder, "file", size=10 * MIB).wait(60)
    start(stager, folder, "second", size=10 * MIB).wait(60)
    stager.close()


# --- death of the writer ----------------------------------------------------------------------------------------------


def test_a_killed_writer_is_told_and_replaced(stager: StagingArea, folder: FileStorage) -> None:
    first = start(stager, folder, "first")
    first.wait(60)
    with stopped(first.writer):
        lost = [start(stager, folder, f"lost{number}", size=4 * MIB) for number in range(3)]  # 12 of 16 MiB
        os.kill(first.writer, signal.SIGKILL)
    for pending in lost:
        with pytest.raises(UnknownOutcomeError, match=rf"pid {first.writer}\) was killed by signal 9"):
            pending.wait(60)
    after = start(stager, folder, "after", size=8 * MIB)
    after.wait(60)
    assert after.writer != first.writer and folder.names() == ["after", "first"]


def test_a_writer_that_dies_at_any_step_leaves_a_whole_snapshot_or_none(tmp_path: Path) -> None:
    """The files may be there in part; the manifest, which makes them a snapshot, only when all of them are whole."""
    published: list[bool] = []
    while True:
        folder = FileStorage.create(tmp_path / str(len(published)), durable=False)
        outcome = serve_in_child(folder, len(published) + 1)
        published.append(folder.size("manifest") is not None)
        if published[-1]:
            assert folder.size("one") == folder.size("two") == 1006
        if outcome is not None:
            break
    assert outcome == WriteOutcome(1, b"3 sums") and published[-1]
    assert published == sorted(published) and not published[0] and len(published) > 10


def serve_in_child(folder: FileStorage, number: int) -> WriteOutcome | None:
    """What a writer that dies at a step says of a job, if it says something."""
    staged = StagingArea(limit=16 * MIB).stage([torch.ones(1000, dtype=torch.uint8)])
    files = [StagedFile(name, b"header", staged.places) for name in ("one", "two", "three")]
    job = WriteJob(1, os.fsencode(folder.path), files, b"manifest", True, True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, Child(serve_and_die, theirs, ours, number):
        theirs.close()
        writer.send_job(ours, job, staged.block.fd)
        ours.shutdown(socket.SHUT_WR)
        return writer.receive_outcome(ours)


def serve_and_die(wire: Wire, channel: socket.socket, parents: socket.socket, number: int) -> None:
    parents.close()
    writer.finish_part = publish_sums
    with faults.at_step(number, faults.die, after=True, names=STEPS):
        writer.serve(channel, 60.0)


def publish_sums(storage: FileStorage, text: bytes, sums: Mapping[str, bytes], durable: bool, pieces: object) -> bytes:
    """A last step, as a snapshot's."""
    assert all(len(found) == 8 for found in sums.values()) and durable
    storage.publish(text.decode(), b"".join(sums.values()), durable=durable)
    return f"{len(sums)} sums".encode()


def test_files_stay_when_the_last_step_fails(folder: FileStorage) -> None:
    """It may have published them already."""
    folder.publish("manifest", b"another one's", durable=False)
    outcome = serve_in_child(folder, 1000)
    assert outcome is not None and outcome.failure is not None and outcome.failure.kind == "AlreadyExistsError"
    assert folder.names() == ["manifest", "one", "three", "two"]


# --- death of the trainer ---------------------------------------------------------------------------------------------


def test_a_snapshot_is_completed_when_its_trainer_is_killed(folder: FileStorage) -> None:
    with Child(trainer, folder) as child:
        writer = child.receive()
        with stopped(writer):
            child.send(1000)
            assert child.receive() == "sent"
            child.kill()
            assert folder.size("file") is None
    wait_for_end(writer)
    assert folder.read_bytes("file", 4 * MIB) == b"header" + b"\1" * 3 * MIB


@pytest.mark.full
def test_a_trainer_that_dies_at_any_step_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    sizes: list[int | None] = []
    while True:
        folder = FileStorage.create(tmp_path / str(len(sizes)), durable=False)
        with Child(trainer, folder) as child:
            writer = child.receive()
            child.send(len(sizes) + 1)
            try:
                child.receive()
                break
            except RuntimeError:
                child.kill()
        wait_for_end(writer)
        sizes.append(folder.size("file"))
    assert len(sizes) > 5 and set(sizes[:-1]) == {None} and sizes[-1] == 3 * MIB + 6


def trainer(wire: Wire, folder: FileStorage) -> None:
    """Starts a writer; then takes a snapshot, and dies at a step of that."""
    stager = StagingArea(limit=16 * MIB)
    first = start(stager, folder, "warm")
    first.wait(60)
    folder.remove("warm")
    wire.send(first.writer)
    with faults.at_step(wire.receive(), faults.die, after=True, names=STEPS | {"close"}):  # which follows the sending
        start(stager, folder, "file", size=3 * MIB)
    wire.send("sent")
    wire.receive()


# --- the messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "no files", "no job", "too long"])
def test_a_writer_takes_nothing_but_jobs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull) as null:
        before = len(os.listdir("/proc/self/fd"))
        if kind == "text":
            ours.send(b"something else")
        elif kind == "no files":
            ours.send(b"job")
        elif kind == "no job":
            socket.send_fds(ours, [b"job"], [null.fileno(), null.fileno()])
        else:
            monkeypatch.setattr(writer, "JOB_LIMIT", 200)
            monkeypatch.setattr(msgspec.msgpack, "encode", long_job)
            with pytest.raises(ResourceLimitError, match="201 bytes"):
                writer.send_job(ours, WriteJob(1, b"/", [], None, False, False), null.fileno())
            monkeypatch.setattr(writer, "JOB_LIMIT", 201)
            writer.send_job(ours, WriteJob(1, b"/", [], None, False, False), null.fileno())
            monkeypatch.setattr(writer, "JOB_LIMIT", 200)
        with pytest.raises(MemstoreError, match="not a job|is no Job|201 bytes"):
            writer.receive_job(theirs)
        assert len(os.listdir("/proc/self/fd")) <= before  # those of earlier tests may be closed meanwhile


def long_job(_: WriteJob) -> bytes:
    return bytes(201)


def test_what_was_sent_before_a_writer_hears_no_more_is_received_and_what_comes_later_is_not_sent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull) as null:
        writer.send_job(ours, WriteJob(1, b"/", [], None, False, False), null.fileno())
        theirs.shutdown(socket.SHUT_RD)
        with pytest.raises(BrokenPipeError):
            writer.send_job(ours, WriteJob(2, b"/", [], None, False, False), null.fileno())
        received = writer.receive_job(theirs)
        assert received is not None and received[0].number == 1
        os.close(received[1])
        assert writer.receive_job(theirs) is None
        writer.send_outcome(theirs, WriteOutcome(1, b"done"))
        assert writer.receive_outcome(ours) == WriteOutcome(1, b"done")


def test_an_outcome_that_is_too_long_is_a_failure() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        writer.send_outcome(ours, WriteOutcome(7, bytes(writer.OUTCOME_LIMIT)))
        outcome = writer.receive_outcome(theirs)
        assert outcome is not None and outcome.number == 7 and outcome.failure is not None
        assert "65,5" in outcome.failure.message
        ours.close()
        assert writer.receive_outcome(theirs) is None


# --- staging: copies in shared memory, exact, in memory that is used again, within bounds -----------------------------


IDLE = 60.0


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


# -- what is copied ----------------------------------------------------------------------------------------------------

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


# -- the memory --------------------------------------------------------------------------------------------------------


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


# -- devices -----------------------------------------------------------------------------------------------------------


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


# -- forks -------------------------------------------------------------------------------------------------------------


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
