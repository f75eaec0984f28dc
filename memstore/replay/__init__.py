"""Replay buffers: rows that many processes write round and round, and sample. The rules: docs/decisions/015.

words       a slot's word: state, claim, lap
limits      RateLimiter
sum_tree    which slots are drawn, by their priorities
priorities  the tree of a buffer, which processes share; updating: changed by positions
layout      where the parts of a buffer lie
ring        an open buffer: what the processes share
flushing    what survives a crash of the host
recovery    what the next owner of the mutex completes
intake      rows as a caller gives them
turns       who waits for the rate limiter, in turn; waiting: until something changes
writing     claim slots, copy, publish; adding: the same for one plain row, by a short way
picking     which slots a sample gets; taking: each once; slices: trajectories; samplers: which of these
sampling    pick, copy, look again
samples     what a user gets
creating    what a put writes of a new one; opening: opened, or made
filled      the part of ReplayBuffer that writes
buffer      ReplayBuffer: what a user calls
looking     rows for who only looks, where they lie or as copies
"""

from __future__ import annotations

from memstore.replay.buffer import (
    ReplayBuffer,
    Sampled,
    copied_rows,
    parts_by_age,
    sample_rows,
    sample_slices,
)
from memstore.replay.limits import RateLimiter
from memstore.replay.looking import BufferRows, look_at_rows
from memstore.replay.samplers import Sampler, SamplerOptions
from memstore.replay.sum_tree import SumTree

__all__ = [
    "BufferRows",
    "RateLimiter",
    "ReplayBuffer",
    "Sampled",
    "Sampler",
    "SamplerOptions",
    "SumTree",
    "copied_rows",
    "look_at_rows",
    "parts_by_age",
    "sample_rows",
    "sample_slices",
]
