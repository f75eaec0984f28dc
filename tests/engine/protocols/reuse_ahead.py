"""The model's puts in a row: a commit books the file that it replaces as the one that the next put fills.

A "repeater" puts the first key twice. What its first commit replaces is filling by the rows from then on, under the
second put's id; once the commit is done it is locked and erased, if nobody else locks it. Else the row goes back. The
second put needs no claim then; or it doesn't come, and the file is given back. See `reuse_model.py`.
"""

from __future__ import annotations

from tests.engine.protocols.reuse_state import DONE, FILLING, RETIRED, Filling, Row, Scene, State, Steps, with_

AHEAD = ("look", "look away", "lock it", "erase it", "return it", "once more", "give it back", "unlock ahead")

MUTATIONS_AHEAD = {
    "look before the commit": "a commit locks what it replaces for a moment, to see whether anybody else does",
    "lock before the commit": "a commit locks what it replaces before it is replaced",
    "erase without the lock": "ReplacedFile.keep takes a file that others lock",
    "keep the put id ahead": "ReplacedFile.keep doesn't erase the put id",
    "leave it booked": "ReplacedFile.keep doesn't give the row back of a file that others lock",
    "book what is leased": "ReplacedFile.claim doesn't look at leases",
    "no undo": "after_death leaves what was booked ahead as it is",
    "let go of it": "ReplacedFile.keep doesn't keep the lock",
}


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
