"""What a get and a put take of memory beside the store's own."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import memstore
from tests.children import in_child

pytestmark = pytest.mark.embedded


def peak_and_present(path: str = "/proc/self/status") -> tuple[int, int]:
    """VmHWM, and memory that is not files: what was allocated, and copied pages."""
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon"))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
def test_a_get_takes_at_most_1_5_kib_a_leaf(store: memstore.Store, kind: str) -> None:
    leaves = {f"layer.{number}": torch.randn(64, 64) for number in range(300)}
    store.put("key", leaves if kind == "dict" else TensorDict(leaves, []))
    taken = in_child(_memory_of_gets, store.root, 30)
    assert taken <= 1.5 * 1024 * 300, f"{taken / 300:.0f} bytes a leaf"


def _memory_of_gets(root: str, count: int) -> float:
    with memstore.open(root, "r") as store:
        warm = [store.get("key") for _ in range(3)]
        gc.collect()
        before = peak_and_present()[1]
        held = [store.get("key") for _ in range(count)]
        taken = peak_and_present()[1] - before
        assert len(warm) + len(held) == count + 3
        return taken / count


@pytest.mark.parametrize("size", [100 << 20, 3 << 19], ids=["large", "small"])
def test_a_put_makes_no_copy_of_the_value_in_memory(store: memstore.Store, size: int) -> None:
    """On tmpfs the segment is no part of RssAnon; a second copy would be."""
    assert in_child(_anonymous_memory_of_a_put, store.root, size) < 8 << 20


def _anonymous_memory_of_a_put(root: str, size: int) -> int:
    import threading

    value = {"a": torch.ones(size // 2, dtype=torch.uint8), "b": torch.ones(size // 8, dtype=torch.float32)}
    highest = before = peak_and_present()[1]
    with memstore.open(root, "r+") as store:
        store.put("warm", torch.ones(10_000))
        before = peak_and_present()[1]
        done = threading.Event()

        def watch() -> None:
            nonlocal highest
            while not done.is_set():
                highest = max(highest, peak_and_present()[1])

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(3):
            store.put("key", value)
        done.set()
        watcher.join()
    return highest - before


def test_what_nobody_holds_takes_nothing(store: memstore.Store) -> None:
    assert in_child(_memory_of_a_loop, store.root) < 4 << 20


def _memory_of_a_loop(root: str) -> int:
    value = {f"{number}": torch.randn(30, 30) for number in range(50)}
    with memstore.open(root, "r+") as store:
        for turn in range(400):
            if turn == 100:
                gc.collect()
                before = peak_and_present()[1]
            store.put("key", value)
            store.get("key")
            store.put("small", turn)
            store.get("small")
        gc.collect()
        return peak_and_present()[1] - before
