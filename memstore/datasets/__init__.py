"""Datasets: entries whose rows are written in place, by any process of the host. The rules: docs/decisions/015.

spec       what a row is
batch      rows on their way into a dataset, compared with that
rows       the rows of an open dataset, in the memory that the processes share
creating   what a put writes of a new one, or of a new buffer
indices    which rows are meant
tables     their leaves, as they are printed
references datasets and buffers in pickles
dataset    Dataset: what a user calls
opening    how a Store makes and opens them

Control page, mutex and states are the engine's: `engine/protocols/mutable.py`.
"""

from __future__ import annotations

from memstore.datasets.batch import Batch, take_batch
from memstore.datasets.creating import control_of, put_entry
from memstore.datasets.dataset import Dataset, SharedRows, shared_rows
from memstore.datasets.indices import NoLeafError, as_name, as_row, in_range
from memstore.datasets.opening import create_dataset, create_dataset_from, hold_rows, open_dataset
from memstore.datasets.references import Reference, opened, reduce
from memstore.datasets.rows import Rows, arrays_over
from memstore.datasets.spec import Spec, check_capacity, rows_of_spec, spec_of, spec_of_batch
from memstore.datasets.tables import rows_html, rows_text

__all__ = [
    "Batch",
    "Dataset",
    "NoLeafError",
    "Reference",
    "Rows",
    "SharedRows",
    "Spec",
    "arrays_over",
    "as_name",
    "as_row",
    "control_of",
    "create_dataset",
    "create_dataset_from",
    "hold_rows",
    "in_range",
    "open_dataset",
    "opened",
    "put_entry",
    "reduce",
    "rows_html",
    "check_capacity",
    "rows_of_spec",
    "rows_text",
    "shared_rows",
    "spec_of",
    "spec_of_batch",
    "take_batch",
]
