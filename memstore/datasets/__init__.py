"""Datasets: entries whose rows are written in place, by any process of the host. The rules: docs/decisions/015.

rows     what a row is, and batches compared with that; the rows of an open entry, in the memory that the processes
         share; how one is created, and pickled
dataset  Dataset: what a user calls; how a Store creates and opens one

Control page, mutex and states are the engine's: `engine/protocols/mutable.py`.
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.datasets.dataset import (
    Dataset,
    SharedRows,
    create_dataset,
    create_dataset_from,
    hold_rows,
    open_dataset,
    rows_html,
    rows_text,
    shared_rows,
)
from memstore.datasets.rows import (
    Batch,
    EntryReference,
    NoLeafError,
    Spec,
    arrays_over,
    as_name,
    as_row,
    check_capacity,
    control_of,
    in_range,
    opened,
    put_entry,
    reduce,
    rows_of_spec,
    spec_of,
    take_batch,
)
