"""Where each tensor lies in the data section of a segment, and the entries of the safetensors header that say so. Pure.

Order: what fills whole 64-byte lines first, then the rest by element size, largest first. So every tensor starts on
64 bytes (cache lines, and any SIMD load), and pad entries are needed only between the odd-sized ones at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memstore.engine.format.record import Path
from memstore.engine.format.safetensors import METADATA, SAFETENSORS_DTYPES

ALIGNMENT = 64
SLACK = "__slack__"  # the name of the entry for the unused end of a file that was reused


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes to store. `shape` is None where the bytes are not the C-contiguous elements of one tensor."""

    name: Path
    dtype: str  # torch's name without "torch."
    itemsize: int
    shape: tuple[int, ...] | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    offsets: tuple[int, ...]  # of the spans, in the order given, from the start of the data section
    nbytes: int  # of the data section
    header: bytes  # the header's entries behind __metadata__: ',"a":{...},"b":{...}'


def lay_out(spans: Sequence[Span], *, aligned: bool = True, first: int = 0) -> Layout:
    """Places spans in a data section. With `aligned` false (inline values) only to their element size, without pads.

    The `first` of them keep their places before all others.
    """
    others = range(first, len(spans))
    order = [*range(first), *sorted(others, key=lambda i: (spans[i].nbytes % ALIGNMENT != 0, -spans[i].itemsize, i))]
    offsets = [0] * len(spans)
    entries: list[tuple[str, str, Sequence[int], int, int]] = []
    names = _HeaderNames()
    end = 0
    for i in order:
        span = spans[i]
        multiple = ALIGNMENT if aligned and span.nbytes else span.itemsize
        start = -(-end // multiple) * multiple if span.nbytes else end
        if start > end and aligned:
            entries.append((names.unique("__pad__"), "U8", [start - end], end, start))
        offsets[i] = start
        end = start + span.nbytes
        code = SAFETENSORS_DTYPES.get(span.dtype, "U8") if span.shape is not None else "U8"
        raw = span.shape is None or span.dtype not in SAFETENSORS_DTYPES
        shape = [span.nbytes] if raw or span.shape is None else span.shape
        entries.append((names.unique(".".join(map(str, span.name))), code, shape, start, end))
    return Layout(tuple(offsets), end, encode_entries(entries))


def encode_entries(entries: Iterable[tuple[str, str, Sequence[int], int, int]]) -> bytes:
    """The entries of a header behind its metadata, of name, code of the dtype, shape, and where its bytes lie."""
    return "".join(
        f',{json.dumps(name)}:{{"dtype":"{code}","shape":{json.dumps(shape)},"data_offsets":[{start},{stop}]}}'
        for name, code, shape, start, stop in entries
    ).encode()


class _HeaderNames:
    """Makes names unique: the leaves ("a", "b") and ("a.b",) would both be called "a.b"."""

    def __init__(self) -> None:
        self._seen = {METADATA, SLACK}
        self._counts: dict[str, int] = {}  # so that 10,000 pads take no 10,000 tries each

    def unique(self, name: str) -> str:
        candidate, count = name, self._counts.get(name, 0)
        while candidate in self._seen:
            count += 1
            candidate = f"{name}#{count}"
        self._counts[name] = count
        self._seen.add(candidate)
        return candidate
