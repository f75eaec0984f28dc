"""A model of how segment files are reused: one key, a few files, and processes that may be killed at each step.

Its steps are those of `claim.py` (claim, fill, abandon), `publish.py` (commit), `sweep.py`, `lookup.py` (get),
`recovery.py` and `leases.py`, and are named after the functions there. What the kernel does for a process that dies is
done: its locks and mappings drop, and its mutex passes on, with word of its death. LMDB's transactions are taken as
atomic.

    PUT     _claim_locked | Reuse._ask: lock, erase_put_id, commit row | _create | fill | seal
            _commit_locked | note the batch, go_live: write slots, unlock; commit; clear the note, mark_retired, ring
    GET     read the record, open, lock_shared, compare, map_file; after two misfits all of it under the mutex
    SWEEP   lock, unlink, commit | _look_again: from held back to retired
    LEASE   get, lease, let go; the receiver opens what the lease keeps

`MUTATIONS` are faults that one could make in the code; the tests show that the model finds each.
"""

from __future__ import annotations

from memstore.testing.explore import Fault
from tests.engine.reuse_state import DONE, FILLING, LIVE, RETIRED, File, Row, Scene, State, Steps, with_

MUTATIONS = {
    "claim without the lock": "Reuse._ask takes a file that others lock",
    "keep the put id": "Reuse._ask doesn't erase the put id",
    "compare before the lock": "map_segment reads the header before it has the lock",
    "hold what is unlinked": "map_segment doesn't look whether the file that it locked is still there",
    "no compare": "map_segment doesn't compare the put id",
    "map without the lock": "map_segment gives up the lock when it closes the file",
    "unlock after the commit": "go_live leaves the lock to be given up after the commit, in the mutex",
    "unlock after the mutex": "go_live leaves the lock to be given up when the put is over",
    "go live after the commit": "the header says live only after the catalog does",
    "no note": "the batch is not noted in the lock page",
    "no ring": "the ring sequence is not compared after a death",
    "row before the unlink": "_unlink drops the row, and then the file",
    "sweep without the lock": "_unlink takes files that others lock",
    "sweep what is leased": "_unlink doesn't look at leases",
    "claim what is leased": "Reuse._ask doesn't look at leases",
    "no lock on a new file": "_create doesn't lock",
    "sweep by the wrong table": "_unlink doesn't look at the state of the row",
    "acknowledge before the commit": "a put returns before its transaction is committed",
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
                yield from self._after_death(scene)
            elif process.at.startswith("lock: "):
                yield from self._mutex(scene)
            else:
                yield from getattr(self, f"_{process.role}")(scene)
            if state.kills:
                yield from scene.killed()
        for file, leased in enumerate(state.leases):
            if leased:
                yield "(a lease runs out)", state._replace(leases=with_(state.leases, file, 0))

    # --- the mutex, and what its next owner does for a dead one -------------------------------------------------------

    def _mutex(self, scene: Scene) -> Steps:
        if any(process.owner for process in scene.state.processes):
            return
        at = scene.process.at.removeprefix("lock: ")
        yield scene.step("mutex: lock", at=at, owner=True, recovering=int(scene.state.dirty))

    def _after_death(self, scene: Scene) -> Steps:
        state = scene.state
        if scene.process.recovering == 1:
            files = state.files
            for file, row in enumerate(state.rows):
                if state.note and row and row.state == FILLING and row.batch == state.note and files[file].exists:
                    files = with_(files, file, files[file]._replace(state=FILLING))
            yield scene.step("after_death: headers of the noted batch", recovering=2, files=files, note=0)
        elif scene.process.recovering == 2:
            files = state.files
            if state.ring != state.publications and "no ring" not in self._broken:
                for file, row in enumerate(state.rows):
                    if row and row.state == RETIRED and not row.held and files[file].exists:
                        files = with_(files, file, files[file]._replace(state=RETIRED))
            yield scene.step("after_death: ring", recovering=3, files=files, ring=state.publications)
        else:
            yield scene.step("after_death: done", recovering=0, dirty=False)

    # --- put ----------------------------------------------------------------------------------------------------------

    def _writer(self, scene: Scene) -> Steps:
        """Also with `expect_version`: the role "swapper" publishes only over the version that was there first."""
        state, process = scene.state, scene.process
        broken, file, at = self._broken, process.file, process.at
        if at == "start":
            yield scene.step("put", at="lock: ask")
        elif at == "ask":
            yield from self._claim(scene)
        elif at == "erase":
            scene.may_write()
            erased = state.files[file] if "keep the put id" in broken else state.files[file]._replace(put=0)
            yield scene.step("claim: erase_put_id", at="claim", files=with_(state.files, file, erased))
        elif at == "claim":
            yield from self._commit_claim(scene)
        elif at == "create":
            lock = "" if "no lock on a new file" in broken else "exclusive"
            yield scene.step("claim: _create", at="fill", owner=False, lock=lock, **scene.with_file(exists=True))
        elif at == "fill":
            scene.may_write()
            yield scene.step("fill: one half", at="fill more", **scene.with_file(first=process.put))
        elif at == "fill more":
            scene.may_write()
            yield scene.step("fill: the other", at="seal", **scene.with_file(second=process.put))
        elif at == "seal":
            scene.may_write()
            yield scene.step("seal", at="lock: check", **scene.with_file(put=process.put, state=FILLING))
        else:
            yield from self._commit(scene)

    _swapper = _writer

    def _claim(self, scene: Scene) -> Steps:
        state = scene.state
        refused: list[int] = []
        for file, row in enumerate(state.rows):
            if row is None or row.state != RETIRED or row.held:
                continue
            leased = state.leases[file] and "claim what is leased" not in self._broken
            locked = scene.is_locked(file) and "claim without the lock" not in self._broken
            if leased or locked or not state.files[file].exists:
                refused.append(file)
                continue
            yield scene.step("Reuse._ask: lock", at="erase", file=file, lock="exclusive", refused=tuple(refused))
            return
        fresh = [file for file, row in enumerate(state.rows) if row is None and state.files[file] == File()]
        if fresh:
            yield scene.step("claim: a new file", at="claim", file=fresh[0], refused=tuple(refused))
        else:
            yield scene.step("claim: StoreFullError", **DONE._asdict())

    def _commit_claim(self, scene: Scene) -> Steps:
        state, file = scene.state, scene.process.file
        put = state.number + 1
        rows = with_(state.rows, file, Row(put, FILLING, batch=put))
        for one in scene.process.refused:
            row = rows[one]
            assert row is not None
            rows = with_(rows, one, row._replace(held=True))
        is_new = not state.files[file].exists
        changes = {"rows": rows, "number": put, "put": put, "refused": ()}
        yield scene.step("claim: commit", at="create" if is_new else "fill", owner=is_new, **changes)

    def _commit(self, scene: Scene) -> Steps:
        state, process, broken = scene.state, scene.process, self._broken
        late = "unlock after the commit" in broken, "unlock after the mutex" in broken
        if process.at == "check":
            if process.role == "swapper" and state.publications != 1:
                yield scene.step("commit: VersionConflictError", at="lock: go back", owner=False)
            else:
                note = 0 if "no note" in broken else process.put
                following = "unlock" if "go live after the commit" in broken else "live"
                yield scene.step("commit: note the batch", at=following, note=note)
        elif process.at == "live":
            if process.lock:
                scene.may_write()
            following = "clear" if "go live after the commit" in broken else "unlock"
            yield scene.step("commit: go_live", at=following, **scene.with_file(put=process.put, state=LIVE))
        elif process.at == "unlock":
            yield scene.step("commit: unlock", at="publish", lock=process.lock if any(late) else "")
        elif process.at == "publish":
            yield from self._publish(scene)
        elif process.at == "clear":
            yield scene.step("commit: clear the note", at="mark", note=0, lock="" if late[0] else process.lock)
        elif process.at == "mark":
            yield scene.step("commit: mark_retired", at="ring", files=scene.marked())
        elif process.at == "ring":
            yield scene.step("commit: ring", at="unlock mutex", ring=state.publications)
        elif process.at == "unlock mutex":
            yield scene.step("commit: unlock the mutex", at="acknowledge", owner=False)
        elif process.at == "acknowledge":
            yield scene.step("commit: return", **DONE._asdict(), acknowledged=state.publications)
        else:
            yield from self._abandon(scene)

    def _publish(self, scene: Scene) -> Steps:
        state, process = scene.state, scene.process
        rows = scene.retired(with_(state.rows, process.file, Row(process.put, LIVE)))
        following = "live" if "go live after the commit" in self._broken else "clear"
        changes = {"rows": rows, "record": (process.put, process.file), "publications": state.publications + 1}
        if "acknowledge before the commit" in self._broken:
            changes["acknowledged"] = state.publications + 1
            yield scene.step("commit: return", at="publish", acknowledged=state.publications + 1)
        yield scene.step("commit: the moment of publication", at=following, **changes)
        if state.failures:
            failed = {"owner": False, "dirty": True, "failures": state.failures - 1}
            yield scene.step("(the commit fails)", at="lock: go back", **failed)

    def _abandon(self, scene: Scene) -> Steps:
        state, process = scene.state, scene.process
        row = state.rows[process.file]
        if process.at == "go back" and (row is None or row.put != process.put):
            yield scene.step("abandon: it is swept already", **DONE._asdict())
        elif process.at == "go back":
            yield scene.step("abandon: go_back", at="give back", **scene.with_file(put=0, state=RETIRED))
        elif process.at == "give back":
            assert row is not None
            rows = with_(state.rows, process.file, Row(row.put, RETIRED))
            yield scene.step("abandon: commit", at="close", owner=False, rows=rows)
        else:
            yield scene.step("abandon: close", **DONE._asdict())

    # --- delete -------------------------------------------------------------------------------------------------------

    def _deleter(self, scene: Scene) -> Steps:
        state, process = scene.state, scene.process
        if process.at == "start":
            yield scene.step("delete", at="lock: delete")
        elif process.at == "delete" and state.record[0]:
            changes = {"record": (0, -1), "publications": state.publications + 1, "rows": scene.retired(state.rows)}
            yield scene.step("delete: the moment of publication", at="mark", **changes)
        elif process.at == "delete":
            yield scene.step("delete: KeyNotFoundError", **DONE._asdict())
        elif process.at == "mark":
            yield scene.step("delete: mark_retired", at="ring", files=scene.marked())
        elif process.at == "ring":
            yield scene.step("delete: ring", at="return", owner=False, ring=state.publications)
        else:
            yield scene.step("delete: return", **DONE._asdict(), acknowledged=state.publications)

    # --- sweep and gc -------------------------------------------------------------------------------------------------

    def _sweeper(self, scene: Scene) -> Steps:
        state, process, broken = scene.state, scene.process, self._broken
        if process.at == "start":
            yield scene.step("sweep", at="lock: choose")
        elif process.at == "choose":
            yield scene.step("sweep: nothing to do", **DONE._asdict())
            for file, row in enumerate(state.rows):
                if row is None or (row.state == LIVE and "sweep by the wrong table" not in broken):
                    continue
                leased = state.leases[file] and "sweep what is leased" not in broken
                locked = scene.is_locked(file) and "sweep without the lock" not in broken
                if not leased and not locked:
                    lock = "exclusive" if state.files[file].exists else ""
                    yield scene.step("sweep: lock", at="unlink", file=file, lock=lock)
                    if row.held and state.files[file].exists:
                        again = with_(state.rows, file, row._replace(held=False))
                        yield scene.step("sweep: _look_again", **DONE._asdict(), rows=again)
        elif (process.at == "unlink") is ("row before the unlink" not in broken):
            at = "drop" if process.at == "unlink" else "return"
            yield scene.step("sweep: unlink", at=at, **scene.with_file(exists=False))
        elif process.at in ("unlink", "drop"):
            at = "drop" if process.at == "unlink" else "return"
            leases = with_(state.leases, process.file, 0)
            yield scene.step("sweep: commit", at=at, rows=with_(state.rows, process.file, None), leases=leases)
        else:
            yield scene.step("sweep: return", **DONE._asdict())

    # --- get ----------------------------------------------------------------------------------------------------------

    def _reader(self, scene: Scene) -> Steps:
        """The role "watcher" is a reader in mode "r", which never takes the mutex; "sender" takes a lease."""
        state, process, broken = scene.state, scene.process, self._broken
        put, file = process.put, process.file
        if process.at in ("start", "again", "locked"):
            yield from self._read_record(scene)
        elif process.at == "open":
            if state.files[file].exists:
                yield scene.step("get: open", at="lock" if "compare before the lock" not in broken else "compare")
            else:
                yield from self._misfit(scene)
        elif process.at == "lock":
            if any(other.file == file and other.lock == "exclusive" for other in state.processes):
                yield from self._misfit(scene)
            else:
                at = "map" if {"compare before the lock", "no compare"} & broken else "compare"
                yield scene.step("get: lock_shared", at=at, lock="shared")
        elif process.at == "compare":
            found = state.files[file]
            if found.put == put and (found.exists or "hold what is unlinked" in broken):
                yield scene.step("get: compare", at="lock" if "compare before the lock" in broken else "map")
            else:
                yield from self._misfit(scene)
        elif process.at == "map":
            lock = "" if "map without the lock" in broken else "shared"
            at = "lock: lease" if process.role == "sender" else "hold"
            yield scene.step("get: map_file", at=at, owner=False, lock=lock)
        elif process.at == "hold":
            yield scene.step("let go", **DONE._asdict())
        else:
            yield from self._send(scene)

    _watcher = _sender = _reader

    def _read_record(self, scene: Scene) -> Steps:
        put, file = scene.state.record
        if put:
            yield scene.step("get: read the record", at="open", put=put, file=file)
        else:
            yield scene.step("get: no such key", **DONE._asdict())

    def _misfit(self, scene: Scene) -> Steps:
        process = scene.process
        if process.owner:
            raise Fault("a misfit under the mutex: this is damage")
        if process.role != "watcher":
            at = "lock: locked" if process.tries else "again"
            yield scene.step("get: a misfit", at=at, file=-1, lock="", put=0, tries=1)
        elif process.put == process.before:
            raise Fault("the same misfit twice, so nobody replaced it: this is damage")
        else:
            yield scene.step("get: a misfit", at="again", file=-1, lock="", put=0, before=process.put)

    # --- leases -------------------------------------------------------------------------------------------------------

    def _send(self, scene: Scene) -> Steps:
        state, process = scene.state, scene.process
        row = state.rows[process.file] if process.file >= 0 else None
        if process.at == "lease":
            if row is not None and row.put == process.put:
                leases = with_(state.leases, process.file, process.put)
                yield scene.step("lease", at="sent", owner=False, leases=leases)
            else:
                raise Fault("the row of a version that is held is gone")
        elif process.at == "sent":
            yield scene.step("the sender lets go", at="receive", lock="")
        elif process.at == "receive":
            file = state.files[process.file]
            if file.exists and file.put == process.put and not scene.is_written(process.file):
                yield scene.step("the receiver maps it", at="hold", lock="shared")
            elif state.leases[process.file] == process.put:
                raise Fault("a version is gone before its lease")
            else:
                yield scene.step("the receiver: VersionGoneError", **DONE._asdict())
