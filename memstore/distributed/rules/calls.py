"""Calls that are made once, or never, however often and late they come.

A client that wants changes of a home opens a session there. In each lane of it one call is under way at a time, and the
home keeps the last call of each lane with its answer, which is written in the transaction of the change. So nothing is
kept for longer than the session (`sessions.py`), and a repeated call finds its answer after any death of the index
process.

- A call of no session is refused for ever: session numbers never repeat.
- A call below the last one of its lane is an old duplicate: its client has had an answer, or gave up, since it went on.
- The last one itself gets its answer again, whatever the epoch is by now.
"""

from __future__ import annotations

from memstore.distributed.rules.messages import (
    Answer,
    Call,
    Commit,
    GiveUp,
    Never,
    NoSession,
    Prepare,
    Request,
    Resolve,
)
from memstore.distributed.rules.tables import LastCall, Tables


def answer_again(tables: Tables, call: Call | Resolve) -> Answer | None:
    """What a call has been answered, or why it can't be made any more. None: it is a new one."""
    if not tables.has_session(call.session):
        return NoSession()
    last = tables.last_call(call.session, call.lane)
    if last is None or last.number < call.number:
        return None
    return last.answer if last.number == call.number else NoSession()


def session_of(request: Request) -> int | None:
    """The session by which a client asks for a change. (Audits resolve calls of others.)"""
    call = request.call if isinstance(request, Commit | Prepare | GiveUp) else None
    return None if call is None else call.session


def keep_answer(tables: Tables, call: Call | Resolve, answer: Answer) -> Answer:
    tables.put_last_call(call.session, call.lane, LastCall(call.number, answer))
    return answer


def resolve(tables: Tables, request: Resolve) -> Answer:
    """What became of a call. One that never came is over from here on."""
    return answer_again(tables, request) or keep_answer(tables, request, Never())
