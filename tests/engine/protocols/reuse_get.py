"""The model's gets and leases. See `reuse_model.py`.

A "reader" may take the mutex; a "watcher", in mode "r", never does. A "sender" gets a value and takes a lease, and
becomes the "receiver", which maps by what it was sent.
"""

from __future__ import annotations

from tests.engine.protocols.reuse_state import DONE, Scene, Steps, with_
from tests.support.explore import Fault


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
