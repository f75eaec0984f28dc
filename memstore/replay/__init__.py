"""Replay buffers: rows that many processes write and sample.

sum_tree      which slots are drawn, by their priorities
"""

from __future__ import annotations

from memstore.replay.sum_tree import SumTree

__all__ = ["SumTree"]
