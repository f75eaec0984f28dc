"""The description of an entry, as `Store.info` gives it."""

from __future__ import annotations

from bisect import bisect_right

from memstore import contents, structure
from memstore.engine import Record, Root, files_of, index, plan_bytes
from memstore.errors import CorruptionError
from memstore.info import EntryInfo, LeafInfo, ShardInfo
from memstore.keys import encode_key
from memstore.listing import absent


def describe(root: Root, key: str, timeout: float) -> EntryInfo:
    """Raises KeyNotFoundError, and CorruptionError. `timeout` is for other hosts."""
    name = encode_key(key)
    record = index.find(root, name, timeout)
    if record is None:
        raise absent(root, name)
    plan = structure.plan_of(plan_bytes(record.description))
    shards = _shards(root, key, record, plan)
    leaves = tuple(
        LeafInfo(*leaf, shards.get(plan.same.get(i, i), ())) for i, leaf in enumerate(structure.leaf_table(plan))
    )
    has_more = record.kind in ("adopted", "sharded")  # its data section has the headers of the files too
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


def _shards(root: Root, key: str, record: Record, plan: structure.Plan) -> dict[int, tuple[ShardInfo, ...]]:
    """By leaf, the parts that ranks have put. Raises CorruptionError."""
    files, bases = files_of(root, record), [extent.base for extent in record.extents]

    def file_at(place: int) -> str:
        number = bisect_right(bases, place) - 1
        if number < 0:
            raise CorruptionError(f"{key!r}: a part of it lies in none of its {len(files)} files", key=key)
        return files[number]

    found = {
        leaf: tuple(ShardInfo(*one.box, one.rank, file_at(one.place)) for one in sorted(boxes))
        for leaf, boxes in contents.boxes_of(record).items()
    }
    for leaf, rank in contents.box_table(record).ranks.items():
        if 0 <= leaf < len(plan.leaves):
            at = plan.leaves[leaf]
            found[leaf] = (ShardInfo((0,) * len(at.shape), at.shape, rank, file_at(at.offset)),)
    return found
