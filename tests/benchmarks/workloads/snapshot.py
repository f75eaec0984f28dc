"""A state dict of 1 GiB saved and restored: in memory and on a disk, at once and asynchronously; and what it takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import WARM_UP_CALLS, Contestant, Entrant, Samples, as_series, compare, take_turns
from tests.benchmarks.peers import same
from tests.benchmarks.peers.checkpoints import (
    Checkpointer,
    DcpCheckpoint,
    PlainFile,
    SafetensorsCheckpoint,
    Snapshots,
    SnapshotsUnsummed,
    State,
    TorchCheckpointing,
    TorchFile,
    Torchsnapshot,
    WarmMemory,
    remove,
)
from tests.benchmarks.processes import in_new_process
from tests.benchmarks.report import Figure, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most, nbytes, read, times_faster, within

KINDS = (
    Snapshots,
    SnapshotsUnsummed,
    TorchFile,
    SafetensorsCheckpoint,
    DcpCheckpoint,
    Torchsnapshot,
    TorchCheckpointing,
    PlainFile,
    WarmMemory,
)
TENSORS = 256
MOST_ROUNDS = 3  # of seconds each
KIB = 1 << 10
RESET_PEAK = "5"  # VmHWM, see proc(5)


def measure(session: Session) -> Workload:
    side = 256 if session.quick else 1024
    state, target = random_state(side), random_state(side)
    size = f"{nbytes(state) >> 20} MiB"
    rounds = min(session.rounds, MOST_ROUNDS)
    with session.started(KINDS) as (peers, absent):
        check_saves(peers, state, target, "save")
        save = compare_saves(peers, state, rounds, "save", f"save of {size} to memory")
        staged, complete = compare_async(peers, state, rounds, size)
        restore = compare_restores(peers, state, target, rounds, f"restore of {size} in place")
        check_saves(peers, state, target, "save", "save_async")
        memory = _memory(peers, side // 2)
    with session.started(KINDS, where=session.disk) as (peers, _):
        check_saves(peers, state, target, "save_durably")
        durable = compare_saves(peers, state, rounds, "save_durably", f"durable save of {size} to a disk")
        opened = _compare_opens(session, peers, state, f"open of {size} that are saved")
    return Workload(
        id="snapshot",
        title=f"A state dict of {size}",
        text=f"{TENSORS} float32 tensors of {side:,} x {side:,}. A save takes a new path, and ends when others "
        "can restore it; a durable one when it is on the disk, an asynchronous one when the tensors may change. A "
        "restore reads into tensors that are there. Memory is the highest VmHWM of a new process in each of the calls, "
        "beyond what it had before, beside a state of a quarter of the size; mapped files and shared memory count, and "
        "so does the file of a save to memory, where it is filled through a mapping.",
        series=[save, durable, staged, complete, restore, opened, memory],
        goals=[
            *times_faster(f"save of {size} to memory", save, 3, [DcpCheckpoint.name]),
            at_most(f"durable save of {size}", durable, 1.1, PlainFile.name),
            at_most(f"asynchronous save of {size}, until the tensors may change", staged, 1.2, WarmMemory.name),
            at_most(f"restore of {size} in place", restore, 1.15, PlainFile.name),
            within(f"open of {size}", opened, 5e-3),
        ],
        absent=absent,
        notes=[] if session.disk else ["There is no disk to measure: what is durable was saved to memory."],
    )


def random_state(side: int) -> State:
    return {f"layers.{number}.weight": torch.randn(side, side) for number in range(TENSORS)}


def able(peers: Sequence[Checkpointer], method: str) -> list[Checkpointer]:
    return [peer for peer in peers if method in peer.does]


class _Saving:
    """The saves of one peer, each to a new path, which is removed outside of the time."""

    def __init__(self, peer: Checkpointer, state: State, method: str) -> None:
        self._peer, self._state, self._save = peer, state, getattr(peer, method)
        self._numbers = count()
        self._start = 0
        self.completed: list[int] = []  # ns until each was complete

    def contestant(self, rounds: int) -> Contestant:
        peer = self._peer
        most = rounds + WARM_UP_CALLS
        return Contestant(peer.name, peer.role, self._call, self._before, self._after, most, peer.settings)

    def _before(self) -> None:
        self._path = self._peer.root / f"saved-{next(self._numbers)}"
        back_memory(nbytes(self._state))
        with one_thread():
            read(self._state)

    def _call(self) -> Any:
        self._start = time.perf_counter_ns()
        return self._save(self._path, self._state)

    def _after(self, wait: Any) -> None:
        if callable(wait):
            wait()
        self.completed.append(time.perf_counter_ns() - self._start)
        remove(self._path)


class _Restoring:
    """The restores of one peer, each of what was saved right before, and each compared with it."""

    def __init__(self, peer: Checkpointer, state: State, target: State) -> None:
        self._peer, self._state, self._target = peer, state, target
        self._path = peer.root / "restored"

    def contestant(self, rounds: int) -> Contestant:
        peer = self._peer
        most = rounds + WARM_UP_CALLS
        return Contestant(peer.name, peer.role, self._call, self._before, self._after, most, peer.settings)

    def _before(self) -> None:
        back_memory(nbytes(self._state))
        self._peer.save(self._path, self._state)
        _clear(self._target)

    def _call(self) -> None:
        self._peer.restore(self._path, self._target)

    def _after(self, _: Any) -> None:
        remove(self._path)
        _compare(self._peer, self._target, self._state)


@contextmanager
def one_thread() -> Generator[None]:
    """For what is not timed: on a busy machine, each of 256 operators would wait for the other threads to be run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _clear(state: State) -> None:
    with one_thread():
        for tensor in state.values():
            tensor.zero_()


