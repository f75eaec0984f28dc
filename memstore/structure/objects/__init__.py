"""The leaves that are no tensors, as bytes; and the classes of objects, by name.

writing           objects as msgpack
reading           msgpack as objects
codes             msgpack's extensions that both use
stdlib            dates, paths, exact numbers, members of enumerations
numpy_and_torch   scalars and arrays of numpy; sizes, dtypes and devices of torch
pickled           what only pickle can store
advice            what to put instead of an object that can't be stored
classes           classes found by their names, without running code
attributes        attributes of objects, read and written past the code of their classes
"""

from __future__ import annotations

from memstore.structure.objects.advice import alternative
from memstore.structure.objects.attributes import (
    NAMESPACES,
    defines,
    field_names,
    is_dataclass,
    is_made_plainly,
    read_attributes,
    shown_attributes,
    slots_of,
    write_attributes,
)
from memstore.structure.objects.classes import class_name, dotted, find_class, make_bare, short
from memstore.structure.objects.pickled import read_known_pickle, read_pickle
from memstore.structure.objects.reading import PICKLED, decode_objects, show_objects
from memstore.structure.objects.writing import (
    NATIVE,
    encode_objects,
    join_dict,
    join_list,
    join_tree,
    join_tuple,
    write_object,
    written_objects,
)

__all__ = [
    "NAMESPACES",
    "NATIVE",
    "PICKLED",
    "alternative",
    "class_name",
    "decode_objects",
    "defines",
    "dotted",
    "encode_objects",
    "field_names",
    "find_class",
    "is_dataclass",
    "is_made_plainly",
    "join_dict",
    "join_list",
    "join_tree",
    "join_tuple",
    "make_bare",
    "read_attributes",
    "read_known_pickle",
    "read_pickle",
    "short",
    "show_objects",
    "shown_attributes",
    "slots_of",
    "write_attributes",
    "write_object",
    "written_objects",
]
