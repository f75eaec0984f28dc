"""A model of attempts: ranks that put parts of one value, and may time out, restart or be killed at each step.

The rules are those of docs/decisions/012-attempts.md. What the kernel does for a process that dies is done: its locks
drop, and its mutex passes on, with word of its death. LMDB's transactions are taken as atomic. Files are not used again
here: `reuse_model.py` has that, and what a sweep may claim it may unlink as well.

    RANK      claim | fill, seal | prepare: commit, unlock the file, ring | look | merge
              publish: check, note the batch, go_live one by one, commit, clear the note, mark_retired, ring
              give up: check, commit, ring
    OTHERS    a sweeper (ends attempts, drops outcomes, unlinks), a writer, a deleter, an aborter
    RECOVERY  drop what is of another boot | headers of parts back to filling | clear the note | mark_retired, ring

Time is not counted: an attempt or an outcome may be over at any moment. So a rank may find that its attempt is neither
pending nor has an outcome; and all else holds whatever the expiries are.

Ranks have modules of their own beside this one: `attempts_rank.py` (rule 1, waiting, what the caller sees) and
`attempts_publish.py` (rules 2 and 3). What must hold stands in `attempts_check.py`, and where a step would break it.

`MUTATIONS` are faults that one could make in the code; the tests show that the model finds each.
"""

from __future__ import annotations

from tests.engine.protocols.attempts_rank import rank_steps
from tests.engine.protocols.attempts_state import (
    DONE,
    FILLING,
    LIVE,
    RETIRED,
    Scene,
    State,
    Steps,
    ended,
    outcome_of,
    page_written_anew,
    parts_of,
    stale,
    unlinked,
    with_header,
    with_rows,
)

MUTATIONS = {
    "publish without a look": "a publication looks neither at outcomes nor whether the parts are still the merged ones",
    "prepare without a look at outcomes": "a part that comes after the end begins the attempt anew",
    "give up without a look": "a timeout ends what was published",
    "give up in silence": "a rank whose timeout is over raises, and leaves the parts",
    "end without an outcome": "the parts go, and no outcome comes",
    "end by an old merge": "parts that disagreed end the attempt, though one of them was replaced",
    "publish any version": "the version that the parts expect is not compared at the commit",
    "keep a replaced part": "a rank that puts again has two parts",
    "leave older attempts": "a publication leaves older attempts of the key pending",
    "older by the put id": "an attempt is older if its first part's put id is less",
    "a new number with a new part": "an attempt whose only part is replaced counts as begun anew",
    "no number of the attempt": "a rank takes any attempt of that name for its own",
    "sleep until it rings": "a rank that sleeps leaves it to others to find that an owner died",
    "an end is no publication": "an end rings, and a death before that is not seen",
    "a completing part is no publication": "a part that completes an attempt rings, as above",
    "a publication is not counted": "a publication rings, and a death before that is not seen",
    "the expiry of the newest": "a part may bring the expiry of its attempt forward",
    "forget the leases": "an outcome may be dropped before the leases of its parts are over",
    "no note": "the batch is not noted in the lock page",
    "recover by `filling` only": "the next owner leaves the headers of parts as they are",
    "no look at a new page": "a lock page that was written anew has no note, so the headers of parts stay as they are",
    "unlock the file after the mutex": "a part's file is unlocked after the mutex",
    "parts outlive a reboot": "the first owner after a reboot leaves parts and outcomes as they are",
    "sweep what is prepared": "a sweep takes prepared segments for those of dead writers",
}


class Model:
    """The steps that each process may take, and what must hold in each state."""

    def __init__(self, *mutations: str) -> None:
        assert set(mutations) <= set(MUTATIONS)
        self._broken = frozenset(mutations)

    def successors(self, state: State) -> Steps:
        for index, process in enumerate(state.processes):
            if process == DONE:
                continue
            scene = Scene(state, index)
            if process.recovering:
                yield from _after_death(scene, self._broken)
            elif process.at.startswith("lock: "):
                yield from _mutex(scene)
            elif process.role == "rank":
                yield from rank_steps(scene, self._broken)
            else:
                yield from _other_steps(scene, self._broken)
            if state.kills:
                yield from scene.killed()
        if state.reboots:
            yield "(reboot)", page_written_anew(state, state.boot + 1)
            yield "(the next process has another pid namespace)", page_written_anew(state, state.boot)


def _mutex(scene: Scene) -> Steps:
    state, process = scene.state, scene.process
    if not any(other.owner for other in state.processes):
        at = process.at.removeprefix("lock: ")
        yield scene.step("mutex: lock", at=at, owner=True, recovering=int(state.dirty))
    elif process.role == "rank":
        then = {"lock: prepare": "abandon", "lock: publish": "lock: end"}.get(process.at, "unknown")
        yield from scene.fails("mutex: lock", at=then, error="timeout")


