"""Files cut to each length, and zeroed pages in them: a get and `verify` name key and file, and nothing dies of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from memstore import contents
from memstore.engine.repair.verify import look_at
from tests.damage.stores import content_of, header_size, make, overwrite, paths, values
from tests.inside import root_of
from tests.support.equality import is_same

PAGE = 4096
STRIDE = 499
KEYS = ["segment/1", "nested", "objects"]  # no two have the same kinds of bytes


def errors_of(store: memstore.Store, key: str) -> tuple[memstore.CorruptionError, memstore.CorruptionError]:
    """Of a get, and of what `Store.verify` does for a key, without its child process: the catalog is whole."""
    with pytest.raises(memstore.CorruptionError) as got:
        store.get(key)
    with pytest.raises(memstore.CorruptionError) as seen:
        look_at(root_of(store), key.encode(), contents.verify, id, 5.0, may_lock=True)
    return got.value, seen.value


@pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("key", KEYS)
def test_every_length_of_a_file(scratch: str, key: str, stride: int) -> None:
    make(scratch)
    path = paths(scratch)[key]
    content = content_of(path)
    with memstore.open(scratch, verify=True, timeout=5.0) as store:
        edges = {0, 7, 8, header_size(path) - 1, header_size(path), len(content) - 1, len(content) + 1}
        for size in sorted({*range(0, len(content), stride), *edges}):
            overwrite(path, 0, content)
            os.truncate(path, size)
            for error in errors_of(store, key):
                assert (error.key, error.path) == (key, path) and error.detail, size
        overwrite(path, 0, content)
        os.truncate(path, len(content))
        assert is_same(values()[key], store.get(key)) and store.verify([key]).ok


# --- a file that was truncated is told as that, whatever reads it -----------------------------------------------------


def sharded(store: memstore.Store) -> None:
    for rank in range(2):
        part = {"x": memstore.TensorShard(ramp(4000), (8000,), (4000 * rank,))}
        store.put_sharded("key", part, attempt="1", rank=rank, world_size=2, wait=bool(rank))


ENTRIES: dict[str, Callable[[memstore.Store], object]] = {
    "leaves": lambda store: store.put("key", {"x": ramp(8000)}),
    "sharded": sharded,
    "dataset": lambda store: store.create_dataset("key", {"x": ((), torch.int64)}, capacity=8000, length=8000),
}
CUTS: dict[str, Callable[[int, int], int]] = {
    "empty": lambda header, size: 0,
    "inside the slots of the header": lambda header, size: 100,
    "inside the header": lambda header, size: header - 1000,
    "behind the header": lambda header, size: header,
    "inside the data": lambda header, size: header + 5001,
    "on a page": lambda header, size: size // PAGE // 2 * PAGE,
    "by a byte": lambda header, size: size - 1,
}


CALLS: dict[str, Callable[[memstore.Store, Any], object]] = {
    "get": lambda store, ref: store.get("key"),
    "get(out=)": lambda store, ref: store.get("key", out={"x": torch.zeros(8000, dtype=torch.int64)}),
    "get_many": lambda store, ref: store.get_many(["key"]),
    "view": lambda store, ref: store.view("key")["x"][3:5].sum(),
    "read_rows": lambda store, ref: memstore.read_rows(store.view("key"), [3, 4]),
    "Ref.get": lambda store, ref: ref.get(),
    "Ref.view": lambda store, ref: ref.view()["x"][3:5].sum(),
    "items": lambda store, ref: list(store.items()),
    "pop": lambda store, ref: store.pop("key"),
    "export": lambda store, ref: store.export("key", f"{store.root}.safetensors"),
    "open_dataset": lambda store, ref: store.open_dataset("key"),
    "open_dataset(r)": lambda store, ref: store.open_dataset("key", "r"),
}


def truncate(path: str, cut: str) -> str:
    """Returns what errors are to say."""
    whole = os.path.getsize(path)
    size = CUTS[cut](header_size(path), whole)
    os.truncate(path, size)
    return f"has {size:,} bytes instead of {whole:,}: it was truncated"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_truncated_file_is_told_as_that(scratch: str, entry: str, cut: str) -> None:
    with memstore.open(scratch) as store:
        ENTRIES[entry](store)
    gc.collect()  # a dataset is in use as long as it is mapped
    with memstore.open(scratch, timeout=5.0) as store:
        ref, path = None if entry == "dataset" else store.ref("key"), store.info("key").files[-1]
        expected = truncate(path, cut)
        for name, call in CALLS.items():
            if name.startswith("open_dataset") == (entry == "dataset"):
                with pytest.raises(memstore.CorruptionError) as caught:
                    call(store, ref)
                assert (caught.value.key, caught.value.path) == ("key", path), name
                assert expected in str(caught.value) and expected in str(caught.value.detail), name
        assert store.info("key").files[-1] == path


@pytest.mark.parametrize(
    "cut", ["inside the slots of the header", pytest.param("inside the data", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("entry", ["leaves", pytest.param("sharded", marks=pytest.mark.full)])
def test_verify_and_repair_say_that_a_file_was_truncated(
    scratch: str, entry: str, cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    with memstore.open(scratch, timeout=5.0) as store:
        ENTRIES[entry](store)
        path = store.info("key").files[-1]
        expected = truncate(path, cut)
        (error,) = store.verify().damaged
        assert (error.key, error.path) == ("key", path) and expected in str(error.detail)
    assert memstore.repair(scratch).lost == ("key",)
    assert path in caplog.text and expected in caplog.text


@pytest.mark.parametrize("size", [0, 5, 100, 4096, 40_000])
@pytest.mark.parametrize("form", ["safetensors", "torch", "npy", "memmap"])
def test_a_file_that_was_truncated_before_it_is_attached(root: str, tmp_path: Path, form: str, size: int) -> None:
    path = str(tmp_path / "file")
    with memstore.open(root) as store:
        if form == "npy":
            with open(path, "wb") as written:
                np.save(written, ramp(8000).numpy())
        else:
            store.put("key", {"x": ramp(8000)})
            store.export("key", path, format=form)  # type: ignore[arg-type]
        file = f"{path}/x.memmap" if form == "memmap" else path
        left = size - header_size(file) if form == "safetensors" else 0
        os.truncate(file, size)
        said = f"{left:,} follow its header: it is truncated" if left > 0 else f"{size:,} bytes|{size:,}$|bytes got"
        with pytest.raises(memstore.CorruptionError, match=said) as caught:
            store.attach("new", path, format=form)  # type: ignore[arg-type]
        assert caught.value.path == file and "new" not in store


def ramp(count: int) -> torch.Tensor:
    """No page of it is zeros."""
    return torch.arange(count, dtype=torch.int64) % 251 + 1


FILES: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: ramp(2000),
    "read": lambda: ramp((1 << 18) - 512 - 600),  # a little less than 2 MiB
    "mapped": lambda: ramp((1 << 18) + 600),
    "large": lambda: ramp(5 << 17),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name == "large")) for name in FILES])
def test_zeroed_pages(scratch: str, name: str) -> None:
    value = FILES[name]()
    with memstore.open(scratch, checksum=True, verify=True, timeout=5.0) as store:
        store.put("key", value)
        (path,) = store.info("key").files
        content, end = content_of(path), header_size(path) + value.nbytes
        for page in pages_of(end, every=name != "mapped"):
            start = page * PAGE
            overwrite(path, start, bytes(min(PAGE, len(content) - start)))
            for error in errors_of(store, "key"):
                assert (error.key, error.path) == ("key", path) and error.detail, page
            overwrite(path, start, content[start : start + PAGE])
        assert is_same(value, store.get("key")) and store.verify().ok


def pages_of(size: int, *, every: bool) -> Iterable[int]:
    """Those with bytes that mean something; else the first, some in the middle, and the last ones."""
    pages = range(-(-size // PAGE))
    return pages if every else sorted({*pages[:2], *pages[::37], *pages[-2:]})
