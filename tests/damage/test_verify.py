"""`Store.verify`: it finds what is damaged, says what it could check, and raises no false alarm."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from typing import Any

import pytest
import torch

import memstore
from memstore import contents
from memstore.engine.repair.verify import look_at
from tests.children import Child, Wire, children
from tests.damage.stores import INLINE, content_of, header_size, make, overwrite, paths, values
from tests.inside import root_of

SEGMENTS = set(values()) - INLINE


@pytest.mark.parametrize("checksum", [True, False])
def test_it_counts_what_has_checksums(scratch: str, checksum: bool) -> None:
    make(scratch, checksum=checksum)
    with memstore.open(scratch) as store:
        store.put_many({"nothing": None, "empty": torch.zeros(0), "text": "long " * 1000})  # no bytes of tensors
        report = store.verify()
    covered = len(INLINE) + 3 + (len(SEGMENTS) if checksum else 0)
    assert (report.checked, report.unchecked) == (covered, len(values()) + 3 - covered)
    assert report.damaged == () and report.ok


def test_an_empty_store(scratch: str) -> None:
    with memstore.open(scratch) as store:
        assert store.verify() == memstore.VerifyReport(0, 0, (), ok=True)
        assert store.verify([]).ok


def test_chosen_keys(scratch: str) -> None:
    make(scratch)
    overwrite(paths(scratch)["nested"], 5000, b"damage")
    with memstore.open(scratch) as store:
        assert store.verify(["segment/1", "inline/1", "segment/1"]).checked == 2
        report = store.verify(["nested", "no such key"])
        assert [error.key for error in report.damaged] == ["nested", "no such key"]
        assert report.checked == 0 and not report.ok
        with pytest.raises(memstore.InvalidKeyError):
            store.verify([""])
        with pytest.raises(TypeError):
            store.verify("nested")


def test_damage_is_told_with_key_and_file(scratch: str) -> None:
    make(scratch)
    files = paths(scratch)
    overwrite(files["segment/0"], header_size(files["segment/0"]) + 100, b"damage")
    overwrite(files["segment/1"], 2000, b"damage")
    overwrite(files["segment/2"], 0, bytes(64))
    os.truncate(files["segment/3"], 5000)
    os.unlink(files["nested"])
    with memstore.open(scratch) as store:
        report = store.verify()
    found = {error.key: error.path for error in report.damaged}
    assert found == {key: files[key] for key in ("segment/0", "segment/1", "segment/2", "segment/3", "nested")}
    assert all(error.detail and str(error.path) in str(error) for error in report.damaged)
    assert report.checked == len(values()) - 5


def test_exchanged_files(scratch: str) -> None:
    make(scratch)
    files = paths(scratch)
    shutil.copy(files["segment/1"], f"{scratch}.aside")
    shutil.copy(files["segment/2"], files["segment/1"])
    shutil.copy(f"{scratch}.aside", files["segment/2"])
    with memstore.open(scratch) as store:
        assert {error.key for error in store.verify().damaged} == {"segment/1", "segment/2"}


@pytest.mark.parametrize("name", ["memstore.json", "lock", "doorbell"])
def test_the_files_of_the_folder(scratch: str, name: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store:
        with open(f"{scratch}/{name}", "a") as file:
            file.write("?")
        (error,) = store.verify().damaged
        assert error.path == f"{scratch}/{name}" and error.key is None
        os.unlink(f"{scratch}/{name}")
        (error,) = store.verify().damaged
        assert error.path == f"{scratch}/{name}"


def test_a_changed_setting(scratch: str) -> None:
    """So that no flipped word turns checksums off."""
    make(scratch)
    with memstore.open(scratch) as store:
        path = f"{scratch}/memstore.json"
        text = content_of(path)
        overwrite(path, text.index(b"true"), b"null")
        assert not store.verify().ok
        overwrite(path, 0, text.replace(b'"checksum": true', b'"checksum":false'))
        (error,) = store.verify().damaged
        assert error.path == path


def test_no_false_alarm_while_others_write(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch) as store, children(2, put_until_told, scratch) as writers:
        for writer in writers:
            writer.receive()
        for _ in range(5):
            report = store.verify()
            assert report.ok, report
            assert report.checked >= len(values())
        for writer in writers:
            writer.send()
            assert writer.receive() > 100  # puts: it was busy


def test_what_is_replaced_meanwhile_is_looked_at_anew(scratch: str) -> None:
    """The header of what was replaced says that it is retired: no damage."""
    with memstore.open(scratch, checksum=True) as store:
        store.put("key", torch.zeros(5000))
        root = root_of(store)
        seen: list[int] = []

        def check(*held: Any) -> bool:
            if len(seen) < 3:
                seen.append(store.put("key", torch.ones(5000)))
                raise memstore.CorruptionError("of the version before")
            return contents.verify(*held)

        assert look_at(root, b"key", check, id, 5.0, may_lock=True) is True
        with pytest.raises(memstore.CorruptionError):
            look_at(root, b"key", refuse, id, 5.0, may_lock=True)


def refuse(*_: object) -> bool:
    raise memstore.CorruptionError("of this version")


def put_until_told(wire: Wire, number: int, root: str) -> int:
    count = 0
    with memstore.open(root) as store:
        wire.send()
        while not wire.has_message:
            count += 1
            store.put("shared", torch.full((5000 + count % 7,), count))
            store.put(f"mine/{number}", {"a": count} if count % 2 else torch.zeros(9000))
            if count % 5 == 0:
                store.delete(f"mine/{number}")
            store.put_many({"inline/0": values()["inline/0"], "nested": torch.ones(7000)})
    return count * 4


def test_progress_comes_to_its_end(scratch: str) -> None:
    make(scratch)
    with memstore.open(scratch, "r") as store:
        for keys in (None, ["nested", "inline/1"]):
            seen: list[tuple[int, int]] = []
            store.verify(keys, progress=lambda done, total, seen=seen: seen.append((done, total)))
            assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0
            total = sum(store.info(key).nbytes for key in keys or store)
            assert {every for _, every in seen} == {total}


def test_progress_goes_on_within_a_large_value(scratch: str) -> None:
    with memstore.open(scratch, checksum=True) as store:
        store.put("key", [torch.zeros(1 << 16) for _ in range(10)])
        seen: list[int] = []
        store.verify(progress=lambda done, _: seen.append(done))
        assert len(set(seen)) >= 10


def test_little_memory(scratch: str) -> None:
    """What is looked at is mapped, and not copied."""
    with memstore.open(scratch, checksum=True) as store:
        for number in range(4):
            store.put(f"key {number}", torch.full((32 << 20,), number, dtype=torch.uint8))
    with Child(verify_within, scratch, 24 << 20) as child:
        assert child.receive() == 4


def verify_within(_: Wire, root: str, room: int) -> int:
    with memstore.open(root) as store:
        store.verify(["key 0"])
        with open("/proc/self/status") as file:
            (used,) = (int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + (32 << 20) + room, -1))  # a private mapping counts
        return store.verify().checked


def test_too_few_files_are_told(scratch: str) -> None:
    make(scratch)
    with Child(verify_without_files, scratch) as child:
        assert child.receive() == errno.EMFILE


def verify_without_files(_: Wire, root: str) -> int | None:
    with memstore.open(root) as store:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.raises(memstore.ResourceLimitError, match="ulimit -n") as caught:
            store.verify()
        return caught.value.errno


def test_a_report_keeps_no_store_open(scratch: str) -> None:
    make(scratch)
    overwrite(paths(scratch)["nested"], 5000, b"damage")
    with memstore.open(scratch) as store:
        report = store.verify()
    assert memstore.repair(scratch, timeout=0.0).lost == ()
    assert len(report.damaged) == 1


def test_a_closed_store(scratch: str) -> None:
    store = memstore.open(scratch)
    store.close()
    with pytest.raises(memstore.StoreClosedError):
        store.verify()
