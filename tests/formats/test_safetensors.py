"""safetensors files and checkpoints of others, and the JSON beside tensors: what they may say, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import NonTensorData, NonTensorStack, TensorDict

import memstore
from memstore.engine.format.headers import SAFETENSORS_DTYPES
from memstore.formats.files import parse_object, parse_texts, parse_value
from memstore.structure.traits import DTYPES
from tests.examples import examples
from tests.formats.files import write_checkpoint, write_safetensors
from tests.support.equality import assert_same
from tests.support.strategies import random_bits

REFUSALS = (memstore.CorruptionError, memstore.UnsupportedValueError)


def file_of(path: Path, header: object, data: bytes = b"", size: int | None = None) -> Path:
    """A file with this header: text, or what JSON makes of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def attach_and_read(store: memstore.Store, path: Path) -> Any:
    """Attaches, gets, and touches every byte."""
    store.attach("key", path)
    value = store.get("key")
    for tensor in value.values():
        tensor.clone()
    return value


def test_every_dtype_of_the_format(store: memstore.Store, folder: Path) -> None:
    value = {name: random_bits((3, 5), DTYPES[name], seed) for seed, name in enumerate(SAFETENSORS_DTYPES)}
    save_file(value, folder / "all.safetensors")
    assert_same(
        {name: value[name] for name in store_order(folder / "all.safetensors")},
        attach_and_read(store, folder / "all.safetensors"),
    )


def store_order(path: Path) -> list[str]:
    return list(load_file(path))


def test_a_tensor_between_elements_is_copied(store: memstore.Store, folder: Path) -> None:
    """The format does not say where data starts; torch wants whole elements."""
    data = bytes(range(1, 26))
    header = {"u": entry("U8", [1], [0, 1]), "f": entry("F32", [2], [1, 9]), "d": entry("F64", [2], [9, 25])}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    got = attach_and_read(store, file_of(folder / "odd.safetensors", text, data))
    assert bytes(got["f"].view(torch.uint8)) == data[1:9]
    assert bytes(got["d"].view(torch.uint8)) == data[9:]
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in got.values())
    out = {name: torch.zeros_like(tensor) for name, tensor in got.items()}
    assert_same(got, store.get("key", out=out))
    pickle.loads(bytes(ForkingPickler.dumps(got)))["f"].fill_(0)
    assert bytes(got["f"].view(torch.uint8)) == data[1:9]  # what is sent is a copy, as of mapped ones


# Each beside a whole file, so that nothing but the named fault is wrong.
DATA = b"\0" * 8
HOSTILE: dict[str, tuple[object, bytes]] = {
    "no json": (b"{", DATA),
    "no utf-8": (b'{"\xff":1}', DATA),
    "no object": ([], DATA),
    "deep": (b"[" * 100_000, DATA),
    "name twice": (b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), DATA),
    "entry is no object": ({"a": 3}, DATA),
    "entry without dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, DATA),
    "dtype is a number": ({"a": entry(dtype=5)}, DATA),
    "dtype is unknown": ({"a": entry(dtype="F33")}, DATA),
    "dtype is a list": ({"a": entry(dtype=["F32"])}, DATA),
    "shape is a number": ({"a": entry(shape=2)}, DATA),
    "shape of floats": ({"a": entry(shape=[2.0])}, DATA),
    "shape of truth": ({"a": entry("F64", [True], [0, 8])}, DATA),
    "negative": ({"a": entry(shape=[-2])}, DATA),
    "negative twice": ({"a": entry(shape=[-2, -1])}, DATA),
    "huge": ({"a": entry(shape=[1 << 70])}, DATA),
    "overflow": ({"a": entry(shape=[1 << 62, 4])}, DATA),
    "overflow to nothing": ({"a": entry(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])}, b""),
    "many dimensions": ({"a": entry(shape=[1] * 5000 + [2])}, DATA),
    "too many elements": ({"a": entry(shape=[3])}, DATA),
    "too few elements": ({"a": entry(shape=[1])}, DATA),
    "offsets are missing": ({"a": entry(offsets=[0])}, DATA),
    "offsets backwards": ({"a": entry(offsets=[8, 0])}, DATA),
    "offsets below": ({"a": entry(offsets=[-8, 0])}, DATA),
    "offsets beyond": ({"a": entry(offsets=[8, 16])}, DATA),
    "offsets of floats": ({"a": entry(offsets=[0.0, 8.0])}, DATA),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12),
    "the same twice": ({"a": entry(), "b": entry()}, DATA),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20),
    "hole in front": ({"a": entry(offsets=[4, 12])}, b"\0" * 12),
    "trailing": ({"a": entry()}, DATA + b"\0"),
    "truncated": ({"a": entry()}, DATA[:-1]),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, DATA),
    "metadata is a list": ({"__metadata__": [], "a": entry()}, DATA),
    "name is no text": (b'{"\\ud800":%s}' % json.dumps(entry()).encode(), DATA),
    "long number": (b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 10_000), DATA),
    "not a number": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,Infinity]}}', DATA),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers_are_refused(store: memstore.Store, folder: Path, fault: str) -> None:
    header, data = HOSTILE[fault]
    path = file_of(folder / "bad.safetensors", header, data)
    with pytest.raises(REFUSALS, match="bad.safetensors") as caught:
        store.attach("key", path)
    assert caught.value.key == "key"
    assert "key" not in store


