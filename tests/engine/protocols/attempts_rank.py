"""The model's ranks: they prepare a part (rule 1), wait, and return or raise. See `attempts_model.py`."""

from __future__ import annotations

from tests.engine.protocols.attempts_publish import give_up_steps, publish_steps
from tests.engine.protocols.attempts_state import (
    FILLING,
    PREPARED,
    RETIRED,
    File,
    Outcome,
    Part,
    Scene,
    State,
    Steps,
    are_all_there,
    is_answer_due,
    is_of,
    outcome_of,
    parts_of,
    unlinked,
    with_,
    with_rows,
)
from tests.support.explore import Fault


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
