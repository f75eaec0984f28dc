"""One Store, eight threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import memstore
from tests.store.backends import open_store

HANGS = 200.0  # seconds: two busy loops beside it make of 3 s some 12, and a busy machine more than a minute


def run(*functions: Callable[[], None]) -> None:
    """All at once, each in a thread; the first exception of any is raised."""
    start = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        start.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def value(number: int) -> dict[str, torch.Tensor]:
    """Inline, in a small file or in a large one, by turns; each tensor says the number."""
    size = (10, 3000, 3000, 300_000)[number % 4]
    return {"a": torch.full((size,), number), "b": torch.tensor(number)}


def check(got: dict[str, torch.Tensor]) -> int:
    numbers = {int(got["b"]), int(got["a"][0]), int(got["a"][-1]), int(got["a"].float().mean().round())}
    assert len(numbers) == 1, numbers
    return numbers.pop()


def test_threads_put_get_delete_list_and_collect_at_once(root: str) -> None:
    with open_store(root, timeout=HANGS) as store:
        put_get_delete_list_and_collect(store)


def put_get_delete_list_and_collect(store: memstore.Store) -> None:
    store.put("shared", value(0))

    def write(name: str) -> None:
        for number in range(30):
            store.put(name, value(number))
            store.put("shared", value(number))
            assert check(store.get(name)) == number
            if number % 10 == 9:
                assert store.delete(name)

    def read() -> None:
        for _ in range(80):
            check(store.get("shared"))
            for got in store.get_many(["shared"]).values():
                check(got)

    def look() -> None:
        for _ in range(40):
            names = list(store)
            assert "shared" in names and names == sorted(names)
            assert store.info("shared").version <= store.version("shared")
            store.stats()
            store.gc()

    run(*(lambda name=name: write(name) for name in "abcd"), read, read, look, look)
    assert store.stats().puts == 4 * 30 * 2 + 1


def test_threads_wait_for_each_other(store: memstore.Store) -> None:
    """Two threads play ball over two keys."""

    def play(mine: str, theirs: str, begins: bool) -> None:
        seen = 0
        for number in range(100):
            if begins or number:
                store.put(mine, number)
            seen = store.wait(theirs, newer_than=seen, timeout=30)
        store.put(mine, 100)

    run(lambda: play("a", "b", True), lambda: play("b", "a", False))
    assert (store.get("a"), store.get("b")) == (100, 100)


def test_a_store_closed_under_its_threads_says_so(root: str, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(root)
    store.put("key", value(1))
    started = threading.Barrier(5)

    def use() -> None:
        started.wait()
        try:
            while True:
                check(store.get("key"))
                store.put("key", value(3))
        except memstore.StoreClosedError:
            pass

    def close() -> None:
        started.wait()
        store.get("key")
        store.close()

    run(use, use, use, use, close)
    caplog.clear()  # a put that was cut off logs the error, which holds the store


def test_two_stores_of_one_folder_in_threads(root: str) -> None:
    def use(number: int) -> None:
        for turn in range(30):
            with open_store(root) as store:
                store.put(f"{number}", value(turn))
                assert check(store.get(f"{number}")) == turn

    run(*(lambda number=number: use(number) for number in range(6)))
