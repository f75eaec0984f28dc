"""Stored rows for torch's DataLoader: as its data set, and the order that they come in.

dataset        StoreDataset, a stored value as a data set, and its batches, as DataLoader takes them
blocks         shared memory that workers read into, one batch after the other
block_shuffle  BlockShuffle, an order of rows that a cold disk can follow, and that can be resumed
"""

from __future__ import annotations

from memstore.dataloader.block_shuffle import BlockShuffle
from memstore.dataloader.dataset import BatchRow, StoreDataset, as_rows, read_batch

__all__ = ["BlockShuffle", "BatchRow", "StoreDataset", "as_rows", "read_batch"]
