"""One store across hosts: the rules of decision 016, without I/O, threads or clocks. No torch, no monarch.

members    who is a member, and which member is the home of a key
terms      what messages are made of
messages   what hosts say to each other; `attempt_messages`: about sharded puts
tables     what the rules ask of a host's catalog
steps      how rules of several steps are written, so that anything can drive them
calls      a call is made once, or never; `sessions`: whose clients are gone
partition  what a home answers for its keys
moving     how homes move: adopt, give, take; `giving`: the part of the old home
seed       who becomes a member
joining    the keys that a root had before it was served
lending    how segments are let go that records of other homes name
index      the index process: all of these
looking    what a process finds in its host's catalog before it asks anybody
reading    how it reads keys, wherever their homes are; `lookups`: how it asks for many of them
changing   how it changes them
sealing    how it is found out what became of a seal that was cut off
attempts   sharded puts at the home of their key; `attempt_answers`: what ranks of other hosts are answered
seats      a rank of a sharded put, as its process knows it
ranks      how it puts its part, or gives up
turns      how it learns what the put has become, or publishes it
"""

from __future__ import annotations

from memstore.distributed.rules.attempt_messages import (
    LARGEST_DETAILS,
    LONGEST_TEXT,
    Failure,
    GiveUp,
    Look,
    Outcome,
    Part,
    Pending,
    Prepare,
    Publish,
)
from memstore.distributed.rules.calls import answer_again, keep_answer, session_of
from memstore.distributed.rules.changing import Client
from memstore.distributed.rules.index import Index
from memstore.distributed.rules.looking import DeadlinePassed, failed_of, one_home
from memstore.distributed.rules.lookups import look_up_at
from memstore.distributed.rules.members import Member, Standing, View, group_of
from memstore.distributed.rules.messages import (
    Answer,
    Ask,
    Change,
    Commit,
    Done,
    Entry,
    Failed,
    Found,
    IsAt,
    IsView,
    Later,
    List,
    Lookup,
    Named,
    Open,
    Place,
    Refused,
    Remove,
    Request,
    Resolve,
    Stale,
    Wait,
)
from memstore.distributed.rules.ranks import Ranks
from memstore.distributed.rules.reading import look_up, page, read, read_all, wait, wait_there
from memstore.distributed.rules.sealing import is_unsealed
from memstore.distributed.rules.seats import Seat
from memstore.distributed.rules.seed import found
from memstore.distributed.rules.steps import NOT_SENT, NotSent, Pause, Send, Steps, Transact, pause, send, view
from memstore.distributed.rules.tables import Joining, LastCall, Lent, Tables
from memstore.distributed.rules.terms import BATCH_LIMIT, CALL_BYTES_LIMIT, KEY_LIMIT, LONGEST_WAIT, ROWS_LIMIT
from memstore.distributed.rules.turns import Merge, turn, waiting

__all__ = [
    "BATCH_LIMIT",
    "CALL_BYTES_LIMIT",
    "KEY_LIMIT",
    "NOT_SENT",
    "Answer",
    "Ask",
    "Change",
    "Client",
    "Commit",
    "DeadlinePassed",
    "Done",
    "Entry",
    "Failed",
    "Failure",
    "Found",
    "GiveUp",
    "Index",
    "IsAt",
    "IsView",
    "Joining",
    "LARGEST_DETAILS",
    "LONGEST_TEXT",
    "LONGEST_WAIT",
    "LastCall",
    "Later",
    "Lent",
    "List",
    "Look",
    "Lookup",
    "Member",
    "Merge",
    "Named",
    "NotSent",
    "Open",
    "Outcome",
    "Part",
    "Pause",
    "Pending",
    "Place",
    "Prepare",
    "Publish",
    "ROWS_LIMIT",
    "Ranks",
    "Refused",
    "Remove",
    "Request",
    "Resolve",
    "Seat",
    "Send",
    "Stale",
    "Standing",
    "Steps",
    "Tables",
    "Transact",
    "View",
    "Wait",
    "answer_again",
    "failed_of",
    "found",
    "group_of",
    "is_unsealed",
    "keep_answer",
    "look_up",
    "look_up_at",
    "one_home",
    "page",
    "pause",
    "read",
    "read_all",
    "send",
    "session_of",
    "turn",
    "view",
    "wait",
    "wait_there",
    "waiting",
]