def test_the_whole_file_that_they_are_beside_is_none(store: memstore.Store, folder: Path) -> None:
    path = file_of(
        folder / "good.safetensors", {"__metadata__": {"a": "b"}, "a": {**entry(), "of a later version": 1}}, DATA
    )
    assert list(attach_and_read(store, path)) == ["a"]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_short_files_are_refused(store: memstore.Store, folder: Path, size: int) -> None:
    path, _ = write_safetensors(folder)
    os.truncate(path, size)
    with pytest.raises(memstore.CorruptionError):
        store.attach("key", path)


@pytest.mark.parametrize("size", [1 << 62, (1 << 64) - 1, 100_000_001])
def test_headers_are_not_longer_than_the_format_allows(store: memstore.Store, folder: Path, size: int) -> None:
    path = file_of(folder / "bad.safetensors", b"{}", size=size)
    os.truncate(path, 200_000_000)  # a hole: with the size that fits it would be read
    with pytest.raises(memstore.CorruptionError, match="limit" if size < 200_000_000 else "truncated"):
        store.attach("key", path)


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """A whole file, then some of its bytes or numbers changed."""
    from safetensors.torch import save

    shapes = st.lists(st.integers(0, 3), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.uint8, torch.float64, torch.bfloat16, torch.bool])
    tensors = draw(
        st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), st.tuples(shapes, dtypes), max_size=4)
    )
    tensors.pop("__metadata__", None)
    content = bytearray(save({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}))
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, min(end, len(content) - 1)))
        kind = draw(st.sampled_from(["byte", "digit", "cut", "insert", "size"]))
        if kind == "byte":
            content[at] = draw(st.integers(0, 255))
        elif kind == "digit":
            digits = [i for i in range(8, min(end, len(content))) if chr(content[i]).isdigit()]
            if digits:
                content[draw(st.sampled_from(digits))] = draw(st.sampled_from(b"0123456789-"))
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 9))]
        elif kind == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            content[:8] = draw(st.integers(0, len(content) + 9)).to_bytes(8, "little")
        if not content:
            break
    return bytes(content)


@hypothesis.settings(max_examples=examples(100), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(content=damaged_files())
def test_what_is_accepted_is_what_safetensors_reads(store: memstore.Store, folder: Path, content: bytes) -> None:
    path = folder / "some.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        got = attach_and_read(store, path)
    except REFUSALS:
        return
    wanted = {name: tensor.clone() for name, tensor in load_file(path).items()}
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), got[name].reshape(-1).view(torch.uint8))


def test_a_segment_of_a_store_is_refused(store: memstore.Store) -> None:
    """Its store will write other values into it."""
    store.put("value", torch.zeros(5000))
    with pytest.raises(memstore.UnsupportedValueError, match="belongs to a store"):
        store.attach("key", store.info("value").files[0])


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a.w": 3}}',
        b'{"weight_map": {"a.w": ""}}',
        b'{"weight_map": {"a.w": "."}}',
        b'{"weight_map": {"a.w": ".."}}',
        b'{"weight_map": {"a.w": "../secret.safetensors"}}',
        b'{"weight_map": {"a.w": "/etc/passwd"}}',
        b'{"weight_map": {"a.w": "x\\u0000"}}',
        b'{"weight_map": {"a.w": "missing.safetensors"}}',
        b'{"weight_map": {"b.w": "model-00001-of-00005.safetensors"}}',
        b'{"weight_map": {"a.w": "model-00001-of-00005.safetensors", "a.w": "model-00001-of-00005.safetensors"}}',
    ],
)
def test_hostile_indexes_are_refused(store: memstore.Store, folder: Path, index: bytes) -> None:
    path, _ = write_checkpoint(folder)
    save_file({"a.w": torch.zeros(3)}, folder / "secret.safetensors")
    path.write_bytes(index)
    with pytest.raises(memstore.CorruptionError):
        store.attach("key", path)


