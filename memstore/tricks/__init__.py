"""Adapters that torchsnapshot calls tricks, under the same names: change `torchsnapshot` into `memstore` in the import.

from memstore.tricks.ddp import DistributedDataParallelAdapter
from memstore.tricks.fsdp import FSDPOptimizerAdapter
"""

from __future__ import annotations
