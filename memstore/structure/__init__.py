"""Nested values and flat lists of tensors: a value is taken apart for a put, and built again for a get.

The modules, from the top floor down; a module imports only those below it:

    targets       get with out= and like=
    rebuilding    a stored value, built again
    deltas        the leaves of a value that an earlier one has
    flattening    a value, taken apart: its plan, its tensors and its objects
    tensordicts   TensorDict and its relatives: imported once a value needs them
    tensors       arrays, and tensors that are not plain: how each kind is flattened, and the node that builds it again
    containers    the containers of Python, likewise
    walk          one walk over a value: its tree, its tensors, its other leaves
    plans         how the values of one structure are laid out in memory; the same as bytes
    objects       leaves that are no tensors, as bytes
    classes       classes by name, and attributes past their code; pickles: the only module that imports pickle
    tree          which containers a value has: trees, and nodes that are made of them
    memory        whether a tensor's bytes are there; how they are overwritten, copied, tied and sent
    traits        dtypes, devices and strides
    refusals      bytes that no put wrote, and values that can't be stored
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import memstore.structure.containers  # pyright: ignore[reportUnusedImport] - registers its containers
from memstore import _modes as modes
from memstore.structure import traits
from memstore.structure.classes import class_name, read_known_pickle, read_pickle, shown_attributes
from memstore.structure.deltas import DeltaLeaves, compare_leaves, gathered
from memstore.structure.flattening import (
    ExternalValue,
    FlatValue,
    HeldLeaf,
    HeldValue,
    check_dtype,
    contents,
    describe_external_tree,
    describe_external_value,
    fill,
    flatten,
    has_shards,
    held_in_memory,
    in_memory,
    iter_tensors,
    join_external,
    plan_at,
    plan_dense,
    raw_objects,
    take_shards_apart,
)
from memstore.structure.memory import (
    ByteRange,
    CopyPlan,
    GatheredCopy,
    PlainCopy,
    clusters_of,
    copy_into,
    copy_tensors,
    is_readable,
    lend_by,
    memory_of,
    over,
    takes_bytes,
    which_would_stay,
    why_no_memory,
    why_not_filled,
)
from memstore.structure.memory import register as _register_transport
from memstore.structure.objects import PICKLED, decode_objects, show_objects, written_objects
from memstore.structure.plans import (
    Plan,
    capacity_of,
    check_extent,
    leaf_table,
    plan_of,
    plan_of_rows,
    read_leaf,
    stored_bytes,
    structure_text,
)
from memstore.structure.rebuilding import (
    assemble,
    box_bytes,
    box_tensor,
    boxes_of_leaf,
    build,
    check_box,
    check_boxes,
    in_own_storage,
    leaf_tensor,
    lies_in_order,
    rebuild,
    rebuild_lazily,
)
from memstore.structure.refusals import MalformedError, RefusedError, render_path, require
from memstore.structure.targets import can_cast, get_into, get_like
from memstore.structure.tensors import (
    are_shards_of,
    check_wrapped_shards,
    clone_parts,
    fill_parts,
    flatten_wrapped_shards,
    has_wrapped_shards,
    is_made_of_several,
    is_wrapper,
    pair_parts,
    pair_shards,
    tensor_of_array,
    why_parts_not_filled,
)
from memstore.structure.traits import (
    DTYPE_NAMES,
    DTYPES,
    MOST_EXPANDED,
    NUMPY_DTYPES,
    Traits,
    contiguous_stride,
    count,
    expanded_bytes,
    has_gaps,
    need_device,
    own_device,
    pack,
    read_flags,
    repeats,
    to_device,
    to_flags,
)
from memstore.structure.tree import (
    MAX_DEPTH,
    TENSOR,
    LeafNames,
    Tree,
    TreesDifferError,
    merge_trees,
    name_of,
    tree_names,
)
from memstore.structure.walk import Walk, check_nesting, flattens, take_apart

_register_transport()
