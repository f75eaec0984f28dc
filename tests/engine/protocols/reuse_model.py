"""A model of how segment files are reused: a key or two, a few files, and processes that may be killed at each step.

Its steps are those of `put.py` (claim, fill, commit, abandon), `sweep.py`, `get.py` (get), `recovery.py`
and `reuse.py` (leases), and are named after the functions there. What the kernel does for a process that dies is done:
its locks and mappings drop, and its mutex passes on, with word of its death. LMDB's transactions are taken as atomic.

    PUT     _claim_locked | Reuse._ask: lock, erase_put_id, commit row | _create, lock | unlock the mutex | fill | seal
            _commit_locked | note the batch, go_live: write slots, unlock; commit; clear the note;
                             ReplacedFile.keep: lock, vacate, or commit; mark_retired, ring
            claim, next time | take_kept_file
            abandon, if a call failed | remove_file, commit | unlock the mutex | free_blocks
                     after a lost race | vacate, commit | unlock the mutex | close
    GET     read the record, open, lock_shared, compare, map_file; after two misfits all of it under the mutex
    SWEEP   lock, erase_put_id, unlink, commit | unlock the mutex | free_blocks | _look_again: from held back to retired
    LEASE   get, lease, let go; the receiver opens what the lease keeps

A put is of one key, or of two at once. Not modelled: files that a large batch parks, several files in one hold of the
sweep, and a recovery that fails. Puts, what they keep for the next one, and gets with their leases, have modules of
their own beside this one.

`MUTATIONS` are faults that one could make in the code; the tests show that the model finds each.
"""

from __future__ import annotations

from tests.engine.protocols.reuse_ahead import MUTATIONS_AHEAD, kept
from tests.engine.protocols.reuse_get import get_steps
from tests.engine.protocols.reuse_put import put_steps
from tests.engine.protocols.reuse_state import DONE, FILLING, LIVE, RETIRED, UNLINKED, Scene, State, Steps, with_

PUTS, GETS = ("writer", "repeater", "swapper", "batcher"), ("reader", "watcher", "sender", "receiver")

MUTATIONS = {
    "claim without the lock": "Reuse._ask takes a file that others lock",
    "keep the put id": "Reuse._ask doesn't erase the put id",
    "compare before the lock": "map_segment reads the header before it has the lock",
    "unlink with the put id": "_unlink doesn't erase the put id",
    "no compare": "map_segment doesn't compare the put id",
    "map without the lock": "map_segment gives up the lock when it closes the file",
    "unlock after the commit": "go_live leaves the lock to be given up after the commit, in the mutex",
    "unlock after the mutex": "go_live leaves the lock to be given up when the put is over",
    "go live after the commit": "the header says live only after the catalog does",
    "a batch for each": "the second row of a batch is filling under a batch of its own",
    "no note": "the batch is not noted in the lock page",
    "no ring": "the ring sequence is not compared after a death",
    "row before the unlink": "_unlink drops the row, and then the file",
    "sweep without the lock": "_unlink takes files that others lock",
    "sweep what is leased": "_unlink doesn't look at leases",
    "claim what is leased": "Reuse._ask doesn't look at leases",
    "no lock on a new file": "_create doesn't lock",
    "sweep by the wrong table": "_unlink doesn't look at the state of the row",
    "acknowledge before the commit": "a put returns before its transaction is committed",
    **MUTATIONS_AHEAD,
}


class Model:
    """The steps that each process may take, and what must hold in each state."""

    def __init__(self, *mutations: str) -> None:
        assert set(mutations) <= set(MUTATIONS)
        self._broken = frozenset(mutations)

    def successors(self, state: State) -> Steps:
        for index, process in enumerate(state.processes):
            if process == DONE or process in state.processes[:index]:  # of two that are alike, one will do
                continue
            scene = Scene(state, index)
            if process.recovering:
                yield from _after_death(scene, self._broken)
            elif process.at.startswith("lock: "):
                yield from _mutex(scene)
            elif process.role in PUTS:
                yield from put_steps(scene, self._broken)
            elif process.role in GETS:
                yield from get_steps(scene, self._broken)
            else:
                yield from (_sweep if process.role == "sweeper" else _delete)(scene, self._broken)
            if state.kills:
                yield from scene.killed()
        for file, leased in enumerate(state.leases):
            if leased:
                yield "(a lease runs out)", state._replace(leases=with_(state.leases, file, 0))


# --- the mutex, and what its next owner does for a dead one -----------------------------------------------------------


def _mutex(scene: Scene) -> Steps:
    if any(process.owner for process in scene.state.processes):
        if scene.process.role == "repeater" and scene.process.at == "lock: check":
            yield kept(scene)
        return
    at = scene.process.at.removeprefix("lock: ")
    yield scene.step("mutex: lock", at=at, owner=True, recovering=int(scene.state.dirty))


