"""The states of the model of reuse: files, rows, processes; how a process changes them; what must hold in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.support.explore import Fault, with_

FILLING, LIVE, RETIRED, UNLINKED = "filling", "live", "retired", "unlinked"


class File(NamedTuple):
    exists: bool = False
    put: int = 0  # the id in its header
    state: str = FILLING  # in its header
    first: int = 0  # whose bytes its halves are
    second: int = 0


class Row(NamedTuple):
    put: int
    state: str
    batch: int = 0  # of `filling`
    held: bool = False  # in `held`, and not in `retired`


class Filling(NamedTuple):
    """A file of a batch that is not the one at hand, or one that is kept for the next put."""

    file: int
    lock: str
    put: int


class Process(NamedTuple):
    """A process, by what it does, where it stands, and what the kernel would take from it. Dead ones are as done."""

    role: str
    at: str = "start"
    owner: bool = False  # of the mutex
    recovering: int = 0  # the step of `after_death`
    file: int = -1  # that it has open or mapped
    lock: str = ""  # "shared" or "exclusive"
    put: int = 0  # that it makes, or that its record names
    tries: int = 0
    before: int = 0  # what the record named that didn't fit, in mode "r"
    refused: tuple[int, ...] = ()
    others: tuple[Filling, ...] = ()  # of its batch, beside `file`
    turn: int = 0  # how many of its batch have been through this step
    ahead: tuple[Filling, ...] = ()  # what its next put is to fill, if there is one


DONE = Process("", "done")
GONE = File(put=-1)  # unlinked, and nobody has it open
HOLDING = ("unlock get", "hold", "lock: lease", "lease", "unlock lease", "sent")  # where a reader has its value


class State(NamedTuple):
    processes: tuple[Process, ...]
    files: tuple[File, ...]
    rows: tuple[Row | None, ...]
    records: tuple[tuple[int, int], ...]  # of each key: put id and file; (0, -1) if it isn't there
    leases: tuple[int, ...]  # the put that each file is leased for; 0: no lease that counts
    number: int  # the last put id
    publications: int = 1
    ring: int = 1
    note: int = 0  # the batch in the lock page
    dirty: bool = False
    acknowledged: int = 0  # the last publication that its caller knows of
    kills: int = 0  # that may still come
    failures: int = 0  # of commits and other calls, that may still come


def start(roles: list[str], *, files: int, kills: int, failures: int = 0, retired: int = 0, keys: int = 1) -> State:
    """A store with a value for each key, `retired` files to reuse, and room for others up to `files`."""
    used = keys + retired
    present = [File(True, put, RETIRED if put <= retired else LIVE, put, put) for put in range(1, used + 1)]
    rows = [Row(put, RETIRED if put <= retired else LIVE) for put in range(1, used + 1)]
    return State(
        processes=tuple(sorted(map(Process, roles))),
        files=(*present, *[File()] * (files - used)),
        rows=(*rows, *[None] * (files - used)),
        records=tuple((put, put - 1) for put in range(retired + 1, used + 1)),
        leases=(0,) * files,
        number=used,
        kills=kills,
        failures=failures,
    )


def is_end(state: State) -> bool:
    return all(process == DONE for process in state.processes)


Steps = Iterator[tuple[str, State]]


class Scene:
    """One process and the state that it finds."""

    def __init__(self, state: State, index: int) -> None:
        self.state, self.process = state, state.processes[index]
        self._others = (*state.processes[:index], *state.processes[index + 1 :])

    def step(self, name: str, **changes: object) -> tuple[str, State]:
        own = {name: changes.pop(name) for name in Process._fields if name in changes}
        process = self.process._replace(**own)  # type: ignore[arg-type]
        state = self.state._replace(processes=tuple(sorted((*self._others, process))), **changes)  # type: ignore[arg-type]
        open_files = {file for process in state.processes for file, _ in _files(process)}
        for file, found in enumerate(state.files):
            if found.state == UNLINKED and file not in open_files:
                state = state._replace(files=with_(state.files, file, GONE))
        return name, state

    def fails(self, what: str, **changes: object) -> Steps:
        """A call fails, if one still may. Under the mutex, its next owner is told so."""
        if self.state.failures:
            dirty = self.state.dirty or self.process.owner
            yield self.step(f"({what} fails)", failures=self.state.failures - 1, dirty=dirty, **changes)

    def killed(self) -> Steps:
        process = self.process
        if process.at != "start":
            kills, dirty = self.state.kills - 1, self.state.dirty or process.owner
            what = f"{process.role} while it recovers" if process.recovering else process.role
            yield self.step(f"(killed: {what})", **DONE._asdict(), kills=kills, dirty=dirty)

    def following(self, at: str, then: str, **changes: object) -> dict[str, object]:
        """For the step's next file of the batch, or `then` if that was the last. `changes` are of the one at hand."""
        process = self.process._replace(**changes)  # type: ignore[arg-type]
        turn = (process.turn + 1) % (len(process.others) + 1)
        return {**rotated(process), "turn": turn, "at": at if turn else then}

    def with_file(self, **changes: object) -> dict[str, tuple[File, ...]]:
        found = self.state.files[self.process.file]._replace(**changes)  # type: ignore[arg-type]
        return {"files": with_(self.state.files, self.process.file, found)}

    def is_locked(self, file: int) -> bool:
        return any((file, lock) in _files(other) for other in self._others for lock in ("shared", "exclusive"))

    def is_written(self, file: int) -> bool:
        return any((file, "exclusive") in _files(other) for other in self._others)

    def may_write(self) -> None:
        if self.is_locked(self.process.file):
            raise Fault("a file is written that somebody else locks")

    def retired(self, rows: tuple[Row | None, ...], keys: int = 1) -> tuple[Row | None, ...]:
        for put, file in self.state.records[:keys]:
            rows = with_(rows, file, Row(put, RETIRED)) if put else rows
        return rows

    def marks(self, name: str, then: str) -> tuple[str, State]:
        """Marks the header of one retired file, after which others may follow."""
        files, stale = self.state.files, self.stale()
        for file in stale[:1]:
            files = with_(files, file, files[file]._replace(state=RETIRED))
        return self.step(name, at=self.process.at if stale[1:] else then, files=files)

    def unbooked(self, file: int) -> tuple[Row | None, ...]:
        """The rows, of which that one is retired, under the put that is in the file still."""
        return with_(self.state.rows, file, Row(self.state.files[file].put, RETIRED))

    def taken(self) -> list[int]:
        """Files booked for a next put, that still hold the put which was replaced."""
        rows, files = self.state.rows, self.state.files
        return [
            file
            for file, row in enumerate(rows)
            if row and row.state == FILLING and files[file].state == LIVE and files[file].put not in (0, row.put)
        ]

    def stale(self) -> list[int]:
        """Retired files whose headers say that they are live."""
        rows, files = self.state.rows, self.state.files
        return [
            file
            for file, row in enumerate(rows)
            if row and row.state == RETIRED and not row.held and files[file].state == LIVE
        ]


