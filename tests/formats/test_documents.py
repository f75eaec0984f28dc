"""The JSON beside others' tensors: what it may say, and how long it takes to say no."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import memstore
from memstore.formats.files import parse_object, parse_texts, parse_value

REFUSALS = (memstore.CorruptionError, memstore.UnsupportedValueError)
SURROGATE = "\ud800"
NOTHING = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def write_safetensors(path: Path, header: Any) -> Path:
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
HOSTILE: dict[str, Callable[[Path], Path]] = {
    "shard of no text": lambda folder: write_index(folder, {"a": SURROGATE}),
    "tensor of no text": lambda folder: write_index(folder, {SURROGATE: "a"}),
    "name of no text": lambda folder: write_safetensors(folder / "x.safetensors", {SURROGATE: NOTHING}),
    "metadata of no text": lambda folder: write_safetensors(
        folder / "x.safetensors", {"__metadata__": {"a": SURROGATE}, "a": NOTHING}
    ),
    "key of no text": lambda folder: write_memmap(folder, **{SURROGATE: ENTRY}),
    "dimension of no text": lambda folder: write_memmap(folder, _names=[SURROGATE]),
    "long shard": lambda folder: write_index(folder, {"a": LONG}),
    "long path": lambda folder: write_index(folder, {"a": "../" * 50_000}),
    "long name": lambda folder: write_safetensors(folder / "x.safetensors", {LONG: {}}),
    "long overlapping name": lambda folder: write_safetensors(
        folder / "x.safetensors", {LONG: {**NOTHING, "data_offsets": [3, 3]}}
    ),
    "long dtype": lambda folder: write_safetensors(folder / "x.safetensors", {"a": {**NOTHING, "dtype": LONG}}),
    "long key": lambda folder: write_memmap(folder, **{LONG: ENTRY}),
    "long nested key": lambda folder: write_memmap(folder, **{LONG: {"type": "x"}}),
    "long device": lambda folder: write_memmap(folder, device=LONG),
    "long class": lambda folder: write_memmap(folder, _type=LONG, _class=LONG),
    "missing folder": lambda folder: write_memmap(folder, b={"type": "TensorDict"}),
    "deep stack": lambda folder: write_stack(folder, json.loads("[" * 500 + "1" + "]" * 500)),
    "stack of many": lambda folder: write_stack(folder, [[1]] * ((1 << 17) + 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_refusal_is_typed_and_short(store: memstore.Store, folder: Path, name: str) -> None:
    path = HOSTILE[name](folder)
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
    path = write_safetensors(folder / "x.safetensors", text)

    def refuse() -> None:
        with pytest.raises(memstore.CorruptionError):
            store.attach("key", path)

    assert seconds(refuse) < 2 * seconds(lambda: json.loads(text))
