"""Views: the stored containers with lazy leaves, which read what is used.

From below upwards:

source       what leaves are parts of (a pinned version of a store), its bytes in memory, and stored leaves in them
leaf_boxes   a stored leaf in boxes that lie apart, and the regions and points of it that are asked for
lazy         a tensor that shows a box of a stored leaf and reads it later; how torch's operators run on it
views        StoredTensor, the lazy leaf that users have: made, sent, saved, and read into a DTensor; views of held
             versions; their leaves loaded one by one; the parts of a value without its containers
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.view.leaf_boxes import LeafBoxes, Points
from memstore.view.source import LeafBytes, Memory, Source, StoredLeaf
from memstore.view.views import StoredTensor, bytes_shown, distribute, lazy_leaf, load_leaf, own_leaf, parts_of, view