def rotated(process: Process) -> dict[str, object]:
    """The next file of its batch is at hand."""
    first, *rest = (*process.others, Filling(process.file, process.lock, process.put))
    return {"file": first.file, "lock": first.lock, "put": first.put, "others": tuple(rest)}


def _files(process: Process) -> list[tuple[int, str]]:
    """Files that it has open or mapped, and how it locks them."""
    return [(process.file, process.lock), *(filling[:2] for filling in (*process.others, *process.ahead))]


def check(state: State) -> None:
    """What must hold in every state."""
    for put, live in state.records:
        if put and not (
            state.files[live] == File(True, put, state.files[live].state, put, put)
            and state.rows[live] == Row(put, LIVE)
        ):
            raise Fault("the file of a live record was taken, or never filled")
    for process in state.processes:
        file = state.files[process.file]
        if process.at in HOLDING and (file.first, file.second) != (process.put, process.put):
            raise Fault("a value that is held has other bytes than its record said")
    for file, leased in zip(state.files, state.leases, strict=True):
        if leased and (not file.exists or (file.first, file.second) != (leased, leased)):
            raise Fault("a version is gone before its lease")
    for file, row in zip(state.files, state.rows, strict=True):
        if file.exists and row is None:
            raise Fault("a file of nobody, which no sweep will find")
    if state.acknowledged > state.publications:
        raise Fault("a put was acknowledged, and is not there")
    if not state.dirty and not any(process.owner for process in state.processes):
        live_files = {live for _, live in state.records}
        for number, file in enumerate(state.files):
            if file.exists and (file.state == LIVE) is not (number in live_files):
                raise Fault("a header says live that isn't, or doesn't that is: a repair would go wrong")
        if state.ring != state.publications:
            raise Fault("the doorbell was not rung, and nobody will")
