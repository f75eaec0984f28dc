"""What torch's DataLoader takes: stored rows as its data set, and the order that they come in.

dataset         StoreDataset, a stored value as a data set
batch           its batches, as DataLoader takes them
rows_of_value   how many rows a value has, and one of them
lending         what workers read into: blocks of shared memory, one batch after the other
borrowing       how their batches are received, and given back
blocks          one block, as both have it
shared_memory   for what has no block
block_shuffle   BlockShuffle, an order of rows that a cold disk can follow, and that can be resumed
"""

from __future__ import annotations

from memstore.dataloader.batch import Row, as_rows, read_batch
from memstore.dataloader.block_shuffle import BlockShuffle
from memstore.dataloader.dataset import StoreDataset

__all__ = ["BlockShuffle", "Row", "StoreDataset", "as_rows", "read_batch"]
