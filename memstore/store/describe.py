"""The description of an entry, as `Store.info` gives it."""

from __future__ import annotations

from memstore import structure
from memstore.engine import Root, files_of, index, missing
from memstore.info import EntryInfo, LeafInfo
from memstore.keys import encode_key


def describe(root: Root, key: str) -> EntryInfo:
    name = encode_key(key)
    record = index.find(root, name)
    if record is None:
        raise missing(name)
    plan = structure.plan_of(record.description)
    leaves = tuple(LeafInfo(*leaf) for leaf in structure.leaf_table(plan))
    has_more = record.adopted is not None or record.parts is not None  # headers of files are in its data section too
    return EntryInfo(
        key=key,
        version=record.version,
        kind=record.kind,
        nbytes=structure.stored_bytes(plan) if has_more else record.nbytes,
        created=record.created,
        structure=structure.structure_text(plan),
        leaves=leaves,
        files=files_of(root, record),
    )
