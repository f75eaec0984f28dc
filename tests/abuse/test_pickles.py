"""Pickle bombs in every slot: nothing that is stored runs, unless the store was opened for it."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import pickletools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
import torch

import memstore
from memstore.engine.catalog.environment import STEP
from memstore.engine.format.records import decode_record, encode_record
from memstore.engine.index import find
from memstore.engine.root import folder
from tests.children import in_child
from tests.inside import root_of


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture
def crater(tmp_path: Path) -> str:
    """Where a bomb that went off leaves a folder."""
    return str(tmp_path / "crater")


def test_the_bomb_works(crater: str) -> None:
    pickle.loads(pickle.dumps(Bomb(crater)))
    assert os.path.isdir(crater)


def read_everything(root: str, options: dict[str, Any] | None = None) -> list[str]:
    """Touches all that a store can tell; the names of the errors."""
    errors: list[str] = []
    for mode in ("r", "r+"):
        with _noting(errors), memstore.open(root, mode, timeout=0.02, **options or {}) as store:
            for call in (
                lambda: store.get("key"),
                lambda: store.get("key", out={"x": torch.zeros(1000), "y": None}),
                lambda: store.get("key", like={"x": torch.zeros(1000), "y": None}),
                lambda: store.get("key", device="cpu"),
                lambda: store.get_many(["key"]),
                lambda: store.info("key"),
                lambda: repr(store.ref("key").get()),
                lambda: list(store.items()),
                lambda: list(memstore.iter_weights(store, "key")),
                lambda: store.gc(),
                lambda: store.put("key2", 1),
                lambda: store.put("key2", torch.zeros(1000)),
                lambda: store.delete("key"),
            ):
                with _noting(errors):
                    call()
    return errors


@contextlib.contextmanager
def _noting(errors: list[str]) -> Any:
    try:
        yield
    except memstore.MemstoreError as error:
        errors.append(type(error).__name__)


@pytest.mark.parametrize("large", [False, True])
def test_a_put_refuses_one(store: memstore.Store, crater: str, large: bool) -> None:
    with pytest.raises(memstore.UnsupportedValueError, match=r"value\['y'\].*Bomb.*allow_pickle"):
        store.put("key", {"x": torch.zeros(1000 if large else 1), "y": Bomb(crater)})
    assert list(store) == [] and not os.path.exists(crater)


@pytest.mark.parametrize("large", [False, True])
def test_one_that_was_put_on_purpose_goes_off_only_where_it_is_allowed(scratch: str, crater: str, large: bool) -> None:
    with memstore.open(scratch, allow_pickle=True) as store:
        store.put("key", {"x": torch.zeros(1000 if large else 1), "y": Bomb(crater)})
    assert not os.path.exists(crater)
    shutil.copytree(scratch, f"{scratch}2")
    errors = in_child(read_everything, scratch)
    assert not os.path.exists(crater)
    assert "UnsupportedValueError" in errors
    in_child(read_everything, f"{scratch}2", {"allow_pickle": True})
    assert os.path.isdir(crater)


def bombs(crater: str) -> dict[str, bytes]:
    pickled = pickle.dumps(Bomb(crater))
    saved = io.BytesIO()
    torch.save(Bomb(crater), saved)
    extension = msgspec.msgpack.encode([msgspec.msgpack.Ext(100, pickled)])
    return {
        "pickle": pickled,
        "old pickle": pickle.dumps(Bomb(crater), protocol=0),
        "torch.save": saved.getvalue(),
        "extension": extension,
        "extension in an extension": msgspec.msgpack.encode(
            [msgspec.msgpack.Ext(1, extension), msgspec.msgpack.Ext(2, extension), msgspec.msgpack.Ext(20, pickled)]
        ),
        "many": msgspec.msgpack.encode([msgspec.msgpack.Ext(code, pickled) for code in range(1, 127)]),
    }


KINDS = sorted(bombs(""))
ROUGH = ("pickle", "torch.save", "extension")  # where the place is looked at byte by byte anyhow


def make(root: str, large: bool = True) -> None:
    with memstore.open(root) as store:
        store.put("key", {"x": torch.zeros(1000 if large else 1), "y": "harmless"})


def rewrite_record(root: str, **changes: Any) -> None:
    """Changes the record of "key", with a checksum that fits."""
    env = lmdb.open(f"{root}/catalog/local", max_dbs=8, map_size=STEP)
    with env.begin(write=True) as transaction:
        table = env.open_db(b"entries", transaction)
        record = decode_record(b"key", transaction.get(b"key", db=table))
        transaction.put(b"key", encode_record(b"key", msgspec.structs.replace(record, **changes)), db=table)
    env.close()


def defused(root: str, crater: str, before: Callable[..., None] | None = None, *arguments: Any) -> list[str]:
    """Reads everything in a child process, which first calls `before`; the names of the errors."""
    errors = in_child(_spoil_and_read, root, before, arguments)
    assert not os.path.exists(crater)
    return errors


def _spoil_and_read(root: str, before: Callable[..., None] | None, arguments: tuple[Any, ...]) -> list[str]:
    if before is not None:
        before(root, *arguments)
    return read_everything(root)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("slot", ["objects", "description", "inline", "checksums"])
def test_in_a_record(scratch: str, crater: str, slot: str, large: bool) -> None:
    for number, bomb in enumerate(bombs(crater).values()):
        make(f"{scratch}-{number}", large)
        defused(f"{scratch}-{number}", crater, _rewrite, slot, bomb)


def _rewrite(root: str, slot: str, bomb: bytes) -> None:
    rewrite_record(root, **{slot: bomb})


def test_objects_that_hold_one_are_refused_by_name(scratch: str, crater: str) -> None:
    make(scratch)
    errors = defused(scratch, crater, _rewrite, "objects", bombs(crater)["extension"])
    assert set(errors) <= {"UnsupportedValueError", "CorruptionError", "ReadOnlyError", "KeyNotFoundError"}
    assert "UnsupportedValueError" in errors or "CorruptionError" in errors


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_segments_header(scratch: str, crater: str, kind: str) -> None:
    make(scratch)
    (path,) = Path(scratch, "segments").iterdir()
    stored = path.read_bytes()
    size = int.from_bytes(stored[:8], "little")
    header = msgspec.json.decode(stored[8 : 8 + size])
    text = base64.b64encode(bombs(crater)[kind]).decode()
    header["__metadata__"].update(description=text, objects=text, key=text, store=text)
    encoded = msgspec.json.encode(header)
    padded = -(-(len(encoded) + 8) // 4096) * 4096 - 8
    path.write_bytes(padded.to_bytes(8, "little") + encoded.ljust(padded) + stored[8 + size :])
    defused(scratch, crater)


@pytest.mark.parametrize("name", [folder.SETTINGS, folder.LOCK, folder.DOORBELL, f"{folder.CATALOG}/data.mdb",
                                  f"{folder.CATALOG}/lock.mdb", "segments/0000000000000001.safetensors"])  # fmt: skip
def test_as_a_whole_file(scratch: str, crater: str, name: str) -> None:
    make(scratch)
    size = os.path.getsize(f"{scratch}/{name}")
    for kind in ROUGH:
        for content in (bombs(crater)[kind], bombs(crater)[kind].ljust(size, b"\0")):
            Path(scratch, name).write_bytes(content)
            defused(scratch, crater)


@pytest.mark.parametrize("table", ["entries", "segments", "filling", "retired", "leases", "counters"])
def test_in_a_row_of_the_catalog(scratch: str, crater: str, table: str) -> None:
    for kind in ROUGH:
        root = f"{scratch}-{kind}"
        make(root)
        defused(root, crater, _write_rows, table, bombs(crater)[kind])


def _write_rows(root: str, table: str, bomb: bytes) -> None:
    env = lmdb.open(f"{root}/catalog/local", max_dbs=8, map_size=STEP)
    with env.begin(write=True) as transaction:
        for key in (b"key", b"counters", b"store", (1).to_bytes(8, "big"), bomb[:400]):
            transaction.put(key, bomb[:4000], db=env.open_db(table.encode(), transaction))
    env.close()


@pytest.mark.parametrize("name", ["posix:mkdir", "os:mkdir", "subprocess:Popen", "builtins:eval", "torch:load"])
def test_a_class_by_name_is_no_callable_to_call(scratch: str, crater: str, name: str) -> None:
    """Descriptions name tensorclasses as "module:qualname": another name put in their place is not called."""
    from tests.abuse.tensorclass import Point

    with memstore.open(scratch) as store:
        store.put("key", Point(x=torch.zeros(1000), y=torch.zeros(1000), batch_size=[]))
    description = in_child(_description, scratch)
    ours = f"{Point.__module__}:{Point.__qualname__}"
    assert ours.encode() in description
    for number, theirs in enumerate((name, f"{name}\n", crater)):
        root = f"{scratch}-{number}"
        shutil.copytree(scratch, root)
        changed = _replace_text(description, ours, theirs)
        errors = defused(root, crater, _rewrite, "description", changed)
        assert {"CorruptionError", "UnsupportedValueError"} & set(errors)


def _description(root: str) -> bytes:
    with memstore.open(root) as store:
        record = find(root_of(store), b"key")
        assert record is not None
        return record.description


def _replace_text(description: bytes, old: str, new: str) -> bytes:
    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        return new if value == old else value

    return msgspec.msgpack.encode(walk(msgspec.msgpack.decode(description)))


def test_what_memstore_pickles_names_only_what_is_its_own(store: memstore.Store) -> None:
    """Stores and refs travel as pickles; unpickling one runs memstore's own functions only."""
    store.put("key", torch.zeros(1000))
    for thing in (store, store.ref("key"), memstore.KeyNotFoundError("no", key="k")):
        names = [argument for _, argument, _ in pickletools.genops(pickle.dumps(thing)) if isinstance(argument, str)]
        modules = [name for name in names if name.split(".")[0] in ("os", "posix", "builtins", "subprocess")]
        assert modules == []
    with root_of(store).guard:
        leased: Callable[..., Any] = root_of(store).catalog.view
        segments = [segment for segment, _ in leased(lambda transaction: transaction.numbers("leases", 10))]
    store.delete("key")
    _end_leases(store, segments)


def _end_leases(store: memstore.Store, segments: list[int]) -> None:
    import time

    root = root_of(store)

    def end() -> None:
        with root.guard:
            for segment in segments:
                root.catalog.update(lambda transaction, segment=segment: transaction.put_number("leases", segment, 0))

    root.mutex.run(end, time.monotonic() + 10)
    store.gc()
