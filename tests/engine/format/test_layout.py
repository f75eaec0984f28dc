"""Layouts: any spans become a header that the safetensors library reads, with every tensor where it should be."""

from __future__ import annotations

import json
import math
import time
from collections import Counter

import safetensors
from hypothesis import given
from hypothesis import strategies as st

from memstore.engine import syscalls
from memstore.engine.format.headers import ALIGNMENT, SAFETENSORS_DTYPES, Header, Span, lay_out

ITEMSIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex64": 8, "complex128": 16, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float4_e2m1fn_x2": 1, "quint8": 1,
}  # fmt: skip

parts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.integers(-3, 30),
    st.sampled_from(
        ["a", "a.b", "b", "__metadata__", "__pad__", "__pad__#1", "a#1", "..", "a/b", '"', "\\", "\n", "🐍"]
    ),
)
names = st.lists(parts, max_size=3).map(tuple)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    nbytes = math.prod(shape) * ITEMSIZES[dtype]
    return Span(draw(names), dtype, ITEMSIZES[dtype], None if draw(st.integers(0, 4)) == 0 else shape, nbytes)


lists_of_spans = st.lists(spans(), max_size=25)


@given(lists_of_spans)
def test_any_spans_make_a_safetensors_file(given_spans: list[Span]) -> None:
    layout = lay_out(given_spans)
    header = Header("key", "store", b"\x00description", b"", layout.header).finish(1, layout.nbytes, 0, None)
    data = bytearray(layout.nbytes)
    for number, (span, offset) in enumerate(zip(given_spans, layout.offsets, strict=True)):
        data[offset : offset + span.nbytes] = bytes([number + 1]) * span.nbytes
    read = safetensors.deserialize(bytes(header) + bytes(data))
    found = Counter((entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for _, entry in read)
    expected = Counter(
        (*_format_of(span), bytes([number + 1]) * span.nbytes) for number, span in enumerate(given_spans)
    )
    assert not expected - found
    assert all(dtype == "U8" and not any(held) for dtype, _, held in found - expected)  # the pads


def _format_of(span: Span) -> tuple[str, tuple[int, ...]]:
    if span.shape is None or span.dtype not in SAFETENSORS_DTYPES:
        return "U8", (span.nbytes,)
    return SAFETENSORS_DTYPES[span.dtype], span.shape


@given(lists_of_spans)
def test_spans_are_aligned_and_apart(given_spans: list[Span]) -> None:
    layout = lay_out(given_spans)
    ends = 0
    for offset, span in sorted(zip(layout.offsets, given_spans, strict=True), key=lambda pair: pair[0]):
        if span.nbytes:
            assert offset % ALIGNMENT == 0
            assert offset >= ends
            ends = offset + span.nbytes
    assert layout.nbytes == ends
    assert layout.nbytes < sum(span.nbytes for span in given_spans) + ALIGNMENT * max(1, len(given_spans))


@given(lists_of_spans)
def test_inline_spans_are_aligned_to_their_elements(given_spans: list[Span]) -> None:
    layout = lay_out(given_spans, aligned=False)
    for offset, span in zip(layout.offsets, given_spans, strict=True):
        assert not span.nbytes or offset % span.itemsize == 0
    assert layout.nbytes < sum(span.nbytes for span in given_spans) + 16 * max(1, len(given_spans))


@given(lists_of_spans)
def test_names_are_unique_and_none_is_reserved(given_spans: list[Span]) -> None:
    pairs: list[tuple[str, object]] = json.loads(
        b"{" + lay_out(given_spans).header[1:] + b"}", object_pairs_hook=lambda found: found
    )
    found = [name for name, _ in pairs]
    assert len(found) == len(set(found))
    assert "__metadata__" not in found


def test_whole_lines_need_no_pads() -> None:
    layout = lay_out([Span((str(i),), "float32", 4, (16 * i,), 64 * i) for i in (3, 1, 2)])
    assert b"__pad__" not in layout.header
    assert layout.nbytes == 64 * 6


def test_name_clashes_are_numbered() -> None:
    layout = lay_out([Span(name, "uint8", 1, (64,), 64) for name in (("a", "b"), ("a.b",), ("a.b#1",), ("a.b",))])
    assert list(json.loads(b"{" + layout.header[1:] + b"}")) == ["a.b", "a.b#1", "a.b#1#1", "a.b#2"]


def test_many_odd_spans_take_no_quadratic_time() -> None:
    started = time.process_time()
    lay_out([Span((i,), "float32", 4, (1,), 4) for i in range(20_000)])
    assert time.process_time() - started < 5  # it takes 0.3 s; looking for the pads' names once took 34


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.binary(max_size=300), st.binary(max_size=300))
def test_headers_end_on_a_page_and_start_with_the_slots(key: str, description: bytes, objects: bytes) -> None:
    header = Header(key, "store", description, objects, b"").finish(1, 0, 0, None)
    assert len(header) % syscalls.PAGE == 0
    assert len(header) == 8 + int.from_bytes(header[:8], "little")
    metadata = json.loads(header[8:])["__metadata__"]
    assert list(metadata)[0] == "memstore"
    assert metadata["key"] == key
