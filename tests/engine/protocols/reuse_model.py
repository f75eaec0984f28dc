"""A model of how segment files are reused: a key or two, a few files, and processes that may be killed at each step.

Its steps are those of `put.py` (claim, fill, commit), `sweep.py` (also abandon), `get.py` (get), `recovery.py`
and `reuse.py` (leases), and are named after the functions there. What the kernel does for a process that dies is done:
its locks and mappings drop, and its mutex passes on, with word of its death. LMDB's transactions are taken as atomic.

    PUT     _claim_locked | Reuse._choose: lock, erase_put_id, commit row | _create, lock | unlock the mutex | fill |
            seal
            _commit_locked | note the batch, go_live: write slots, unlock; commit; clear the note;
                             ReplacedFile.keep: lock, vacate, or commit; mark_retired, ring
            claim, next time | take_next_file
            abandon, if a call failed | remove_file, commit | unlock the mutex | free_blocks
                     after a lost race | vacate, commit | unlock the mutex | close
    GET     read the record, open, lock_shared, compare, map_file; after two misfits all of it under the mutex
    SWEEP   lock, erase_put_id, unlink, commit | unlock the mutex | free_blocks | _look_again: from held back to retired
    LEASE   get, lease, let go; the receiver opens what the lease keeps

A put is of one key, or of two at once. Not modelled: files that a large batch parks, several files in one hold of the
sweep, and a recovery that fails.

`MUTATIONS` are faults that one could make in the code; the tests show that the model finds each.
"""

from __future__ import annotations

from tests.engine.protocols.reuse_state import (
    DONE,
    FILLING,
    LIVE,
    RETIRED,
    UNLINKED,
    File,
    Filling,
    Process,
    Row,
    Scene,
    State,
    Steps,
    rotated,
)
from tests.support.explore import Fault, with_

# A "writer" puts the first key, a "repeater" twice; a "swapper" puts it with `expect_version`, only over the version
# that was there first; a "batcher" puts two keys with `put_many`. Of a batch, the file at hand is `Process.file`;
# `Process.others` are the rest. A "reader" may take the mutex; a "watcher", in mode "r", never does. A "sender" gets a
# value and takes a lease, and becomes the "receiver", which maps by what it was sent.
PUTS, GETS = ("writer", "repeater", "swapper", "batcher"), ("reader", "watcher", "sender", "receiver")

