"""Damaged snapshots: every flipped byte, every cut or missing file, and manifests that somebody made up."""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore import CorruptionError, Snapshot, StateDict
from memstore.convert import convert
from memstore.snapshot import manifest as manifests
from memstore.snapshot.manifest import MANIFEST, Manifest, encode_manifest, read_manifest
from memstore.snapshot.stateful import StateWalker
from memstore.structure import traits
from tests.examples import examples
from tests.support.equality import assert_same


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


def needed(path: str) -> list[str]:
    """Returns all files but the sums of the boxes, which only an increment to the snapshot looks at."""
    return [name for name in os.listdir(path) if not name.endswith(".sums")]


def test_every_flipped_byte_is_found(path: str) -> None:
    for name in needed(path):
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
    for name in needed(path):
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


# --- manifests with a right checksum and anything else in them: read, or refused with a typed error -------------------


DEEP = "deep"  # stands for lists within lists
VALUES: list[Any] = [
    *(
        True,
        None,
        -1,
        0,
        1,
        7,
        1.0,
        1.5,
        -0.0,
        1e308,
        2**31,
        2**53 + 1,
        2**60 - 1,
        2**60,
        2**63,
        2**64,
        -(2**63),
        10**30,
    ),
    *("", "x", "\0", "\x1b[2J", "../x", "é" * 300, "1", [], {}, [0], [[]], {"": 0}, [2**59, 2**59], DEEP),
]


def signed_rest(rest: str) -> bytes:
    """A manifest whose text goes on so behind its checksum."""
    rest = rest.replace(json.dumps(DEEP), "[" * 2000 + "]" * 2000)
    text = b'{"memstore_snapshot":1,"checksum":"0000000000000000",' + rest.encode()
    return text.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(text).encode(), 1)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers in a document, with each of their keys."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries):
        yield value, key
        yield from places(entry)


def raw_of(text: str) -> bytes:
    """What a text in base64 stands for; two bytes for any other."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b"xy"


@st.composite
def broken(draw: st.DrawFn, document: Any) -> Any:
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        where = list(places(made))
        if not where:
            break
        holder, key = draw(st.sampled_from(where))
        value = holder[key]
        kind = draw(st.sampled_from(["other", "another's", "near", "bytes", "twice", "gone"]))
        if kind == "other":
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        elif kind == "another's":
            other, name = draw(st.sampled_from(where))
            holder[key] = copy.deepcopy(other[name])
        elif kind == "near" and isinstance(value, int):
            holder[key] = value + draw(st.sampled_from([-2, -1, 1, 2, 8, 64]))
        elif kind == "bytes" and isinstance(value, str):
            raw = bytearray(raw_of(value))
            start = draw(st.integers(0, len(raw)))
            raw[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
            holder[key] = base64.b64encode(raw).decode()
        elif kind == "twice" and isinstance(holder, list):
            holder.append(copy.deepcopy(value))
        elif kind == "gone":
            del holder[key]
    return made


class Kept:
    """A snapshot whose manifest is replaced."""

    def __init__(self, folder: str) -> None:
        self.path, self.converted = f"{folder}/s", f"{folder}/converted"
        self.store = memstore.open(f"{folder}/store")
        state = StateDict(
            a=torch.arange(20, dtype=torch.int32), b=[torch.ones(3), "text", {"c": 1.5}], d=torch.zeros(0, 3)
        )
        state["e"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        Snapshot.take(self.path, {"model": torch.nn.Linear(2, 2), "state": state})
        with open(f"{self.path}/{MANIFEST}") as file:
            self.document = json.load(file)
        for name in ("memstore_snapshot", "checksum"):
            del self.document[name]

    def use(self, text: bytes) -> None:
        """All that reads a snapshot. Raises what it raises."""
        os.remove(f"{self.path}/{MANIFEST}")
        with open(f"{self.path}/{MANIFEST}", "wb") as file:
            file.write(text)
        snapshot = Snapshot(self.path)
        failed: list[Exception] = []

        def look(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except memstore.MemstoreError as error:
                failed.append(error)

        for path in look(snapshot.get_manifest) or ():
            look(lambda path=path: snapshot.read_object(path))
        look(snapshot.view)
        look(lambda: snapshot.get_state_dict_for_key("state"))
        look(lambda: snapshot.restore({"state": StateDict()}))
        look(lambda: snapshot.restore({"model": torch.nn.Linear(2, 2)}, strict=False))
        look(snapshot.verify)
        for as_copy in (False, True):
            self.store.delete("k", missing_ok=True)
            look(lambda as_copy=as_copy: self.store.attach("k", self.path, copy=as_copy))
            if "k" in self.store:
                look(lambda: self.store.get("k"))
                look(lambda: self.store.info("k"))
        look(lambda: convert(self.path, self.converted))
        shutil.rmtree(self.converted, ignore_errors=True)
        if failed:
            raise failed[0]


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder:
        yield Kept(folder)


@pytest.mark.parametrize(
    "objects",
    [
        b"",
        b"\x05",
        b"\xa1x",
        b"\x80",
        b"\xc0",
        b"\xc1",
        b"\x90",
        b"\x91",
        b"\x92\x03",
        b"\x93\x01\x02\x03",
        b"\x91" * 300 + b"\x03",
    ],
)
def test_objects_that_no_take_wrote_are_damage_at_every_call(kept: Kept, objects: bytes) -> None:
    document = copy.deepcopy(kept.document)
    (value,) = [one for one in document["values"] if one["key"] == "state"]
    value["objects"] = base64.b64encode(objects).decode()
    with pytest.raises(memstore.CorruptionError):
        kept.use(signed_rest(json.dumps(document)[1:]))
    with pytest.raises(memstore.CorruptionError, match=f"^{kept.path}/{MANIFEST}: the value 'state'") as raised:
        kept.store.attach("hostile", kept.path)
    assert raised.value.key == "hostile" and raised.value.path == f"{kept.path}/{MANIFEST}"
    assert "hostile" not in kept.store


@given(st.data())
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_manifest_does_harm(kept: Kept, data: st.DataObject) -> None:
    rest = json.dumps(data.draw(broken(kept.document)))[1:]
    try:
        kept.use(signed_rest(rest))
    except memstore.MemstoreError as error:
        assert kept.path in str(error) or "app_state" in str(error)
