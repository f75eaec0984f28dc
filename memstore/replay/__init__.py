"""Replay buffers: rows that many processes write round and round, and sample. The rules: docs/decisions/015.

words       a slot's word: state, claim, lap
limits      RateLimiter
sum_tree    which slots are drawn, by their priorities
layout      where the parts of a buffer lie
ring        an open buffer: what the processes share
recovery    what the next owner of the mutex completes
waiting     until something changes
writing     claim slots, copy, publish
reading     pick slots, copy, look again
creating    what a put writes of a new one
opening     opened, or made
buffer      ReplayBuffer: what a user calls
"""

from __future__ import annotations

from memstore.replay.buffer import ReplayBuffer
from memstore.replay.limits import RateLimiter
from memstore.replay.sum_tree import SumTree

__all__ = ["RateLimiter", "ReplayBuffer", "SumTree"]
