"""What was written, opened again by its format's reader, and compared with what was to be written: every leaf."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from memstore import structure
from memstore.convert.leaves import Found, Leaf, Piece
from memstore.convert.rules import Rules
from memstore.engine import Path
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.formats import Meter
from memstore.snapshot import in_parallel
from memstore.structure import RefusedError, Walk
from memstore.wording import short

_PIECE = 4 << 20  # bytes that are compared at a time


class _Walk(Walk):
    """Compares streams too, which are items of memstore's checkpoints."""

    def write_leaf(self, value: Any) -> Any:
        if type(value) is io.BytesIO:
            return [value.getvalue(), value.tell()]
        return super().write_leaf(value)


class Leaves(NamedTuple):
    """A value, taken apart: its tensors by name, and how all else is written."""

    tensors: Mapping[Path, torch.Tensor]
    objects: Mapping[Path, Any]


def take_apart(value: Any, rules: Rules) -> Leaves:
    """Raises UnsupportedValueError for what memstore can't look into."""
    try:
        tree, walk, _, _ = structure.take_apart(value, lambda careful: _Walk(rules.allow_pickle, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    names = structure.tree_names(tree)
    tensors = dict(zip(names.tensors, walk.tensors, strict=True))
    objects = {
        name: written for name, written in zip(names.objects, walk.objects, strict=True) if "__dict__" not in name
    }
    return Leaves(tensors, objects)


def nbytes_of(found: Found, rules: Rules) -> int:
    """Of the tensors that the value has; what is one tensor twice counts twice."""
    return sum(found.leaf(tensor).nbytes for tensor in take_apart(found.value, rules).tensors.values())


def compare(path: str, wanted: Found, metadata: Mapping[str, str], written: Found, rules: Rules, meter: Meter) -> None:
    """Raises CorruptionError, naming a leaf, if what was written is not what was wanted.

    Args:
        path: where it is, for the error.
        metadata: of each file that was written, if its format has any.
    """
    for said in written.metadata.values():
        if said != metadata:
            raise _differs(path, f"its __metadata__ was written as {short(said)}, and is {short(metadata)}")
    want, have = take_apart(wanted.value, rules), take_apart(written.value, rules)
    missing = sorted(map(str, {*want.tensors, *want.objects} ^ {*have.tensors, *have.objects}))
    if missing or set(want.tensors) != set(have.tensors):
        raise _differs(path, f"what was written has other leaves than the source: {', '.join(missing[:5])}")
    for name, said in want.objects.items():
        if _encoded(said) != _encoded(have.objects[name]):
            raise _differs(path, f"{name} was written as another value")
    pairs: list[_Pair] = []
    for name, tensor in want.tensors.items():
        one, two = wanted.leaf(tensor), written.leaf(have.tensors[name])
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            raise _differs(path, f"{name} was written as {two.dtype}{list(two.shape)}, and is {one.dtype}{one.shape}")
        pairs += _pairs(name, one, two)
    in_parallel(lambda pair: _check(path, pair), pairs, lambda pair: meter.add(pair.nbytes))


class _Pair(NamedTuple):
    """The same bytes of a tensor in the source and in what was written."""

    name: Path
    one: Leaf
    two: Leaf
    first: Piece
    second: Piece

    @property
    def nbytes(self) -> int:
        return self.first.nbytes


def _pairs(name: Path, one: Leaf, two: Leaf) -> list[_Pair]:
    if one.lies_in_order and two.lies_in_order:
        return [_Pair(name, one, two, piece, piece) for piece in one.pieces(_PIECE)]
    slabs = list((two if one.lies_in_order else one).pieces())
    found: list[_Pair] = []
    for piece in slabs:
        flat = Piece(piece.start, piece.nbytes, None)
        found.append(_Pair(name, one, two, flat if one.lies_in_order else piece, flat if two.lies_in_order else piece))
    return found


def _check(path: str, pair: _Pair) -> None:
    sums = [
        xxhash.xxh3_64_digest(leaf.read(piece).data)
        for leaf, piece in ((pair.one, pair.first), (pair.two, pair.second))
    ]
    if sums[0] != sums[1]:
        raise _differs(
            path,
            f"{pair.name}: the bytes from {pair.first.start:,} on that were read back don't fit the checksum of the "
            "source: the disk or the memory is faulty, or the source changed meanwhile",
        )


def _encoded(written: Any) -> bytes:
    return msgspec.msgpack.encode(written)


def _differs(path: str, detail: str) -> CorruptionError:
    return CorruptionError(path=path, detail=detail)
