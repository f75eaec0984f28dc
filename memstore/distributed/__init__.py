"""One store across hosts: the rules of decision 016, without I/O, threads or clocks. No torch, no monarch.

members    who is a member, and which member is the home of a key
messages   what hosts say to each other
tables     what the rules ask of a host's catalog
steps      how rules of several steps are written, so that anything can drive them
calls      a call is made once, or never
partition  what a home answers for its keys
moving     how homes move: adopt, give, take
seed       who becomes a member
joining    the keys that a root had before it was served
lending    how segments are let go that records of other homes name
index      the index process: all of these
looking    what a process finds in its host's catalog before it asks anybody
reading    how it reads keys, wherever their homes are
changing   how it changes them
"""

from __future__ import annotations

from memstore.distributed.changing import Client
from memstore.distributed.index import Index
from memstore.distributed.looking import DeadlinePassed
from memstore.distributed.members import Member, Standing, View, group_of
from memstore.distributed.messages import Answer, Change, Entry, Place, Request
from memstore.distributed.reading import look_up, page, read, wait
from memstore.distributed.seed import found
from memstore.distributed.steps import Pause, Send, Steps, Transact
from memstore.distributed.tables import Joining, LastCall, Lent, Tables

__all__ = [
    "Answer",
    "Change",
    "Client",
    "DeadlinePassed",
    "Entry",
    "Index",
    "Joining",
    "LastCall",
    "Lent",
    "Member",
    "Pause",
    "Place",
    "Request",
    "Send",
    "Standing",
    "Steps",
    "Tables",
    "Transact",
    "View",
    "found",
    "group_of",
    "look_up",
    "page",
    "read",
    "wait",
]
