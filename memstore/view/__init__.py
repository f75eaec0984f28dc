"""Views: the stored containers with lazy leaves, which read what is used.

source       a pinned version, its bytes in memory, and what has been read of them
operators    what an operator of torch does with its arguments, by its schema
leaf         StoredTensor, the lazy leaf
run          operators on lazy leaves
pages        what lies on a disk still, and what is mapped already
build        views of held versions; lazy leaves as references in pickles
saving       lazy leaves as plain tensors in files
"""

from __future__ import annotations

import memstore.view.run  # noqa: F401  # pyright: ignore[reportUnusedImport] - the leaves import it when they are used
from memstore.view.build import view
from memstore.view.leaf import StoredTensor
from memstore.view.source import bytes_read

__all__ = ["StoredTensor", "bytes_read", "view"]
