"""Snapshots are written by a process of its own: it takes no GIL of the trainer, and outlives it.

messages    what the two tell each other
failures    errors on their way from the writer to the trainer
steps       the last steps that a job may name
process     the writer itself. Imports no torch
pending     a job, seen from the trainer
client      the trainer's side: the process is started, jobs are sent, outcomes received
"""

from __future__ import annotations

from memstore.snapshot.writer.client import Writer
from memstore.snapshot.writer.messages import Job, StagedFile
from memstore.snapshot.writer.pending import PendingWrite

__all__ = ["Job", "PendingWrite", "StagedFile", "Writer"]