def test_a_shard_that_is_damaged_is_named(store: memstore.Store, folder: Path) -> None:
    path, _ = write_checkpoint(folder)
    shard = path.parent / "model-00001-of-00005.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(memstore.CorruptionError) as caught:
        store.attach("key", path)
    assert caught.value.path == str(shard)


@pytest.fixture
def cache(folder: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """A checkpoint as huggingface_hub keeps it: a snapshot of links into `blobs`."""
    index, value = write_checkpoint(folder)
    blobs, snapshot = folder / "models--x--y/blobs", folder / "models--x--y/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(index.parent.iterdir())):
        file.rename(blobs / f"{i:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064}")
    yield snapshot, value


def test_links_within_a_hugging_face_cache_are_followed(
    store: memstore.Store, cache: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    snapshot, value = cache
    for path in (snapshot, snapshot / "model.safetensors.index.json"):
        store.attach("key", path)
        assert_same(value, store.get("key"))
    assert all("/blobs/" in file for file in store.info("key").files)


def test_other_links_out_of_a_folder_are_refused(
    store: memstore.Store, folder: Path, cache: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    snapshot, _ = cache
    secret, _ = write_safetensors(folder)
    shard = snapshot / "model-00001-of-00005.safetensors"
    for target in (secret, "../../other", f"../../blobs/../../../{secret.name}"):
        shard.unlink()
        shard.symlink_to(target)
        with pytest.raises(memstore.PermissionDeniedError, match="out of its folder"):
            store.attach("key", snapshot)
    for name in ("model.safetensors.index.json", "model.safetensors"):
        home = folder / f"home of {name}"
        home.mkdir()
        (home / name).symlink_to(secret)
        with pytest.raises(memstore.PermissionDeniedError, match="out of its folder"):
            store.attach("key", home)


def test_links_within_the_folder_are_followed(store: memstore.Store, folder: Path) -> None:
    index, value = write_checkpoint(folder)
    shard = index.parent / "model-00001-of-00005.safetensors"
    shard.rename(index.parent / "elsewhere")
    shard.symlink_to("elsewhere")
    store.attach("key", index)
    assert_same(value, store.get("key"))


def test_safetensors_refuses_nearly_all_of_these(folder: Path) -> None:
    """So that the list tests the format, and not a whim."""
    accepted: set[str] = set()
    for fault, (header, data) in HOSTILE.items():
        try:
            load_file(file_of(folder / "bad.safetensors", header, data))
        except SafetensorError:
            continue
        accepted.add(fault)
    assert accepted == {"name twice", "many dimensions"}


# --- the JSON beside others' tensors: what it may say, and how long it takes to say no --------------------------------


SURROGATE = "\ud800"
NOTHING = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def write_header(path: Path, header: Any) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def write_index(folder: Path, listed: Any) -> Path:
    (folder / "i").mkdir(exist_ok=True)
    path = folder / "i" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": listed}))
    return path


def write_memmap(folder: Path, **changes: Any) -> Path:
    path = folder / "memmap"
    TensorDict(a=torch.ones(3), batch_size=[3]).memmap(path)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, **changes}))
    return path


def write_stack(folder: Path, data: Any) -> Path:
    path = folder / "stack"
    NonTensorStack("a", "b").memmap(path)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "data": data, "device": "cpu"}))
    return path


