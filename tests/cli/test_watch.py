"""`memstore watch`: rates are those of the puts, and the footer stays in the window."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import torch

import memstore
from memstore.cli.keys import Rates, WatchSample, watch_lines
from memstore.listing import ListedEntry, open_keyspace, opened
from tests.children import Child, Wire, in_child
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call, run


class Looker:
    """Looks at a store's versions as `watch` does, at times that the test chooses."""

    def __init__(self, store: memstore.Store) -> None:
        self.store, self.keyspace = store, open_keyspace(store.root, "r")
        self.rates = Rates(opened(self.keyspace))
        self.at: list[float] = []
        self.look()

    def look(self) -> dict[str, float]:
        """How often each key was put since the first look."""
        self.at.append(time.monotonic())
        rates = self.rates.look(lambda: {key: self.store.version(key) for key in self.store})
        first = self.rates._looks[0][0]
        last = self.rates._looks[-1][0]
        return {key: rate * (last - first) for key, rate in rates.items()}


@pytest.fixture
def store(root: str) -> Iterator[memstore.Store]:
    with memstore.open(root) as opened_store:
        opened_store.put("slow", torch.ones(3))
        opened_store.put("idle", torch.ones(3))
        yield opened_store


def test_every_put_counts(store: memstore.Store) -> None:
    looker = Looker(store)
    for number in range(37):
        store.put("fast", torch.ones(1000) * number)
        if number % 12 == 0:
            store.put("slow", torch.ones(3))
    found = looker.look()
    assert found == {"fast": pytest.approx(37), "slow": pytest.approx(4)}
    looker.keyspace.close()


def test_what_was_put_before_the_first_look_does_not_count(store: memstore.Store) -> None:
    looker = Looker(store)
    assert looker.look() == {}
    store.delete("idle")
    assert looker.look() == {}
    looker.keyspace.close()


def test_keys_of_one_word_are_told_apart(store: memstore.Store) -> None:
    with open_keyspace(store.root, "r") as keyspace:
        bell = opened(keyspace).doorbell.bell
        other = next(key for i in range(100_000) if bell((key := f"key {i}").encode()) == bell(b"slow"))
    looker = Looker(store)
    for key in ("slow", other):
        store.put(key, torch.ones(3))
    assert looker.look() == {"slow": pytest.approx(1), other: pytest.approx(1)}
    for key, times in (("slow", 5), (other, 2), ("slow", 1)):
        for _ in range(times):
            store.put(key, torch.ones(3))
        looker.rates.sleep(0.03)
    assert looker.look() == {"slow": pytest.approx(7), other: pytest.approx(3)}
    looker.keyspace.close()


def _put_until_told(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        store.put("fast", torch.ones(250))
        wire.send()
        while not wire.has_message:
            store.put("fast", torch.ones(250))
            time.sleep(0.01)


def test_a_live_table_keeps_its_footer_in_a_short_window(store: memstore.Store) -> None:
    store.put_many({f"key {i:02}": torch.ones(3) for i in range(50)})
    with Child(_put_until_told, store.root) as child:
        child.receive()
        seen = in_terminal("watch", store.root, "--interval", "0.05", "--count", "6", size=(80, 10))
        child.send()
        child.receive()
    assert seen.code == 0 and seen.text.count("puts/s,") >= 6
    assert len(seen.screen) <= 10 and any(line.startswith("53 keys, the 7 busiest shown; ") for line in seen.screen)
    assert seen.screen[0].split() == ["key", "version", "size", "age", "puts/s", "bytes/s"]
    (fast,) = [line for line in seen.screen if line.startswith("fast ")]
    assert float(fast.split()[-3]) > 0 and fast.endswith((" B", " KiB", " MiB")), fast


def test_json_has_a_line_a_look(store: memstore.Store) -> None:
    found = [
        json.loads(line)
        for line in call("watch", store.root, "--count", "2", "--interval", "0.05", "--json").splitlines()
    ]
    assert len(found) == 2 and set(found[0]) == {"time", "puts", "nbytes", "entries", "rates"}
    assert found[1]["puts"] == 0 and [one["key"] for one in found[1]["entries"]] == ["idle", "slow"]


def test_in_a_pipe_each_look_is_written_when_it_is_made(store: memstore.Store) -> None:
    text = call("watch", store.root, "--count", "2", "--interval", "0.05")
    assert text.count("2 keys; 0.0 puts/s") == 2 and "\x1b" not in text


@pytest.mark.parametrize(("height", "width"), [(9, 80), (3, 80), (2, 80), (23, 40), (23, 30), (49, 160)])
def test_what_is_shown_fits(height: int, width: int) -> None:
    entries = [
        ListedEntry(f"run/{'long/' * 20}{i:02}", i, "inline", 10 * i, time.time(), 1, "Tensor") for i in range(30)
    ]
    rates = {one.key: float(one.version) for one in entries if one.version > 20}
    shown = watch_lines(WatchSample(time.time(), 5.0, 1e6, entries, rates), height, width)
    assert len(shown) <= height and all(len(line) <= width for line in shown), shown
    assert shown[-1].startswith("30 keys") and "5.0 puts/s" in shown[-1]
    assert height < 12 or any("29" in line and "29.0" in line for line in shown)  # the ends of keys, and their rates


def test_a_narrow_window_does_without_the_columns_that_matter_least() -> None:
    look = WatchSample(
        time.time(), 1.0, 10.0, [ListedEntry("run/policy", 7, "inline", 10, time.time(), 1, "Tensor")], {}
    )
    titles = {width: watch_lines(look, 5, width)[0].split() for width in (80, 45, 30, 22)}
    assert titles[80] == ["key", "version", "size", "age", "puts/s", "bytes/s"]
    assert titles[45] == ["key", "version", "size", "puts/s", "bytes/s"]
    assert titles[30] == ["key", "puts/s", "bytes/s"] and titles[22] == ["key", "puts/s"]
    assert [watch_lines(look, 5, width)[0].split() for width in (14, 13, 8)] == [["key", "puts/s"], ["key"], ["key"]]
    assert [watch_lines(look, 5, width)[-1] for width in (24, 19, 10)] == [*["1 key; 1.0 puts/s"] * 2, "1 key"]
    whole = WatchSample(time.time(), 1.0, 10.0, look.entries, {"run/policy": 12345.6})
    assert all(watch_lines(whole, 5, width)[1].endswith("  12345.6") for width in (15, 18, 22))


def test_a_store_without_keys_is_told_as_such(root: str) -> None:
    memstore.open(root).close()
    code, output, errors = in_child(run, ("watch", root, "d/*", "--count", "1"))
    assert code == 0 and "no keys; 0.0 puts/s" in output and "not a pattern: 'd/' means all" in errors
