"""What must hold in every state of the model of attempts. Steps raise faults too: see `attempts_publish.py`."""

from __future__ import annotations

from tests.engine.protocols.attempts_state import (
    LIVE,
    PREPARED,
    Counters,
    File,
    State,
    is_answer_due,
    outcome_of,
    parts_of,
)
from tests.support.explore import Fault


def check(state: State) -> None:
    _check_rows(state)
    version, puts = state.record
    for put in puts:
        if state.files[put] != File(LIVE, LIVE):
            raise Fault("a file of the record is not live, or locked by its writer: a reader would take it for damage")
    if (
        version
        and puts
        and (version, puts) not in [(one.version, tuple(part.put for part in one.parts)) for one in state.published]
    ):
        raise Fault("a record of what was never published")
    if state.dirty or any(process.owner for process in state.processes):
        return
    for put, file in enumerate(state.files):
        if file.header and (file.header == LIVE) is not (put in puts):
            raise Fault("a header says live that isn't, or doesn't that is: a repair would go wrong")
    if state.owed:
        raise Fault("the doorbell was not rung, and nobody will")
    for process in state.processes:
        if process.at == "asleep" and is_answer_due(state, process):
            raise Fault("a rank sleeps, and what it waits for is there")


def _check_rows(state: State) -> None:
    named = [part.put for part in state.pending]
    if len(set(named)) != len(named):
        raise Fault("two rows name one part")
    for put, file in enumerate(state.files):
        if file.header and not file.row:
            raise Fault("a file of nobody, which no sweep will find")
        if (file.row == PREPARED) is not (put in named):
            raise Fault(
                "a prepared segment and `pending` differ: it would stay for ever, or be taken while it is a part"
            )
        if (file.row == LIVE) is not (put in state.record[1]):
            raise Fault("a live segment and the record differ")
    for attempt in {part.attempt for part in state.pending}:
        parts = parts_of(state, attempt)
        if len({(part.world, part.begun, part.boot) for part in parts}) > 1:
            raise Fault("parts of two attempts under one name")
        if len({part.rank for part in parts}) != len(parts):
            raise Fault("a rank has two parts")
        if outcome_of(state, attempt):
            raise Fault("an attempt has an outcome, and is pending")
    if len({outcome.attempt for outcome in state.outcomes}) != len(state.outcomes):
        raise Fault("an attempt has two outcomes")
    counted = Counters(*(sum(file.row == row for file in state.files) for row in Counters._fields))
    if counted != state.counters:
        raise Fault(f"bytes are counted wrong: {state.counters} of {counted}")
