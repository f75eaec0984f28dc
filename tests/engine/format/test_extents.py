"""Records decode to extents: the files of an entry, and where they lie in memory."""

from __future__ import annotations

from pathlib import Path

from memstore.engine.format.records import ExternalExtent, Record, SegmentExtent, encode_extents
from memstore.engine.protocols.elsewhere import MappedEntry
from memstore.engine.protocols.get import files_of, hold
from memstore.engine.sync.primitives import deadline_after
from tests.engine import bytes_store


def record(segment: int = 0, **fields: object) -> Record:
    return Record(7, 0x1234, segment, 8192, 4096, 100, 0.0, b"", b"", **fields)  # type: ignore[arg-type]


def test_a_put_has_one_extent() -> None:
    assert record(3).extents == (SegmentExtent(segment=3, put_id=0x1234, size=8192, start=4096, base=0),)


def test_an_inline_value_has_none() -> None:
    assert record(inline=b"value").extents == ()


def test_an_attached_value_has_one_for_each_file() -> None:
    files = (ExternalExtent("/a", 10, 1, 2, 0), ExternalExtent("/b", 20, 3, 4, 65_536))
    assert record(adopted=encode_extents(files)).extents == files
    assert record(adopted=encode_extents([])).extents == ()


def test_a_mapped_entry_has_its_header_and_names_its_file(tmp_path: Path) -> None:
    with bytes_store.opened(str(tmp_path / "store")) as root:
        bytes_store.put_many(root, {b"large": bytes(range(250)) * 40, b"small": b"inline"})
        large, small = hold(root, [b"large", b"small"], deadline_after(10), may_lock=True)
        assert large is not None and small == MappedEntry(small.record)  # type: ignore[union-attr]
        header = bytes(large.header())
        assert len(header) == large.record.start == 8 + int.from_bytes(header[:8], "little")
        assert bytes(small.header()) == b""  # type: ignore[union-attr]
        (path,) = files_of(root, large.record)
        assert Path(path).read_bytes()[: len(header)] == header
        assert files_of(root, small.record) == ()  # type: ignore[union-attr]
        del large, small
