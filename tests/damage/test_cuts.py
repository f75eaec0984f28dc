"""Files cut to each length, and zeroed pages in them: a get and `verify` name key and file, and nothing dies of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest
import torch

import memstore
from memstore import contents
from memstore.engine.repair.verify import look_at
from memstore.testing.equality import is_same
from tests.damage.stores import content_of, header_size, make, overwrite, paths, values
from tests.inside import root_of

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
