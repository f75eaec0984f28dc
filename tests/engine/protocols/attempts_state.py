"""The states of the model of attempts: ranks, parts, outcomes, files; what the rules write, and what must hold.

Each process makes at most one part, so put ids are the numbers of processes, and each has its own file. An attempt that
begins gets a number, `begun`: if its outcome is dropped and parts come again under its name, that is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.support.explore import Fault, with_

NONE, FILLING, PREPARED, LIVE, RETIRED = "", "filling", "prepared", "live", "retired"
ANY = -1  # no version is expected


class File(NamedTuple):
    """Of the process with the same number, with its row."""

    row: str = NONE
    header: str = NONE  # NONE: there is no file
    locked: bool = False  # exclusively, by that process


class Part(NamedTuple):
    """A row of `pending`."""

    attempt: str
    rank: int
    put: int
    world: int
    begun: int
    expect: int
    shape: str  # what it says of the value: all parts must say the same
    lease: int  # 0: any time may be past it; 1: none
    expires: int  # the expiry of the attempt, in the same measure
    boot: int


class Outcome(NamedTuple):
    attempt: str
    begun: int
    version: int  # 0: it ended with `error`
    error: str
    expires: int
    boot: int


class Process(NamedTuple):
    """A process, by what it does, where it stands, and what the kernel would take from it. Dead ones are as done."""

    role: str
    attempt: str = ""
    rank: int = 0
    world: int = 2
    expect: int = ANY
    shape: str = ""
    waits: bool = True  # wait=True
    lease: int = 0
    at: str = "start"
    owner: bool = False  # of the mutex
    recovering: int = 0  # the step of `after_death`
    begun: int = 0  # of the attempt that its part is in
    merged: tuple[Part, ...] = ()
    turn: int = 0  # how many headers are live
    error: str = ""  # to end the attempt with
    answer: Outcome | None = None


DONE = Process("", at="done")


class Published(NamedTuple):
    attempt: str
    begun: int
    version: int
    parts: tuple[Part, ...]


class Counters(NamedTuple):
    filling: int = 0
    prepared: int = 0
    live: int = 0
    retired: int = 0

    def moved(self, before: str, after: str) -> Counters:
        counts = self._asdict()
        for state, by in ((before, -1), (after, 1)):
            if state:
                counts[state] += by
        return Counters(**counts)


class State(NamedTuple):
    processes: tuple[Process, ...]
    files: tuple[File, ...]
    pending: tuple[Part, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    record: tuple[int, tuple[int, ...]] = (1, ())  # version and put ids; version 0: no such key
    version: int = 1  # the last one
    begun: int = 0  # attempts
    counters: Counters = Counters()
    boot: int = 0
    # the lock page
    note: int = 0
    dirty: bool = False
    new: bool = False
    owed: bool = False  # fewer publications have rung than were made
    # what was seen
    published: tuple[Published, ...] = ()
    raised: frozenset[int] = frozenset()  # attempts of which a rank raised that they ended
    dropped: frozenset[int] = frozenset()  # attempts whose outcome was dropped
    failed: bool = False
    # what may still come
    kills: int = 0
    failures: int = 0
    expiries: int = 0  # of attempts
    drops: int = 0  # of outcomes
    reboots: int = 0


def start(*processes: Process, **limits: int) -> State:
    """A store whose key has a version without a file."""
    return State(processes, (File(),) * len(processes), **limits)  # type: ignore[arg-type]


def is_end(state: State) -> bool:
    return all(process == DONE for process in state.processes)


Steps = Iterator[tuple[str, State]]


# --- what the transactions write --------------------------------------------------------------------------------------


def parts_of(state: State, attempt: str) -> tuple[Part, ...]:
    return tuple(part for part in state.pending if part.attempt == attempt)


def outcome_of(state: State, attempt: str) -> Outcome | None:
    return next((outcome for outcome in state.outcomes if outcome.attempt == attempt), None)


def are_all_there(parts: tuple[Part, ...]) -> bool:
    return bool(parts) and len(parts) == parts[0].world


def is_answer_due(state: State, process: Process) -> bool:
    parts = parts_of(state, process.attempt)
    is_pending = bool(parts) and parts[0].begun == process.begun
    return not is_pending or are_all_there(parts)


def with_rows(state: State, puts: Iterable[int], row: str) -> State:
    """The rows of these segments, and the counters of their bytes."""
    files, counters = state.files, state.counters
    for put in puts:
        counters = counters.moved(files[put].row, row)
        files = with_(files, put, files[put]._replace(row=row))
    return state._replace(files=files, counters=counters)


def with_header(state: State, put: int, header: str) -> State:
    file = state.files[put]
    if file.header == NONE:
        raise Fault("a header is written of a file that is gone")
    return state._replace(files=with_(state.files, put, file._replace(header=header)))


def ended(state: State, attempt: str, error: str, lease: int = 0) -> State:
    """Rules 3 and 4: the parts are retired, their rows go, and the error is the outcome. It counts as a publication."""
    parts = parts_of(state, attempt)
    if error == "mismatch" and len({part.shape for part in parts}) == 1:
        raise Fault("an attempt ends since parts disagree, and they agree: one of them was replaced")
    if error == "expired" and any(part.lease for part in parts):
        raise Fault("an attempt is over before the lease of a part is")
    begun = parts[0].begun if parts else state.begun + 1
    state = with_rows(state, [part.put for part in parts], RETIRED)
    outcome = Outcome(attempt, begun, 0, error, max(lease, *(part.expires for part in parts), 0), state.boot)
    return state._replace(
        pending=tuple(part for part in state.pending if part.attempt != attempt),
        outcomes=tuple(sorted((*state.outcomes, outcome))),
        begun=max(state.begun, begun),
        owed=True,
    )


def unlinked(state: State, put: int) -> State:
    state = with_rows(state, [put], NONE)
    return state._replace(files=with_(state.files, put, File()))


def stale(state: State) -> list[int]:
    """Files whose rows are retired, and whose headers say that they are live."""
    return [put for put, file in enumerate(state.files) if (file.row, file.header) == (RETIRED, LIVE)]


# --- a process --------------------------------------------------------------------------------------------------------


class Scene:
    """One process and the state that it finds."""

    def __init__(self, state: State, index: int) -> None:
        self.state, self.index, self.process = state, index, state.processes[index]

    def step(self, name: str, state: State | None = None, **changes: object) -> tuple[str, State]:
        """`changes` are of the process."""
        state = self.state if state is None else state
        process = self.process._replace(**changes)  # type: ignore[arg-type]
        return name, state._replace(processes=with_(state.processes, self.index, process))

    def fails(self, what: str, **changes: object) -> Steps:
        """A call fails, if one still may. Under the mutex, what was done is undone as after a death."""
        if self.state.failures:
            state = self.state._replace(failures=self.state.failures - 1, failed=True)
            yield self.step(f"({what} fails)", state, recovering=int(self.process.owner), **changes)

    def with_error(self, error: str) -> Scene:
        process = self.process._replace(error=error)
        return Scene(self.state._replace(processes=with_(self.state.processes, self.index, process)), self.index)

    def ring(self, name: str, **changes: object) -> tuple[str, State]:
        return self.step(name, rung(self.state), **changes)

    def finish(self, name: str, state: State | None = None) -> tuple[str, State]:
        return self.step(name, state, **DONE._asdict())

    def killed(self) -> Steps:
        process, file = self.process, self.state.files[self.index]
        if process.at != "start":
            state = self.state._replace(
                kills=self.state.kills - 1,
                dirty=self.state.dirty or process.owner,
                files=with_(self.state.files, self.index, file._replace(locked=False)),
            )
            what = f"{process.role} while it recovers" if process.recovering else process.role
            yield self.finish(f"(killed: {what})", state)


def is_of(begun: int, scene: Scene, broken: frozenset[str]) -> bool:
    """Whether that is the attempt that the rank's part is in."""
    return begun == scene.process.begun or "no number of the attempt" in broken


