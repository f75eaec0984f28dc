"""Nested values and flat lists of tensors: a value is taken apart for a put, and built again for a get.

The rooms, from the top floor down; a room imports only from those below it:

    transport     tensors of memstore's memory through multiprocessing queues
    info          what a stored value looks like; the tensors of a value, by name
    external      values that lie in files of others
    get/          a stored value, built again; get with out= and like=
    put/          a value, taken apart: its plan, its tensors and its objects; tensors copied into memory
    containers/   each kind of container: how it is flattened, and the node that builds it again
    walk/         one walk over a value: its tree, its tensors, its other leaves
    plans/        how the values of one structure are laid out in memory; the same as bytes
    objects/      leaves that are no tensors, as bytes; the only place that knows pickle
    tree/         which containers a value has: trees, and nodes that are made of them
    tensors/      torch's tensors: dtypes, traits, strides, shared bytes
    refusals      why a value can't be stored
    checks        what no flatten wrote is refused: checks of bytes that were read
"""

from __future__ import annotations

from memstore.structure.checks import MalformedError, require
from memstore.structure.containers import (
    are_shards_of,
    box_name,
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
)
from memstore.structure.external import (
    ExternalValue,
    describe_external_tree,
    describe_external_value,
    join_external,
    raw_objects,
)
from memstore.structure.get import (
    assemble,
    bare_array,
    box_bytes,
    box_tensor,
    boxes_of_leaf,
    build,
    check_box,
    check_boxes,
    get_into,
    get_like,
    in_own_storage,
    leaf_tensor,
    lies_in_order,
    rebuild,
    rebuild_lazily,
)
from memstore.structure.info import (
    iter_tensors,
    leaf_table,
    stored_bytes,
    structure_text,
)
from memstore.structure.objects import (
    PICKLED,
    class_name,
    decode_objects,
    read_known_pickle,
    read_pickle,
    show_objects,
    shown_attributes,
    written_objects,
)
from memstore.structure.plans import (
    Plan,
    capacity_of,
    check_extent,
    plan_of,
    plan_of_rows,
    read_leaf,
)
from memstore.structure.put import (
    Copies,
    Flat,
    GatheredCopy,
    HeldLeaf,
    HeldValue,
    PlainCopy,
    contents,
    copy_tensors,
    fill,
    flatten,
    has_shards,
    plan_at,
    plan_dense,
    take_shards_apart,
)
from memstore.structure.refusals import (
    RefusedError,
    render_path,
)
from memstore.structure.tensors import (
    DTYPE_NAMES,
    DTYPES,
    MOST_EXPANDED,
    NUMPY_DTYPES,
    Traits,
    contiguous_stride,
    count,
    expanded_bytes,
    has_gaps,
    is_readable,
    memory_of,
    modes,
    need_device,
    over,
    own_device,
    pack,
    read_flags,
    repeats,
    to_device,
    to_flags,
    traits,
    why_no_memory,
)
from memstore.structure.transport import lend_by
from memstore.structure.transport import register as _register_transport
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
from memstore.structure.walk import (
    Walk,
    check_nesting,
    flattens,
    held_in_memory,
    in_memory,
    take_apart,
)

_register_transport()

__all__ = [
    "Copies",
    "DTYPES",
    "DTYPE_NAMES",
    "ExternalValue",
    "Flat",
    "GatheredCopy",
    "HeldLeaf",
    "HeldValue",
    "LeafNames",
    "MAX_DEPTH",
    "MalformedError",
    "NUMPY_DTYPES",
    "PICKLED",
    "PlainCopy",
    "Plan",
    "RefusedError",
    "TENSOR",
    "Traits",
    "Tree",
    "TreesDifferError",
    "Walk",
    "are_shards_of",
    "assemble",
    "bare_array",
    "box_bytes",
    "box_name",
    "box_tensor",
    "boxes_of_leaf",
    "build",
    "capacity_of",
    "check_box",
    "check_boxes",
    "check_extent",
    "check_wrapped_shards",
    "class_name",
    "clone_parts",
    "contents",
    "contiguous_stride",
    "copy_tensors",
    "count",
    "decode_objects",
    "describe_external_tree",
    "describe_external_value",
    "fill",
    "fill_parts",
    "flatten",
    "flatten_wrapped_shards",
    "flattens",
    "get_into",
    "get_like",
    "in_memory",
    "in_own_storage",
    "has_gaps",
    "has_shards",
    "has_wrapped_shards",
    "held_in_memory",
    "is_made_of_several",
    "is_readable",
    "is_wrapper",
    "iter_tensors",
    "join_external",
    "leaf_table",
    "leaf_tensor",
    "lend_by",
    "lies_in_order",
    "memory_of",
    "merge_trees",
    "modes",
    "name_of",
    "need_device",
    "own_device",
    "over",
    "pack",
    "pair_parts",
    "pair_shards",
    "plan_at",
    "plan_dense",
    "plan_of",
    "plan_of_rows",
    "read_flags",
    "read_leaf",
    "read_known_pickle",
    "read_pickle",
    "rebuild",
    "rebuild_lazily",
    "render_path",
    "check_nesting",
    "MOST_EXPANDED",
    "expanded_bytes",
    "repeats",
    "require",
    "show_objects",
    "shown_attributes",
    "stored_bytes",
    "structure_text",
    "take_apart",
    "take_shards_apart",
    "tensor_of_array",
    "to_device",
    "to_flags",
    "traits",
    "tree_names",
    "why_no_memory",
    "written_objects",
    "raw_objects",
]
