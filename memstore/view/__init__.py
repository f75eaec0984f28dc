"""Views: the stored containers with lazy leaves, which read what is used.

From below upwards:

source       what leaves are parts of (a pinned version of a store), and its bytes in memory
pages        which pages lie on a disk still, and which are mapped already
stored_leaf  what lazy leaves read: boxes and rows of a stored leaf
leaf_bytes   one that lies whole in one mapping
regions      which elements of a tensor a strided view of it looks at
points       which of the points that an index names lie in a box
leaf_boxes   a stored leaf in boxes that lie apart
lazy         a tensor that shows a box of a stored leaf and reads it later
operators    what an operator of torch does with its arguments, by its schema
run          operators on lazy leaves; picks: those that index them
leaves       lazy leaves, made where their bytes lie
references   lazy leaves in pickles that are sent; saving: those in files
distribute   a rank's part of a leaf, as a DTensor
leaf         StoredTensor, the lazy leaf that users have
loading      lazy leaves loaded one by one, also into memory of their own
build        views of held versions
parts        the tensors and objects of one by name, without its containers
"""

from __future__ import annotations

from memstore.view.build import view
from memstore.view.leaf import StoredTensor
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.leaf_bytes import LeafBytes
from memstore.view.leaves import lazy_leaf
from memstore.view.loading import load_leaf, own_leaf
from memstore.view.parts import Parts, parts_of
from memstore.view.points import Points
from memstore.view.source import Memory, Source
from memstore.view.stored_leaf import StoredLeaf

__all__ = [
    "LeafBoxes",
    "LeafBytes",
    "Memory",
    "Parts",
    "Points",
    "Source",
    "StoredLeaf",
    "StoredTensor",
    "lazy_leaf",
    "load_leaf",
    "own_leaf",
    "parts_of",
    "view",
]
