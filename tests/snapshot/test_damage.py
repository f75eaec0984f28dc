"""Damaged snapshots: every flipped byte, every cut or missing file, and manifests that somebody made up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import xxhash

import memstore
from memstore import CorruptionError, Snapshot, StateDict
from memstore.snapshot import manifest as manifests
from memstore.snapshot.manifest import Manifest, encode_manifest, read_manifest
from memstore.snapshot.stateful import StateWalker
from memstore.structure import traits
from tests.support.equality import assert_same

MANIFEST = "memstore_snapshot.json"


def value() -> dict[str, Any]:
    return {"x": torch.arange(20, dtype=torch.int32), "n": {"y": [torch.ones(3, dtype=torch.bfloat16), "text", 7]}}


@pytest.fixture
def path(path: str) -> str:
    Snapshot.take(path, {"state": StateDict(value())}, durability="process")
    return path


def restored(path: str) -> dict[str, Any]:
    state = StateDict({"x": torch.zeros(20, dtype=torch.int32)})
    Snapshot(path).restore({"state": state})
    return dict(state)


def test_every_flipped_byte_is_found(path: str) -> None:
    for name in os.listdir(path):
        with open(f"{path}/{name}", "r+b") as file:
            content = file.read()
            for at in range(len(content)):
                file.seek(at)
                file.write(bytes([content[at] ^ (1 << at % 8)]))
                file.flush()
                with pytest.raises(CorruptionError, match=name) as caught:
                    Snapshot(path).verify()
                assert caught.value.path == f"{path}/{name}"
                with pytest.raises(CorruptionError):
                    restored(path)
                file.seek(at)
                file.write(content[at : at + 1])
                file.flush()
    Snapshot(path).verify()
    assert_same(value(), restored(path))


def test_every_cut_file_is_found(path: str) -> None:
    for name in os.listdir(path):
        whole = os.path.getsize(f"{path}/{name}")
        shutil.copy(f"{path}/{name}", f"{path}/copy")
        for size in (0, 1, whole // 2, whole - 1, whole + 1):
            os.truncate(f"{path}/{name}", size)
            for use in (lambda: Snapshot(path).verify(), lambda: restored(path)):
                with pytest.raises(CorruptionError, match=name):
                    use()
            shutil.copy(f"{path}/copy", f"{path}/{name}")
        os.remove(f"{path}/copy")


def test_every_missing_file_is_found(path: str) -> None:
    os.rename(f"{path}/state.safetensors", f"{path}/away")
    for use in (lambda: Snapshot(path).verify(), lambda: restored(path)):
        with pytest.raises(CorruptionError, match=r"state\.safetensors"):
            use()
    os.symlink(f"{path}/away", f"{path}/state.safetensors")
    with pytest.raises(CorruptionError, match="link"):
        Snapshot(path).verify()
    os.remove(f"{path}/{MANIFEST}")
    with pytest.raises(memstore.NotAStoreError, match="was not finished"):
        restored(path)
    with pytest.raises(memstore.NotAStoreError, match="no such folder"):
        restored(f"{path}/nowhere")


# --- manifests that no take wrote, with a right checksum --------------------------------------------------------------


def the_manifest(path: str) -> Manifest:
    with open(f"{path}/{MANIFEST}", "rb") as file:
        return read_manifest(path, file.read())


def use(path: str, made: bytes) -> None:
    os.remove(f"{path}/{MANIFEST}")
    with open(f"{path}/{MANIFEST}", "wb") as file:
        file.write(made)
    snapshot = Snapshot(path)
    snapshot.get_manifest()
    snapshot.restore({"state": StateDict()})
    snapshot.verify()


change = msgspec.structs.replace


def with_file(found: Manifest, **changes: Any) -> Manifest:
    return change(found, files=(change(found.files[0], **changes), *found.files[1:]))


def with_tensor(found: Manifest, **changes: Any) -> Manifest:
    return change(found, tensors=(change(found.tensors[0], **changes), *found.tensors[1:]))


def with_box(found: Manifest, **changes: Any) -> Manifest:
    box = found.tensors[0].boxes[0]
    fields = {name: changes.get(name, getattr(box, name)) for name in box.__struct_fields__}
    return with_tensor(found, boxes=(type(box)(**fields),))


def with_value(found: Manifest, **changes: Any) -> Manifest:
    return change(found, values=(change(found.values[0], **changes),))


def split(found: Manifest, second_offset: int, second_at: int) -> Manifest:
    """The first tensor in two boxes of ten elements."""
    box = found.tensors[0].boxes[0]
    made = type(box)
    first = made(0, box.offset, 40, (0,), (10,))
    return with_tensor(found, boxes=(first, made(0, box.offset + second_at, 40, (second_offset,), (10,))))


HOSTILE: dict[str, Callable[[Manifest], Manifest]] = {
    "a path out of the folder": lambda m: with_file(m, name="../state.safetensors"),
    "an absolute path": lambda m: with_file(m, name="/etc/passwd"),
    "a NUL in a name": lambda m: with_file(m, name="state.safetensors\0"),
    "another file of the folder": lambda m: with_file(m, name=MANIFEST),
    "a file twice": lambda m: change(m, files=(*m.files, *m.files)),
    "a file of another size": lambda m: with_file(m, size=m.files[0].size + 1),
    "a huge file": lambda m: with_file(m, size=(1 << 60) - 1, sums=b""),
    "too few sums": lambda m: with_file(m, sums=m.files[0].sums[:-1]),
    "too many sums": lambda m: with_file(m, sums=m.files[0].sums * 2),
    "a wrong sum": lambda m: with_file(m, sums=bytes(8)),
    "a huge tensor": lambda m: with_tensor(m, shape=(1 << 59, 1 << 59)),
    "a tensor that is larger": lambda m: with_tensor(m, shape=(21,)),
    "a tensor that is smaller": lambda m: with_tensor(m, shape=(19,)),
    "another dtype of the same size": lambda m: with_tensor(m, dtype="float32"),
    "another dtype": lambda m: with_tensor(m, dtype="float64"),
    "no dtype": lambda m: with_tensor(m, dtype="int32; rm -rf"),
    "a dtype that is none": lambda m: with_tensor(m, dtype="quint8"),
    "no boxes": lambda m: with_tensor(m, boxes=()),
    "a box twice": lambda m: with_tensor(m, boxes=m.tensors[0].boxes * 2),
    "boxes that overlap in the tensor": lambda m: split(m, 5, 40),
    "boxes that overlap in the file": lambda m: split(m, 10, 20),
    "a box of other dimensions": lambda m: with_box(m, offsets=(0, 0), shape=(20, 1)),
    "a box beyond the tensor": lambda m: with_box(m, offsets=(1,)),
    "a box beyond its file": lambda m: with_box(m, offset=1 << 40),
    "a box of a file that isn't there": lambda m: with_box(m, file=9),
    "a box of other bytes": lambda m: with_box(m, nbytes=79),
    "two tensors in one place": lambda m: change(m, tensors=(m.tensors[0], change(m.tensors[0], path="other"))),
    "a value with a tensor that isn't there": lambda m: with_value(m, tensors=(0, 99)),
    "a value with too few tensors": lambda m: with_value(m, tensors=(0,)),
    "a value with other tensors": lambda m: with_value(m, tensors=tuple(reversed(m.values[0].tensors))),
    "a value whose structure is none": lambda m: with_value(m, structure=b"\x93\x00"),
    "a value whose structure is nested without end": lambda m: with_value(m, structure=b"\x91" * 100_000),
    "a value whose objects are none": lambda m: with_value(m, objects=b"\xc1"),
    "a value with other objects": lambda m: with_value(m, objects=b"\x90"),
    "a value of another name": lambda m: with_value(m, key="other"),
    "a rank with a value that isn't there": lambda m: change(m, ranks=({"state": 5},)),
    "other ranks than it says": lambda m: change(m, world_size=2),
    "no id": lambda m: change(m, id="../../../../etc"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_damage(path: str, name: str) -> None:
    found = the_manifest(path)
    with pytest.raises(CorruptionError) as caught:
        use(path, encode_manifest(HOSTILE[name](found)))
    assert str(caught.value).startswith(path)


def signed(text: bytes) -> bytes:
    """A manifest of this text, whose checksum is 16 zeros."""
    return text.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(text).encode(), 1)


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"[]",
        b'"id":1}',
        b'"id":' + b"[" * 100_000,
        b'"id":"a","id":"b"}',
        b'"files":[{"name":"\xff"}]}',
        b'"world_size":1e400}',
        b'"ranks":' + b"9" * 5000 + b"}",
    ],
    ids=range(8),
)
def test_json_that_is_no_manifest_is_damage(path: str, rest: bytes) -> None:
    with pytest.raises(CorruptionError):
        use(path, signed(b'{"memstore_snapshot":1,"checksum":"0000000000000000",' + rest))


def test_a_text_of_many_empty_objects_is_not_parsed(path: str) -> None:
    text = b'{"memstore_snapshot":1,"checksum":"0000000000000000","ranks":[' + b"{}," * (1 << 21) + b"{}]}"
    with pytest.raises(CorruptionError, match="2,097,154 objects"):
        use(path, signed(text))


@pytest.mark.parametrize(
    "name, twice",
    [
        (b'"id":', b'"id":"0000000000000000","id":'),
        (b'"size":', b'"size":1,"size":'),
        (b'"path":', b'"path":"a:b\\u003a","path":'),
        (b'"ranks":[{', b'"ranks":[{"state":1,'),
    ],
)
def test_a_name_that_stands_twice_in_an_object_is_damage(path: str, name: bytes, twice: bytes) -> None:
    """Of two readers one may take the first, and the other the second."""
    text = encode_manifest(the_manifest(path)).split(b'",', 1)[1]
    assert text.count(name)
    zeros = b'{"memstore_snapshot":1,"checksum":"0000000000000000",'
    use(path, signed(zeros + text))
    with pytest.raises(CorruptionError, match="twice"):
        use(path, signed(zeros + text.replace(name, twice, 1)))


def test_names_may_have_colons_quotes_and_backslashes(tmp_path: Any) -> None:
    state = StateDict({'a:b"\\': torch.ones(2), "\\u003a": torch.zeros(1), "🐍:": {"c:": 1}})
    Snapshot.take(f"{tmp_path}/s", {'k:"\\': state}, durability="process")
    found = Snapshot(f"{tmp_path}/s").get_state_dict_for_key('k:"\\')
    assert_same(dict(state), found)


@pytest.mark.parametrize("created", [-1.0, 1e308])
def test_a_time_that_no_clock_has_is_damage(path: str, created: float) -> None:
    with pytest.raises(CorruptionError, match="created"):
        use(path, encode_manifest(change(the_manifest(path), created=created)))


def test_a_snapshot_of_a_newer_format_says_so(path: str) -> None:
    text = encode_manifest(the_manifest(path)).split(b'",', 1)[1]
    with pytest.raises(memstore.FormatVersionError, match="format 2"):
        use(path, signed(b'{"memstore_snapshot":2,"checksum":"0000000000000000",' + text))


def test_a_manifest_that_is_too_large_is_not_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "LIMIT", 100)
    with pytest.raises(CorruptionError, match=MANIFEST):
        restored(path)


@pytest.mark.parametrize("take", [Snapshot.take, lambda *args: Snapshot.async_take(*args).wait()])
def test_a_take_that_could_not_be_read_fails_and_leaves_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, take: Callable[..., Any]
) -> None:
    monkeypatch.setattr(manifests, "LIMIT", 10_000)
    path = f"{tmp_path}/s"
    with pytest.raises(memstore.UnsupportedValueError, match="'blob'.* bytes.*, app_state.'small'"):
        take(path, {"small": StateDict(x=1), "blob": StateDict(b=bytes(8000), w=torch.ones(3))})
    assert not os.path.exists(path)
    with pytest.raises(memstore.UnsupportedValueError, match="10,000"):  # told when all of it is put together
        Snapshot.take(path, {"many": StateDict({f"{i:04}": torch.ones(()) for i in range(150)})})
    assert not os.path.exists(path)


def test_no_memory_is_taken_for_more_than_the_files_have(path: str) -> None:
    """All calls that make new tensors look at the files first; where they are so large, torch's error is ours."""
    path = f"{path}-2"
    Snapshot.take(path, {"state": StateDict(a=torch.ones(1))}, checksum=False)
    found, count = the_manifest(path), 1 << 45
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traits, "why_too_expanded", lambda _: None)
        state = StateWalker(allow_pickle=False).add("state", {"a": torch.zeros(()).expand(count)})
    box, name = found.tensors[0].boxes[0], f"{path}/{found.files[0].name}"
    found = with_tensor(found, shape=(count,), boxes=(change(box, nbytes=4 * count, shape=(count,)),))
    found = with_file(with_value(found, structure=state.structure), size=box.offset + 4 * count)
    with open(f"{path}/{MANIFEST}", "wb") as file:
        file.write(encode_manifest(found))
    snapshot = Snapshot(path)
    calls: list[Callable[[], Any]] = [
        lambda: snapshot.restore({"state": StateDict()}),
        lambda: snapshot.read_object("0/state/a"),
        lambda: snapshot.get_state_dict_for_key("state"),
    ]
    for call in calls:
        with pytest.raises(CorruptionError, match="bytes, and the manifest says"):
            call()
    os.truncate(name, box.offset + 4 * count)  # a sparse file, of no bytes on the disk
    for call in calls:
        with pytest.raises(memstore.ResourceLimitError, match="state/a: there is no memory"):
            call()


def test_without_checksums_cuts_are_found_and_flips_are_not_looked_for(tmp_path: Any) -> None:
    path = f"{tmp_path}/s"
    Snapshot.take(path, {"state": StateDict(value())}, checksum=False)
    with open(f"{path}/state.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read()
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    restored(path)
    os.truncate(f"{path}/state.safetensors", os.path.getsize(f"{path}/state.safetensors") - 1)
    with pytest.raises(CorruptionError):
        restored(path)
