"""Stored rows for torch's DataLoader: as its data set, and the order that they come in.

dataset  StoreDataset, a stored value as a data set, and its batches, as DataLoader takes them; BlockShuffle, an order
         of rows that a cold disk can follow, and that can be resumed
blocks   shared memory that workers read into, one batch after the other
"""

from __future__ import annotations

from memstore.dataloader.dataset import BatchRow, BlockShuffle, StoreDataset, as_rows, read_batch

__all__ = ["BlockShuffle", "BatchRow", "StoreDataset", "as_rows", "read_batch"]
