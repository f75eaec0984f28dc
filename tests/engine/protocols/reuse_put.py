"""The model's puts: claim, fill, commit, and what a put that failed gives back. See `reuse_model.py`.

A "writer" puts the first key, a "repeater" twice (`reuse_ahead.py`); a "swapper" puts it with `expect_version`, only
over the version that was there first; a "batcher" puts two keys with `put_many`. Of a batch, the file at hand is
`Process.file`; `Process.others` are the rest.
"""

from __future__ import annotations

from tests.engine.protocols.reuse_ahead import AHEAD, ahead_steps, booked, may_look_first
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
    Steps,
    rotated,
    with_,
)
from tests.support.explore import Fault


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
        yield from _ask(scene, broken)
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


def _ask(scene: Scene, broken: frozenset[str]) -> Steps:
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
        yield scene.step("Reuse._ask: lock", at="erase", file=file, lock="exclusive", refused=tuple(refused))
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
