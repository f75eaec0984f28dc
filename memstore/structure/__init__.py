"""Nested values and flat lists of tensors: a value is taken apart for a put, and built again for a get.

walk, containers/    the value's tree, its tensors, its other leaves; refusals, advice: why not, and what to do
flatten, ties        the plan of a value, from a cache; extents: how far tensors reach; facts: what plans depend on
planning             the plan of a structure that is new; clusters: leaves by their storages
plan, description    how a value is laid out and built; the same as bytes
node, dict_keys      trees of containers, compiled; checks of what was read from bytes
fill, storage        tensors into bytes, bytes as tensors
objects, stdlib      leaves that are no tensors; the only place that knows pickle
classes, attributes  classes by their names; what their objects hold, past their code
external             values that lie in files of others
rebuild, target      get; get with out= and like=
transport            leaves through multiprocessing queues
"""

from __future__ import annotations

import memstore.structure.containers.arrays  # pyright: ignore[reportUnusedImport] - it registers what it knows
import memstore.structure.containers.builtin  # pyright: ignore[reportUnusedImport]
import memstore.structure.containers.instances  # pyright: ignore[reportUnusedImport]
import memstore.structure.containers.sequences  # noqa: F401  # pyright: ignore[reportUnusedImport]
from memstore.structure.description import plan_of
from memstore.structure.external import ExternalValue, describe_external_tree, describe_external_value
from memstore.structure.flatten import Flat, contents, fill, flatten
from memstore.structure.info import iter_tensors, leaf_table, stored_bytes, structure_text
from memstore.structure.plan import Plan
from memstore.structure.rebuild import rebuild, rebuild_lazily
from memstore.structure.storage import bare_array
from memstore.structure.target import get_into, get_like
from memstore.structure.transport import register as _register_transport

_register_transport()

__all__ = [
    "ExternalValue",
    "Flat",
    "Plan",
    "describe_external_tree",
    "describe_external_value",
    "bare_array",
    "contents",
    "fill",
    "flatten",
    "get_into",
    "get_like",
    "iter_tensors",
    "leaf_table",
    "plan_of",
    "rebuild",
    "rebuild_lazily",
    "stored_bytes",
    "structure_text",
]
