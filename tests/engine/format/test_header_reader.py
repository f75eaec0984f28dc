"""What is told of a header by less than reading all of it."""

from __future__ import annotations

import pytest

from memstore.engine.format.headers import Header, may_be_mutable
from memstore.engine.format.records import MutableDescription, encode_mutable

_MUTABLE = encode_mutable(MutableDescription("dataset", b"plan"))


@pytest.mark.parametrize(
    ("key", "description", "expected"),
    [
        ("k", _MUTABLE, True),
        ("k", _MUTABLE * 100, True),
        ("k", b"\x93plan", False),
        ("k", b"", False),
        ("k", b"x" + _MUTABLE, False),
        ('"description":"wXJvd3', b"\x93plan", False),
    ],
)
def test_one_look_tells_the_header_of_a_mutable_entry(key: str, description: bytes, expected: bool) -> None:
    header = Header(key, "store", description, b"", b'"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}')
    assert may_be_mutable(bytes(header.finish(1, 0, 0, None))) is expected