def _after_death(scene: Scene, broken: frozenset[str]) -> Steps:
    state, at = scene.state, scene.process.recovering
    noted = [
        file
        for file, row in enumerate(state.rows)
        if state.note and row and row.state == FILLING and row.batch == state.note and state.files[file].state == LIVE
    ]
    taken = [] if "no undo" in broken or state.ring == state.publications else scene.taken()
    if at == 1 and taken:
        rows = scene.unbooked(taken[0])
        yield scene.step("after_death: what was booked ahead", rows=rows)
    elif at == 1 and noted:
        files = with_(state.files, noted[0], state.files[noted[0]]._replace(state=FILLING))
        yield scene.step("after_death: a header of the noted batch", files=files)
    elif at == 1:
        yield scene.step("after_death: clear the note", recovering=2, note=0)
    elif at == 2 and state.ring != state.publications and scene.stale() and "no ring" not in broken:
        yield scene.marks("after_death: mark_retired", scene.process.at)
    elif at == 2:
        yield scene.step("after_death: ring", recovering=3, ring=state.publications)
    else:
        yield scene.step("after_death: done", recovering=0, dirty=False)


# --- delete -----------------------------------------------------------------------------------------------------------


def _delete(scene: Scene, broken: frozenset[str]) -> Steps:
    """Of the first key."""
    state, at = scene.state, scene.process.at
    if at == "start":
        yield scene.step("delete", at="lock: delete")
    elif at == "delete" and state.records[0][0]:
        records, rows = with_(state.records, 0, (0, -1)), scene.retired(state.rows)
        changes = {"records": records, "publications": state.publications + 1, "rows": rows}
        yield scene.step("delete: the moment of publication", at="mark", **changes)
        yield from scene.fails("delete: commit", at="raise")
    elif at == "delete":
        yield scene.step("delete: KeyNotFoundError", at="raise")
    elif at == "raise":
        yield scene.step("delete: unlock the mutex, to raise", **DONE._asdict())
    elif at == "mark":
        yield scene.marks("delete: mark_retired", "ring")
    elif at == "ring":
        yield scene.step("delete: ring", at="unlock mutex", ring=state.publications)
    elif at == "unlock mutex":
        yield scene.step("delete: unlock the mutex", at="return", owner=False)
    else:
        yield scene.step("delete: return", **DONE._asdict(), acknowledged=state.publications)


# --- sweep and gc -----------------------------------------------------------------------------------------------------


def _sweep(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    drops_first = "row before the unlink" in broken
    if process.at == "start":
        yield scene.step("sweep", at="lock: choose")
    elif process.at == "choose":
        yield from _choose(scene, broken)
    elif process.at == "erase":
        scene.may_write()
        yield scene.step("sweep: erase_put_id", at="drop" if drops_first else "unlink", **scene.with_file(put=0))
    elif process.at == "unlink":
        is_there = state.files[process.file].exists
        changes = scene.with_file(exists=False, state=UNLINKED) if is_there else {}
        yield scene.step("sweep: remove_file", at="unlock mutex" if drops_first else "drop", **changes)
    elif process.at == "drop":
        rows, leases = with_(state.rows, process.file, None), with_(state.leases, process.file, 0)
        yield scene.step("sweep: commit", at="unlink" if drops_first else "unlock mutex", rows=rows, leases=leases)
        yield from scene.fails("sweep: commit", at="raise")
    elif process.at == "raise":
        yield scene.step("sweep: unlock the mutex, to raise", **DONE._asdict())
    elif process.at == "unlock mutex":
        yield scene.step("sweep: unlock the mutex", at="free" if process.lock else "return", owner=False)
    elif process.at == "free":
        scene.may_write()
        yield scene.step("sweep: free_blocks", at="return", **scene.with_file(first=0, second=0))
    else:
        yield scene.step("sweep: return", **DONE._asdict())


def _choose(scene: Scene, broken: frozenset[str]) -> Steps:
    state = scene.state
    yield scene.step("sweep: nothing to do", at="unlock mutex")
    for file, row in enumerate(state.rows):
        if row is None or (row.state == LIVE and "sweep by the wrong table" not in broken):
            continue
        leased = state.leases[file] and "sweep what is leased" not in broken
        locked = scene.is_locked(file) and "sweep without the lock" not in broken
        if not leased and not locked:
            is_there = state.files[file].exists
            at = "erase" if is_there and row.state == RETIRED and "unlink with the put id" not in broken else "unlink"
            if "row before the unlink" in broken and at == "unlink":
                at = "drop"
            yield scene.step("sweep: lock", at=at, file=file, lock="exclusive" if is_there else "")
            if row.held and is_there:
                again = with_(state.rows, file, row._replace(held=False))
                yield scene.step("sweep: _look_again", at="unlock mutex", rows=again)
