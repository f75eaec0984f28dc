"""Manifests with a right checksum and anything else in them: they are read, or refused with a typed error."""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.snapshot.manifest import MANIFEST
from tests.examples import examples

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


def signed(rest: str) -> bytes:
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
        kept.use(signed(json.dumps(document)[1:]))
    with pytest.raises(memstore.CorruptionError, match=f"^{kept.path}/{MANIFEST}: the value 'state'") as raised:
        kept.store.attach("hostile", kept.path)
    assert raised.value.key == "hostile" and raised.value.path == f"{kept.path}/{MANIFEST}"
    assert "hostile" not in kept.store


@given(st.data())
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_manifest_does_harm(kept: Kept, data: st.DataObject) -> None:
    rest = json.dumps(data.draw(broken(kept.document)))[1:]
    try:
        kept.use(signed(rest))
    except memstore.MemstoreError as error:
        assert kept.path in str(error) or "app_state" in str(error)