LONG = "x" * 100_000
ENTRY = {"dtype": "torch.uint8", "shape": [1], "device": "cpu"}
HOSTILE_DOCUMENTS: dict[str, Callable[[Path], Path]] = {
    "shard of no text": lambda folder: write_index(folder, {"a": SURROGATE}),
    "tensor of no text": lambda folder: write_index(folder, {SURROGATE: "a"}),
    "name of no text": lambda folder: write_header(folder / "x.safetensors", {SURROGATE: NOTHING}),
    "metadata of no text": lambda folder: write_header(
        folder / "x.safetensors", {"__metadata__": {"a": SURROGATE}, "a": NOTHING}
    ),
    "key of no text": lambda folder: write_memmap(folder, **{SURROGATE: ENTRY}),
    "dimension of no text": lambda folder: write_memmap(folder, _names=[SURROGATE]),
    "long shard": lambda folder: write_index(folder, {"a": LONG}),
    "long path": lambda folder: write_index(folder, {"a": "../" * 50_000}),
    "long name": lambda folder: write_header(folder / "x.safetensors", {LONG: {}}),
    "long overlapping name": lambda folder: write_header(
        folder / "x.safetensors", {LONG: {**NOTHING, "data_offsets": [3, 3]}}
    ),
    "long dtype": lambda folder: write_header(folder / "x.safetensors", {"a": {**NOTHING, "dtype": LONG}}),
    "long key": lambda folder: write_memmap(folder, **{LONG: ENTRY}),
    "long nested key": lambda folder: write_memmap(folder, **{LONG: {"type": "x"}}),
    "long device": lambda folder: write_memmap(folder, device=LONG),
    "long class": lambda folder: write_memmap(folder, _type=LONG, _class=LONG),
    "missing folder": lambda folder: write_memmap(folder, b={"type": "TensorDict"}),
    "deep stack": lambda folder: write_stack(folder, json.loads("[" * 500 + "1" + "]" * 500)),
    "stack of many": lambda folder: write_stack(folder, [[1]] * ((1 << 17) + 1)),
}


@pytest.mark.parametrize("name", HOSTILE_DOCUMENTS)
def test_the_refusal_is_typed_and_short(store: memstore.Store, folder: Path, name: str) -> None:
    path = HOSTILE_DOCUMENTS[name](folder)
    for copy in (False, True):
        with pytest.raises(REFUSALS) as caught:
            store.attach("key", path, copy=copy)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [float("inf"), {"a": [1.5, float("-inf")]}, 'a:"b', {"a:b": ':"'}, "\u00e9:\\"])
def test_values_of_every_look_are_read(store: memstore.Store, folder: Path, value: Any) -> None:
    TensorDict(a=torch.ones(2), n=NonTensorData(value)).memmap(folder / "memmap")
    store.attach("key", folder / "memmap")
    assert store.get("key")["n"] == TensorDict.load_memmap(folder / "memmap")["n"] == value


@hypothesis.given(data=st.data())
def test_a_name_that_comes_twice_is_found(data: st.DataObject) -> None:
    texts = st.text(alphabet='a:"\\{}[],u0\n\u00e9', max_size=4)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    )
    pairs = data.draw(st.lists(st.tuples(texts, values), max_size=5))
    ascii_only = data.draw(st.booleans())
    parts = [f"{json.dumps(a, ensure_ascii=ascii_only)}:{json.dumps(b, ensure_ascii=ascii_only)}" for a, b in pairs]
    text = data.draw(st.sampled_from(["{%s}", " {%s} "])) % ",".join(parts)
    if len({name for name, _ in pairs}) < len(pairs):
        with pytest.raises(memstore.CorruptionError, match="twice"):
            parse_object("path", text.encode())
    else:
        found = parse_object("path", text.encode())
        assert {name: parse_value("path", raw) for name, raw in found.items()} == dict(pairs)


def test_a_colon_that_is_written_as_an_escape_is_one() -> None:
    for text in (rb'{"\u003a":1}', rb'{"\u003A":":\u003a"}', rb'{"\\u003a":1}', rb'{"\"\\\u003a":1,"a":1}'):
        found = parse_object("path", text)
        assert {name: parse_value("path", raw) for name, raw in found.items()} == json.loads(text)
        assert parse_texts("path", parse_object("path", b'{"it":{"\\u003a":"x"}}')["it"]) == {":": "x"}
    for text in (rb'{"\u003a":1,":":2}', rb'{":":"\u003a","\u003A":1}'):
        with pytest.raises(memstore.CorruptionError, match="twice"):
            parse_object("path", text)


def test_a_text_that_comes_twice_is_found() -> None:
    for text in (b'{"a":"x","a":"y"}', b'{"a":"x","\\u0061":"x"}', b'{"a:":":","a:":":"}'):
        raw = parse_object("path", b'{"it":%s}' % text)["it"]
        with pytest.raises(memstore.CorruptionError, match="twice"):
            parse_texts("path", raw)


def seconds(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def header_of(count: int) -> bytes:
    """Nothing is wrong but the last of its entries."""
    entries = ",".join(f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    return f'{{{entries},"z":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}}}'.encode()


def test_to_refuse_a_long_header_takes_no_longer_than_to_read_it(store: memstore.Store, folder: Path) -> None:
    text = header_of(60_000)
    path = write_header(folder / "x.safetensors", text)

    def refuse() -> None:
        with pytest.raises(memstore.CorruptionError):
            store.attach("key", path)

    assert seconds(refuse) < 2 * seconds(lambda: json.loads(text))
