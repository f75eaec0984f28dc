"""Batches of rows out of stored values: `read_rows`, `read_rows_to`, `prefetch_rows`.

reading   these functions, and the walk through a value with its containers
gather    which rows are asked for, the leaves of a batch, and the tensors that they fill
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.rows.gather import Allocate, RowIndex, copy_rows, is_kept, of_key, sharing
from memstore.rows.reading import prefetch_rows, read_rows, read_rows_to
