"""Replay buffers: rows that many processes write round and round, and sample. The rules: docs/decisions/015.

entry       the stored entry: RateLimiter and other options, the layout, how a buffer is created and opened
priorities  which slots are drawn, by their priorities: the sum tree, which processes share
ring        an open buffer: the words of slots, what the processes share; flush; recovery after a death or a crash;
            waiting until something changes, and for the rate limiter, in the order in which callers came
writing     claim slots, copy, publish; one plain row by a short way; change priorities
picking     which slots a sample gets; rows that are handed out once; slices of episodes
sampling    pick, copy, look again; rows without a sampler; the TensorDicts that a user gets
buffer      ReplayBuffer: what a user calls
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.replay.buffer import ReplayBuffer, Sampled, copied_rows, parts_by_age, sample_rows, sample_slices
from memstore.replay.entry import RateLimiter
from memstore.replay.sampling import Sampler, SamplerOptions, look_at_rows