MUTATIONS = {
    "claim without the lock": "Reuse._choose takes a file that others lock",
    "keep the put id": "Reuse._choose doesn't erase the put id",
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
    "claim what is leased": "Reuse._choose doesn't look at leases",
    "no lock on a new file": "_create doesn't lock",
    "sweep by the wrong table": "_unlink doesn't look at the state of the row",
    "acknowledge before the commit": "a put returns before its transaction is committed",
    "look before the commit": "a commit locks what it replaces for a moment, to see whether anybody else does",
    "lock before the commit": "a commit locks what it replaces before it is replaced",
    "erase without the lock": "ReplacedFile.keep takes a file that others lock",
    "keep the put id ahead": "ReplacedFile.keep doesn't erase the put id",
    "leave it booked": "ReplacedFile.keep doesn't give the row back of a file that others lock",
    "book what is leased": "ReplacedFile.claim doesn't look at leases",
    "no undo": "after_death leaves what was booked ahead as it is",
    "let go of it": "ReplacedFile.keep doesn't keep the lock",
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


# --- gets and leases --------------------------------------------------------------------------------------------------


def get_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    put, file, at = process.put, process.file, process.at
    compares_first = "compare before the lock" in broken
    if at in ("start", "again", "locked"):
        yield from _read_record(scene)
    elif at == "open":
        if state.files[file].exists:
            yield scene.step("get: open", at="compare" if compares_first else "lock")
        else:
            yield from _misfit(scene)
    elif at == "lock":
        if scene.is_written(file):
            yield from _misfit(scene)
        else:
            following = "map" if compares_first or "no compare" in broken else "compare"
            yield scene.step("get: lock_shared", at=following, lock="shared")
    elif at == "compare":
        if state.files[file].put == put:
            yield scene.step("get: compare", at="lock" if compares_first else "map")
        else:
            yield from _misfit(scene)
    elif at == "map":
        lock = "" if "map without the lock" in broken else "shared"
        yield scene.step("get: map_file", at="unlock get" if process.owner else _then(scene), lock=lock)
    elif at == "unlock get":
        yield scene.step("get: unlock the mutex", at=_then(scene), owner=False)
    elif at == "hold":
        yield scene.step("let go", **DONE._asdict())
    else:
        yield from _send(scene)


def _then(scene: Scene) -> str:
    return "lock: lease" if scene.process.role == "sender" else "hold"


def _read_record(scene: Scene) -> Steps:
    """Of any key. `get_many` reads all at one moment; each of them is then held as if it were alone."""
    for put, file in scene.state.records:
        if put:
            yield scene.step("get: read the record", at="open", put=put, file=file)
        else:
            yield scene.step("get: no such key", **DONE._asdict())


def _misfit(scene: Scene) -> Steps:
    process = scene.process
    let_go = {"file": -1, "lock": "", "put": 0}
    if process.owner:
        raise Fault("a misfit under the mutex: this is damage")
    if process.role == "receiver":
        if scene.state.leases[process.file] == process.put:
            raise Fault("a version is gone before its lease")
        yield scene.step("the receiver: VersionGoneError", **DONE._asdict())
    elif process.role != "watcher":
        at = "lock: locked" if process.tries else "again"
        yield scene.step("get: a misfit", **let_go, at=at, tries=1)
    elif process.put == process.before:
        raise Fault("the same misfit twice, so nobody replaced it: this is damage")
    else:
        yield scene.step("get: a misfit", **let_go, at="again", before=process.put)


def _send(scene: Scene) -> Steps:
    state, process = scene.state, scene.process
    row = state.rows[process.file]
    if process.at == "lease":
        if row is None or row.put != process.put:
            raise Fault("the row of a version that is held is gone")
        leases = with_(state.leases, process.file, process.put)
        yield scene.step("lease: commit", at="unlock lease", leases=leases)
        yield from scene.fails("lease: commit", at="raise")
    elif process.at == "unlock lease":
        yield scene.step("lease: unlock the mutex", at="sent", owner=False)
    elif process.at == "raise":
        yield scene.step("lease: unlock the mutex, to raise", **DONE._asdict())
    else:
        yield scene.step("lease: the sender lets go", role="receiver", at="open", lock="")


# --- puts: claim, fill, commit, and what a put that failed gives back -------------------------------------------------


def put_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    at = scene.process.at
    if at == "start":
        yield scene.step("put", at="lock: ask")
    elif at in AHEAD:
        yield from ahead_steps(scene, broken)
    elif at in ("ask", "erase", "claim", "create", "lock new", "unlock claim"):
        yield from _claim(scene, broken)
    elif at in ("fill", "fill more", "seal"):
        yield from _fill(scene)
    elif at in ("remove", "go back", "give back", "unlock it", "free", "close"):
        yield from _abandon(scene)
    elif at.startswith("raise: "):
        then = at.removeprefix("raise: ")
        following = DONE._asdict() if then == "done" else {"at": f"lock: {then}", "owner": False}
        yield scene.step("put: unlock the mutex, to raise", **following)
    else:
        yield from _commit(scene, broken)


# --- claim and fill ---------------------------------------------------------------------------------------------------


def _claim(scene: Scene, broken: frozenset[str]) -> Steps:
    file, at = scene.process.file, scene.process.at
    if at == "ask":
        yield from _choose_retired(scene, broken)
    elif at == "erase":
        scene.may_write()
        erased = {} if "keep the put id" in broken else {"put": 0}
        yield scene.step("claim: erase_put_id", at="claim", **scene.with_file(**erased))
    elif at == "claim":
        yield from _commit_claim(scene, broken)
    elif at == "create":
        yield scene.step("claim: _create", at="lock new", **scene.with_file(exists=True))
    elif at == "lock new":
        if scene.is_locked(file):
            raise Fault("a file is new, and locked")
        lock = "" if "no lock on a new file" in broken else "exclusive"
        yield scene.step("claim: _create, lock", at="unlock claim", lock=lock)
        yield from scene.fails("claim: _create", **_claim_failed(scene.process))
    else:
        yield scene.step("claim: unlock the mutex", at="fill", owner=False)


def _choose_retired(scene: Scene, broken: frozenset[str]) -> Steps:
    state = scene.state
    refused: list[int] = []
    for file, row in enumerate(state.rows):
        if row is None or row.state != RETIRED or row.held:
            continue
        leased = state.leases[file] and "claim what is leased" not in broken
        locked = scene.is_locked(file) and "claim without the lock" not in broken
        if leased or locked or not state.files[file].exists:
            refused.append(file)
            continue
        yield scene.step("Reuse._choose: lock", at="erase", file=file, lock="exclusive", refused=tuple(refused))
        return
    fresh = [file for file, row in enumerate(state.rows) if row is None and state.files[file] == File()]
    if fresh:
        yield scene.step("claim: a new file", at="claim", file=fresh[0], refused=tuple(refused))
    else:
        yield scene.step("claim: StoreFullError", **_claim_failed(scene.process))


def _commit_claim(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    put = state.number + 1
    batch = process.others[0].put if process.others and "a batch for each" not in broken else put
    rows = with_(state.rows, process.file, Row(put, FILLING, batch))
    for one in process.refused:
        row = rows[one]
        assert row is not None
        rows = with_(rows, one, row._replace(held=True))
    at = "unlock claim" if state.files[process.file].exists else "create"
    yield scene.step("claim: commit", at=at, rows=rows, number=put, put=put, refused=())
    yield from scene.fails("claim: commit", **_claim_failed(process))


def _claim_failed(process: Process) -> dict[str, object]:
    """What it locked is let go; what a batch has filled before is to be given back. A row may stay, for the sweep."""
    return {**_NO_FILE, "at": "raise: remove" if process.others else "raise: done", "refused": ()}


def _fill(scene: Scene) -> Steps:
    process = scene.process
    scene.may_write()
    if process.at == "fill":
        yield scene.step("fill: one half", at="fill more", **scene.with_file(first=process.put))
    elif process.at == "fill more":
        yield scene.step("fill: the other", at="seal", **scene.with_file(second=process.put))
        yield from scene.fails("fill", at="lock: remove")
    else:
        written = scene.with_file(put=process.put, state=FILLING)
        if process.role == "batcher" and not process.others:
            first = Filling(process.file, process.lock, process.put)
            yield scene.step("seal, and the next", **{**_NO_FILE, "others": (first,)}, at="lock: ask", **written)
        else:
            yield scene.step("seal", at="lock: check", **written)


_NO_FILE = {"file": -1, "lock": "", "put": 0}


# --- commit -----------------------------------------------------------------------------------------------------------


def _commit(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    at = process.at
    is_late = "go live after the commit" in broken
    keep_until = {"unlock after the commit": "clear", "unlock after the mutex": "acknowledge"}
    unlock_at = next((keep_until[name] for name in broken & keep_until.keys()), "unlock")
    if at == "check" and process.role == "swapper" and state.publications != 1:
        yield scene.step("commit: VersionConflictError", at="raise: go back")
    elif at == "check":
        first = {**rotated(process), "note": 0 if "no note" in broken else (process.others or (process,))[0].put}
        yield scene.step("commit: note the batch", **first, at="unlock" if is_late else "live")
    elif at == "live":
        if process.lock:
            scene.may_write()
        live = scene.with_file(put=process.put, state=LIVE)
        following = scene.following("live", "clear") if is_late else {"at": "unlock"}
        yield scene.step("commit: go_live", **following, **live)
        yield from scene.fails("commit: go_live", at="raise: remove")
    elif at == "unlock":
        lock = "" if unlock_at == "unlock" else process.lock
        then = "look" if may_look_first(scene, broken) else "publish"
        yield scene.step("commit: unlock", **scene.following("unlock" if is_late else "live", then, lock=lock))
    elif at == "publish":
        yield from _publish(scene, "live" if is_late else "clear", broken)
    elif at == "clear":
        then = "lock it" if process.ahead else "mark"
        yield scene.step("commit: clear the note", at=then, note=0, lock="" if unlock_at == "clear" else process.lock)
    elif at == "mark":
        yield scene.marks("commit: mark_retired", "ring")
    elif at == "ring":
        yield scene.step("commit: ring", at="unlock mutex", ring=state.publications)
    elif at == "unlock mutex":
        yield scene.step("commit: unlock the mutex", at="acknowledge", owner=False)
    elif process.role == "repeater" and not process.tries:
        again = {**_NO_FILE, "at": "once more", "tries": 1}
        yield scene.step("commit: return", **again, acknowledged=state.publications)
    else:
        yield scene.step("commit: return", **DONE._asdict(), acknowledged=state.publications)


def _publish(scene: Scene, then: str, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    rows, records = scene.retired(state.rows, len(process.others) + 1), state.records
    for key, (file, _, put) in enumerate([Filling(process.file, process.lock, process.put), *process.others]):
        rows = with_(rows, file, Row(put, LIVE))
        records = with_(records, key, (put, file))
    changes = {"rows": rows, "records": records, "publications": state.publications + 1}
    changes |= booked(scene, rows, broken)
    if "acknowledge before the commit" in broken:
        changes["acknowledged"] = state.publications + 1
        yield scene.step("commit: return", at="publish", acknowledged=state.publications + 1)
    yield scene.step("commit: the moment of publication", at=then, **changes)
    yield from scene.fails("commit", at="raise: remove")


# --- what a put that failed gives back --------------------------------------------------------------------------------


def _abandon(scene: Scene) -> Steps:
    """A lost race of compare-and-swaps keeps the file, to be used again; any other failure removes it."""
    state, process = scene.state, scene.process
    file, at = process.file, process.at
    row = state.rows[file] if file >= 0 else None
    if at == "remove" and (row is None or row.put != process.put or row.state != FILLING):
        name = "abandon: it is swept already" if process.put else "abandon: a claim that failed"
        yield scene.step(name, **scene.following(at, "give back", **_NO_FILE))
    elif at == "remove":
        gone = scene.with_file(exists=False, state=UNLINKED)
        yield scene.step("abandon: remove_file", **scene.following(at, "give back"), **gone)
    elif at == "go back":
        scene.may_write()
        yield scene.step("abandon: vacate", at="give back", **scene.with_file(put=0, state=RETIRED))
    elif at == "give back":
        rows = state.rows
        for one, _, put in (Filling(file, process.lock, process.put), *process.others):
            if one >= 0:
                rows = with_(rows, one, Row(put, RETIRED) if state.files[one].exists else None)
        yield scene.step("abandon: commit", at="unlock it", rows=rows)
        yield from scene.fails("abandon: commit", at="raise: done")
    elif at == "unlock it":
        is_kept = file >= 0 and state.files[file].exists
        yield scene.step("abandon: unlock the mutex", at="close" if is_kept else "free", owner=False)
    elif at == "free":
        empty = scene.with_file(first=0, second=0) if file >= 0 else {}
        yield scene.step("abandon: free_blocks", **scene.following(at, "close"), **empty)
    else:
        yield scene.step("abandon: close", **DONE._asdict())


# --- puts in a row ----------------------------------------------------------------------------------------------------

# A commit books the file that it replaces as the one that the next put fills. A "repeater" puts the first key twice.
# What its first commit replaces is filling by the rows from then on, under the second put's id; once the commit is done
# it is locked and erased, if nobody else locks it. Else the row goes back. The second put needs no claim then; or it
# doesn't come, and the file is given back.

AHEAD = ("look", "look away", "lock it", "erase it", "return it", "once more", "give it back", "unlock ahead")


def may_look_first(scene: Scene, broken: frozenset[str]) -> bool:
    return _may_book(scene, broken) and bool({"look before the commit", "lock before the commit"} & broken)


def _may_book(scene: Scene, broken: frozenset[str]) -> bool:
    state, process = scene.state, scene.process
    put, file = state.records[0]
    if process.role != "repeater" or process.tries or not put:
        return False
    return not state.leases[file] or "book what is leased" in broken


def booked(scene: Scene, rows: tuple[Row | None, ...], broken: frozenset[str]) -> dict[str, object]:
    """What the transaction of a commit does beside, for the put after it."""
    if not _may_book(scene, broken):
        return {}
    file, put = scene.state.records[0][1], scene.state.number + 1
    ahead = Filling(file, "exclusive" if scene.process.ahead else "", put)
    return {"rows": with_(rows, file, Row(put, FILLING, put)), "number": put, "ahead": (ahead,)}


def ahead_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    at = process.at
    if at in ("look", "look away"):
        yield _look(scene, at, broken)
    elif at == "once more":
        yield from _once_more(scene)
    elif at == "give it back":
        (ahead,) = process.ahead
        rows = with_(state.rows, ahead.file, Row(ahead.put, RETIRED))
        yield scene.step("give_back: commit", at="unlock ahead", rows=rows)
        yield from scene.fails("give_back: commit", at="raise: done")
    elif at == "unlock ahead":
        yield scene.step("give_back: unlock the mutex", **DONE._asdict())
    else:
        yield from _settle(scene, broken)


def _look(scene: Scene, name: str, broken: frozenset[str]) -> tuple[str, State]:
    """Whether others lock what is still live: only a broken commit does so."""
    old = scene.state.records[0][1]
    if name == "look away" or scene.is_locked(old):
        return scene.step(name, at="publish", ahead=())
    locked = Filling(old, "exclusive", 0)
    return scene.step(name, at="publish" if "lock before the commit" in broken else "look away", ahead=(locked,))


def _settle(scene: Scene, broken: frozenset[str]) -> Steps:
    """After the commit, within its hold of the mutex."""
    state, process = scene.state, scene.process
    (ahead,) = process.ahead
    if process.at == "lock it" and scene.is_locked(ahead.file) and "erase without the lock" not in broken:
        is_left = "leave it booked" in broken
        yield scene.step("settle: it is locked", **({"at": "mark", "ahead": ()} if is_left else {"at": "return it"}))
    elif process.at == "lock it":
        yield scene.step("settle: lock", at="erase it", ahead=(ahead._replace(lock="exclusive"),))
    elif process.at == "return it":
        yield scene.step("settle: commit", at="mark", rows=scene.unbooked(ahead.file), ahead=())
        yield from scene.fails("settle: commit", at="unlock mutex", ahead=())
    else:
        put = {} if "keep the put id ahead" in broken else {"put": 0}
        erased = with_(state.files, ahead.file, state.files[ahead.file]._replace(**put, state=RETIRED))
        kept = ahead._replace(lock="") if "let go of it" in broken else ahead
        yield scene.step("settle: vacate", at="mark", files=erased, ahead=(kept,))


def kept(scene: Scene) -> tuple[str, State]:
    """A put that doesn't get the mutex to publish, in time."""
    process = scene.process
    ahead = Filling(process.file, process.lock, process.put)
    changes = {"file": -1, "lock": "", "put": 0, "ahead": (ahead,)}
    return scene.step("keep: StoreTimeoutError", at="once more", tries=1, **changes)


def _once_more(scene: Scene) -> Steps:
    if not scene.process.ahead:
        yield scene.step("put: once more", at="lock: ask")
    for ahead in scene.process.ahead:
        yield scene.step("claim: what is kept", **ahead._asdict(), at="fill", ahead=())
        yield scene.step("give_back", at="lock: give it back")
