"""What torch's DataLoader takes: stored rows as its data set, and the order that they come in.

block_shuffle   BlockShuffle, an order of rows that a cold disk can follow, and that can be resumed
"""

from __future__ import annotations

from memstore.dataloader.block_shuffle import BlockShuffle

__all__ = ["BlockShuffle"]