def _compare(peer: Checkpointer, restored: State, saved: State) -> None:
    with one_thread():
        if not same(restored, saved):
            raise SystemExit(f"{peer.name}: what was restored differs from what was saved")


def check_saves(peers: Sequence[Checkpointer], state: State, target: State, *methods: str) -> None:
    """What each has saved by these methods is restored and compared, or the run ends here."""
    for peer in able(peers, "restore"):
        for method in peer.does.intersection(methods):
            path = peer.root / "checked"
            wait = getattr(peer, method)(path, state)
            if callable(wait):
                wait()
            _clear(target)
            peer.restore(path, target)
            remove(path)
            _compare(peer, target, state)


def compare_saves(peers: Sequence[Checkpointer], state: State, rounds: int, method: str, title: str) -> Series:
    contestants = [_Saving(peer, state, method).contestant(rounds) for peer in able(peers, method)]
    return compare(method.replace("_", "-"), title, contestants, rounds=rounds, reference=Snapshots.name)


def compare_async(peers: Sequence[Checkpointer], state: State, rounds: int, size: str) -> tuple[Series, Series]:
    """Until the tensors may change, and until it can be restored: two times of the same calls."""
    saving = [_Saving(peer, state, "save_async") for peer in able(peers, "save_async")]
    contestants = [one.contestant(rounds) for one in saving]
    staged = take_turns(contestants, rounds=rounds)
    complete = [Samples([[ns] for ns in one.completed[-rounds:]]) for one in saving]
    entrants = [Entrant(contestant.name, contestant.role, contestant.note) for contestant in contestants]
    title = f"asynchronous save of {size}"
    return (
        as_series("staged", f"{title}, until the tensors may change", entrants, staged, reference=Snapshots.name),
        as_series("complete", f"{title}, until it can be restored", entrants, complete, reference=Snapshots.name),
    )


def compare_restores(peers: Sequence[Checkpointer], state: State, target: State, rounds: int, title: str) -> Series:
    contestants = [_Restoring(peer, state, target).contestant(rounds) for peer in able(peers, "restore")]
    return compare("restore", title, contestants, rounds=rounds, reference=Snapshots.name)


def _compare_opens(session: Session, peers: Sequence[Checkpointer], state: State, title: str) -> Series:
    contestants: list[Contestant] = []
    for peer in able(peers, "open"):
        path = peer.root / "kept"
        peer.save(path, state)
        contestants.append(Contestant(peer.name, peer.role, partial(peer.open, path), note=peer.settings))
    series = compare("open", title, contestants, rounds=session.rounds, reference=Snapshots.name)
    for peer in able(peers, "open"):
        remove(peer.root / "kept")
    return series


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(peers: Sequence[Checkpointer], side: int) -> Series:
    figures: list[Figure] = []
    for peer in peers:
        if peer.role != "limit":
            found = in_new_process(_peaks, type(peer), str(peer.root), side)
            figures += [Figure(f"{peer.name}, {what}", peer.role, exactly(float(size)), 1) for what, size in found]
    return Series("memory", f"peak memory, beside a state of {TENSORS * side**2 * 4 >> 20} MiB", "B", figures)


def _peaks(kind: type[Checkpointer], root: str, side: int) -> list[tuple[str, int]]:
    """In a new process: how far VmHWM goes beyond what the process had, in each call."""
    peer = kind(Path(root))
    peer.setup()
    state, target, path = random_state(side), random_state(side), Path(root) / "peak"
    found: list[tuple[str, int]] = []
    if "save_async" in peer.does:
        found.append(("async save", _peak(lambda: peer.save_async(path, state)())))
        remove(path)
    found.append(("save", _peak(lambda: peer.save(path, state))))
    found.append(("restore", _peak(lambda: peer.restore(path, target))))
    remove(path)
    peer.close()
    return found


def _peak(call: Callable[[], object]) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before = _field("VmRSS")
    call()
    return max(0, _field("VmHWM") - before)


def _field(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))