def _after_death(scene: Scene, broken: frozenset[str]) -> Steps:
    state, at = scene.state, scene.process.recovering
    if at == 1:
        is_kept = "parts outlive a reboot" in broken or not state.new
        name = "after_death: look" if is_kept else "after_death: drop what is of another boot"
        yield scene.step(name, state if is_kept else _without_other_boots(state), recovering=2)
    elif at == 2:
        is_noted = state.note or (state.new and "no look at a new page" not in broken)
        parts = [part.put for part in state.pending if state.files[part.put].header == LIVE]
        if is_noted and parts and "recover by `filling` only" not in broken:
            yield scene.step("after_death: a header of a part", with_header(state, parts[0], FILLING))
        else:
            yield scene.step("after_death: clear the note", state._replace(note=0), recovering=3)
    elif at == 3 and state.owed and stale(state):
        yield scene.step("after_death: mark_retired", with_header(state, stale(state)[0], RETIRED))
    elif at == 3 and state.owed:
        yield scene.ring("after_death: ring", recovering=4)
    else:
        yield scene.step("after_death: done", state._replace(dirty=False, new=False), recovering=0)


def _without_other_boots(state: State) -> State:
    old = [part.put for part in state.pending if part.boot != state.boot]
    dropped = state.dropped | {one.begun for one in (*state.pending, *state.outcomes) if one.boot != state.boot}
    state = with_rows(state, old, RETIRED)
    return state._replace(
        pending=tuple(part for part in state.pending if part.boot == state.boot),
        outcomes=tuple(outcome for outcome in state.outcomes if outcome.boot == state.boot),
        dropped=dropped,
        owed=state.owed or bool(old),
    )


# --- others -----------------------------------------------------------------------------------------------------------


def _other_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "start":
        yield scene.step(process.role, at="lock: act")
    elif process.at == "act":
        yield from {"sweeper": _sweep, "aborter": _abort}.get(process.role, _change)(scene, broken)
    elif process.at == "mark":
        for put in stale(state)[:1]:
            state = with_header(state, put, RETIRED)
        yield scene.step(f"{process.role}: mark_retired", state, at="mark" if stale(state) else "ring")
    elif process.at == "ring":
        yield scene.ring(f"{process.role}: ring", at="release")
    else:
        yield scene.finish(f"{process.role}: unlock the mutex")


def _change(scene: Scene, broken: frozenset[str]) -> Steps:
    """A plain put, inline, or a delete, which leave pending parts alone."""
    state, role = scene.state, scene.process.role
    version = 0 if role == "deleter" else state.version + 1
    following = with_rows(state, state.record[1], RETIRED)
    following = following._replace(record=(version, ()), version=max(version, state.version), owed=True)
    yield scene.step(f"{role}: the moment of publication", following, at="mark")


def _abort(scene: Scene, broken: frozenset[str]) -> Steps:
    state, attempt = scene.state, scene.process.attempt
    if parts_of(state, attempt) and not outcome_of(state, attempt):
        following = ended(state, attempt, "aborted")
        if "an end is no publication" in broken:
            following = following._replace(owed=state.owed)
        yield scene.step("abort: commit", following, at="ring")
    else:
        yield scene.step("abort: nothing to end", at="release")


def _sweep(scene: Scene, broken: frozenset[str]) -> Steps:
    """Again and again; it may stop after each."""
    state = scene.state
    yield scene.step("sweep: no more", at="release")
    if state.expiries:
        for attempt in sorted({part.attempt for part in state.pending if not part.expires}):
            over = ended(state, attempt, "expired")
            yield scene.step("(sweep: an attempt is over)", over._replace(expiries=state.expiries - 1), at="ring")
    if state.drops:
        for outcome in [outcome for outcome in state.outcomes if not outcome.expires]:
            rest = tuple(one for one in state.outcomes if one != outcome)
            dropped = state._replace(outcomes=rest, dropped=state.dropped | {outcome.begun}, drops=state.drops - 1)
            yield scene.step("(sweep: an outcome is over)", dropped)
    dead = [put for put, file in enumerate(state.files) if file.row == FILLING and not file.locked]
    if "sweep what is prepared" in broken:
        dead += [part.put for part in state.pending]
    if dead:
        yield scene.step("sweep: what a dead writer left", unlinked(state, dead[0]))
    retired = [put for put, file in enumerate(state.files) if file.row == RETIRED]
    if retired:
        yield scene.step("sweep: a retired file", unlinked(state, retired[0]))
