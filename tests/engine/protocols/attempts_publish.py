"""The model's publications and ends of attempts, rules 2 and 3. See `attempts_model.py`."""

from __future__ import annotations

from tests.engine.protocols.attempts_state import (
    ANY,
    LIVE,
    PREPARED,
    RETIRED,
    Outcome,
    Part,
    Published,
    Scene,
    State,
    Steps,
    ended,
    is_of,
    outcome_of,
    parts_of,
    stale,
    with_header,
    with_rows,
)
from tests.support.explore import Fault

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