def rung(state: State) -> State:
    """Who sleeps looks again."""
    processes = (process._replace(at="look") if process.at == "asleep" else process for process in state.processes)
    return state._replace(owed=False, processes=tuple(processes))


def page_written_anew(state: State, boot: int) -> State:
    """Nobody is left but those that have not begun, and the lock page lost its note and its mutex.

    After a reboot; or if the next process is in another pid namespace: a container that was started again.
    """
    processes = tuple(process if process.at == "start" else DONE for process in state.processes)
    files = tuple(file._replace(locked=False) for file in state.files)
    lock_page = {"note": 0, "dirty": True, "new": True}
    return state._replace(processes=processes, files=files, boot=boot, reboots=state.reboots - 1, **lock_page)


# --- what must hold in every state, beside what the steps themselves raise --------------------------------------------


def check(state: State) -> None:
    _check_rows(state)
    version, puts = state.record
    for put in puts:
        if state.files[put] != File(LIVE, LIVE):
            raise Fault("a file of the record is not live, or locked by its writer: a reader would take it for damage")
    if (
        version
        and puts
        and (version, puts) not in [(one.version, tuple(part.put for part in one.parts)) for one in state.published]
    ):
        raise Fault("a record of what was never published")
    if state.dirty or any(process.owner for process in state.processes):
        return
    for put, file in enumerate(state.files):
        if file.header and (file.header == LIVE) is not (put in puts):
            raise Fault("a header says live that isn't, or doesn't that is: a repair would go wrong")
    if state.owed:
        raise Fault("the doorbell was not rung, and nobody will")
    for process in state.processes:
        if process.at == "asleep" and is_answer_due(state, process):
            raise Fault("a rank sleeps, and what it waits for is there")


def _check_rows(state: State) -> None:
    named = [part.put for part in state.pending]
    if len(set(named)) != len(named):
        raise Fault("two rows name one part")
    for put, file in enumerate(state.files):
        if file.header and not file.row:
            raise Fault("a file of nobody, which no sweep will find")
        if (file.row == PREPARED) is not (put in named):
            raise Fault(
                "a prepared segment and `pending` differ: it would stay for ever, or be taken while it is a part"
            )
        if (file.row == LIVE) is not (put in state.record[1]):
            raise Fault("a live segment and the record differ")
    for attempt in {part.attempt for part in state.pending}:
        parts = parts_of(state, attempt)
        if len({(part.world, part.begun, part.boot) for part in parts}) > 1:
            raise Fault("parts of two attempts under one name")
        if len({part.rank for part in parts}) != len(parts):
            raise Fault("a rank has two parts")
        if outcome_of(state, attempt):
            raise Fault("an attempt has an outcome, and is pending")
    if len({outcome.attempt for outcome in state.outcomes}) != len(state.outcomes):
        raise Fault("an attempt has two outcomes")
    counted = Counters(*(sum(file.row == row for file in state.files) for row in Counters._fields))
    if counted != state.counters:
        raise Fault(f"bytes are counted wrong: {state.counters} of {counted}")
