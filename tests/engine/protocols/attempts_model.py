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

What must hold stands in `attempts_state.py`, and where a step would break it.

`MUTATIONS` are faults that one could make in the code; the tests show that the model finds each.
"""

from __future__ import annotations

from tests.engine.protocols.attempts_state import (
    ANY,
    DONE,
    FILLING,
    LIVE,
    PREPARED,
    RETIRED,
    File,
    Outcome,
    Part,
    Published,
    Scene,
    State,
    Steps,
    are_all_there,
    ended,
    is_answer_due,
    is_of,
    outcome_of,
    page_written_anew,
    parts_of,
    stale,
    unlinked,
    with_header,
    with_rows,
)
from tests.support.explore import Fault, with_

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


# --- ranks: they prepare a part (rule 1), wait, and return or raise ---------------------------------------------------


def rank_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    at = scene.process.at
    if at in ("start", "fill", "prepare", "unlock file", "commit part", "ring part", "release part", "abandon"):
        yield from _prepare(scene, broken)
    elif at in ("look", "asleep", "merge"):
        yield from _wait(scene, broken)
    elif at in ("end", "release: end"):
        yield from give_up_steps(scene, broken)
    elif at in ("answer", "unknown"):
        yield from _answer(scene)
    elif at.startswith("release: "):
        yield scene.step("unlock the mutex", at=at.removeprefix("release: "), owner=False)
    else:
        yield from publish_steps(scene, broken)


# --- rule 1 -----------------------------------------------------------------------------------------------------------


def _prepare(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process, put = scene.state, scene.process, scene.index
    file = state.files[put]
    if process.at == "start":
        # a hold of its own, which the model of reuse has; so has `abandon`
        claimed = with_rows(state, [put], FILLING)
        claimed = claimed._replace(files=with_(claimed.files, put, File(FILLING, FILLING, locked=True)))
        yield scene.step("claim", claimed, at="fill")
    elif process.at == "fill":
        yield scene.step("fill, seal", at="lock: prepare")
        yield from scene.fails("fill", at="abandon", error="failed")
    elif process.at == "prepare":
        yield _check_part(scene, broken)
    elif process.at == "unlock file":
        unlocked = state._replace(files=with_(state.files, put, file._replace(locked=False)))
        yield scene.step("prepare: unlock the file", unlocked, at="commit part" if process.owner else "look")
    elif process.at == "commit part":
        yield from _commit_part(scene, broken)
    elif process.at == "ring part":
        yield scene.ring("prepare: ring", at="release part")
    elif process.at == "release part":
        at = "unlock file" if file.locked else "look"
        yield scene.step("prepare: unlock the mutex", at=at, owner=False)
    else:
        if file.row == FILLING:
            state = unlinked(state, put)
        at = "answer" if process.answer else "lock: end"
        yield scene.step("abandon", state, at=at)


def _check_part(scene: Scene, broken: frozenset[str]) -> tuple[str, State]:
    state, process = scene.state, scene.process
    outcome, parts = outcome_of(state, process.attempt), parts_of(state, process.attempt)
    if outcome and "prepare without a look at outcomes" not in broken:
        return scene.step("prepare: there is an outcome", at="release: abandon", answer=outcome, begun=outcome.begun)
    if parts and parts[0].world != process.world:
        refused = Outcome(process.attempt, 0, 0, "world size", 0, state.boot)
        return scene.step("prepare: refused", at="release: abandon", answer=refused)
    is_late = "unlock the file after the mutex" in broken
    return scene.step("prepare: check", at="commit part" if is_late else "unlock file")


def _commit_part(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process, put = scene.state, scene.process, scene.index
    parts = parts_of(state, process.attempt)
    begun = parts[0].begun if parts else state.begun + 1
    others = tuple(part for part in parts if part.rank != process.rank or "keep a replaced part" in broken)
    replaced = [part.put for part in parts if part not in others]
    if replaced and not others and "a new number with a new part" in broken:
        begun = state.begun + 1
    latest = max([process.lease, *(part.expires for part in parts)])
    expires = process.lease if "the expiry of the newest" in broken else latest
    part = Part(
        process.attempt,
        process.rank,
        put,
        process.world,
        begun,
        process.expect,
        process.shape,
        process.lease,
        expires,
        state.boot,
    )
    mine = (*(other._replace(expires=expires) for other in others), part)
    following = with_rows(with_rows(state, replaced, RETIRED), [put], PREPARED)
    rest = tuple(one for one in state.pending if one.attempt != process.attempt)
    following = following._replace(pending=tuple(sorted((*rest, *mine))), begun=max(state.begun, begun))
    if are_all_there(mine) and "a completing part is no publication" not in broken:
        following = following._replace(owed=True)
    at = "ring part" if are_all_there(mine) else "release part"
    yield scene.step("prepare: commit", following, at=at, begun=begun)
    yield from scene.fails("prepare: commit", at="release: abandon", error="failed")


# --- a rank waits -----------------------------------------------------------------------------------------------------


def _wait(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "merge":
        shapes = {part.shape for part in process.merged}
        yield scene.step("merge", at="lock: publish", error="mismatch" if len(shapes) > 1 else "")
        return
    is_due = is_answer_due(state, process)
    if process.at == "look":
        yield _look(scene, broken)
    elif is_due and state.dirty and "sleep until it rings" not in broken:
        yield scene.step("wait: a second is over", at="lock: release: look")
    if process.waits:
        yield scene.step("(timeout)" if is_due else "timeout", at="lock: end", error="timeout")
    else:
        yield scene.finish("exit")


def _look(scene: Scene, broken: frozenset[str]) -> tuple[str, State]:
    """At one moment of the catalog, without the mutex."""
    state, process = scene.state, scene.process
    outcome, parts = outcome_of(state, process.attempt), parts_of(state, process.attempt)
    if outcome and is_of(outcome.begun, scene, broken):
        return scene.step("look: an outcome", at="answer", answer=outcome)
    if parts and is_of(parts[0].begun, scene, broken):
        if are_all_there(parts):
            return scene.step("look: all parts", at="merge", merged=parts)
        return scene.step("look: nothing yet", at="asleep")
    if "no number of the attempt" in broken:
        return scene.step("look: nothing yet", at="asleep")
    return scene.step("look: neither its attempt nor an outcome", at="unknown")


# --- what the caller sees ---------------------------------------------------------------------------------------------


def _answer(scene: Scene) -> Steps:
    state, process, answer = scene.state, scene.process, scene.process.answer
    if process.at == "unknown" or answer is None:
        if not state.failed and process.begun not in state.dropped:
            raise Fault("a rank can't tell what became of its attempt, though the outcome was not dropped")
        if not state.failed and process.lease:
            raise Fault("an outcome is dropped before the lease of a part is over")
        yield scene.finish("raise UnknownOutcomeError")
        return
    begun = process.begun or answer.begun
    versions = [one.version for one in state.published if one.begun == begun]
    if answer.version:
        if versions != [answer.version]:
            raise Fault("a rank returns a version that its attempt never was")
        yield scene.finish("return the version")
    elif versions:
        raise Fault("a rank raises that the attempt ended, and it was published")
    else:
        raised = state.raised | {begun} if begun else state.raised
        yield scene.finish(f"raise: {answer.error}", state._replace(raised=raised))


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def publish_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "publish":
        yield from _check_publish(scene, broken)
    elif process.at == "live":
        put, turn = process.merged[process.turn].put, process.turn + 1
        is_last = turn == len(process.merged)
        live = with_header(state, put, LIVE)
        yield scene.step("publish: go_live", live, at="commit" if is_last else "live", turn=0 if is_last else turn)
        yield from scene.fails("publish: go_live", at="release: lock: end", error="failed", turn=0)
    elif process.at == "commit":
        following = _published(state, process.merged, broken)
        assert following.outcomes
        outcome = outcome_of(following, process.attempt)
        yield scene.step("publish: the moment of publication", following, at="clear", answer=outcome)
        yield from scene.fails("publish: commit", at="release: lock: end", error="failed")
    elif process.at == "clear":
        yield scene.step("publish: clear the note", state._replace(note=0), at="mark")
    elif process.at == "mark":
        for put in stale(state)[:1]:
            state = with_header(state, put, RETIRED)
        yield scene.step("publish: mark_retired", state, at="mark" if stale(state) else "ring")
    else:
        yield scene.ring("publish: ring", at="release: answer")


def _check_publish(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    outcome, parts = outcome_of(state, process.attempt), parts_of(state, process.attempt)
    looks = "publish without a look" not in broken
    if outcome and outcome.begun == process.begun and looks:
        yield scene.step("publish: there is an outcome", at="release: answer", answer=outcome)
    elif process.error and (parts == process.merged or "end by an old merge" in broken):
        yield from _end(scene, broken)
    elif parts != process.merged and looks:
        yield scene.step("publish: the parts are others", at="release: look", error="", merged=())
    elif any(part.expect not in (ANY, state.record[0]) for part in parts) and "publish any version" not in broken:
        yield from _end(scene.with_error("conflict"), broken)
    else:
        note = 0 if "no note" in broken else process.merged[0].put + 1
        yield scene.step("publish: note the batch", state._replace(note=note), at="live")


def _published(state: State, parts: tuple[Part, ...], broken: frozenset[str]) -> State:
    attempt, begun = parts[0].attempt, parts[0].begun
    puts, version = tuple(part.put for part in parts), state.version + 1
    expires = 0 if "forget the leases" in broken else parts[0].expires
    one = Published(attempt, begun, version, parts)
    _check_published(state, one)
    older = {part.attempt: part for part in state.pending if part.attempt != attempt}.values()
    for part in older:
        is_older = part.put < puts[0] if "older by the put id" in broken else part.begun < begun
        if is_older and "leave older attempts" not in broken:
            state = ended(state, part.attempt, "superseded")
    state = with_rows(with_rows(state, state.record[1], RETIRED), puts, LIVE)
    outcomes = [one for one in state.outcomes if one.attempt != attempt]
    return state._replace(
        pending=tuple(part for part in state.pending if part.attempt != attempt),
        outcomes=tuple(sorted((*outcomes, Outcome(attempt, begun, version, "", expires, state.boot)))),
        record=(version, puts),
        version=version,
        owed="a publication is not counted" not in broken,
        published=(*state.published, one),
    )


def _check_published(state: State, one: Published) -> None:
    if sorted(part.rank for part in one.parts) != list(range(one.parts[0].world)):
        raise Fault("a version without a part of each rank, or with two of one")
    if {(part.attempt, part.begun, part.boot) for part in one.parts} != {(one.attempt, one.begun, state.boot)}:
        raise Fault("a version of parts of two attempts")
    if any(part not in state.pending or state.files[part.put].row != PREPARED for part in one.parts):
        raise Fault("a version of parts that are no more")
    if len({part.shape for part in one.parts}) > 1:
        raise Fault("a version of parts that disagree")
    if any(part.expect not in (ANY, state.record[0]) for part in one.parts):
        raise Fault("a version in place of another than was expected")
    if one.begun in state.raised:
        raise Fault("an attempt is published, and a rank raised that it never will be")
    for before in state.published:
        if before.begun == one.begun:
            raise Fault("an attempt is published twice")
        if before.begun > one.begun:
            raise Fault("an older attempt is published over a newer one")
        if before.version >= one.version:
            raise Fault("a version is not newer than those before")


# --- rule 3 -----------------------------------------------------------------------------------------------------------


def give_up_steps(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if process.at == "release: end":
        yield scene.ring("give up: ring", at="release: answer")
        return
    outcome, parts = outcome_of(state, process.attempt), parts_of(state, process.attempt)
    is_first = not process.begun  # it failed before it had a part
    if "give up without a look" in broken:
        yield from _end(scene, broken)
    elif outcome and (is_first or is_of(outcome.begun, scene, broken)):
        yield scene.step("give up: there is an outcome", at="release: answer", answer=outcome, begun=outcome.begun)
    elif is_first or (parts and is_of(parts[0].begun, scene, broken)) or "no number of the attempt" in broken:
        yield from _end(scene, broken)
    else:
        yield scene.step("give up: neither its attempt nor an outcome", at="release: unknown")


def _end(scene: Scene, broken: frozenset[str]) -> Steps:
    state, process = scene.state, scene.process
    if "give up in silence" in broken:  # the rank raises, and tells nobody
        silent = Outcome(process.attempt, process.begun, 0, process.error, 0, state.boot)
        yield scene.step("give up in silence", at="release: answer", answer=silent)
        return
    following = ended(state, process.attempt, process.error, process.lease)
    outcome = outcome_of(following, process.attempt)
    assert outcome
    begun = process.begun or outcome.begun
    if "end without an outcome" in broken:
        following = following._replace(outcomes=state.outcomes)
    if "an end is no publication" in broken:
        following = following._replace(owed=state.owed)
    yield scene.step("end: commit", following, at="release: end", answer=outcome, begun=begun)
    yield from scene.fails("end: commit", at="release: unknown")
