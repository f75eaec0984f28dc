"""Views: the stored containers with lazy leaves, which read what is used.

From below upwards:

source       a pinned version, and its bytes in memory
pages        which pages lie on a disk still, and which are mapped already
leaf_bytes   what lazy leaves read: boxes and rows of a stored leaf
lazy         a tensor that shows a box of a stored leaf and reads it later
operators    what an operator of torch does with its arguments, by its schema
run          operators on lazy leaves
references   lazy leaves in pickles that are sent; saving: those in files
leaf         StoredTensor, the lazy leaf that users have
build        views of held versions
"""

from __future__ import annotations

from memstore.view.build import view
from memstore.view.leaf import StoredTensor
from memstore.view.leaf_bytes import LeafBytes

__all__ = ["LeafBytes", "StoredTensor", "view"]
