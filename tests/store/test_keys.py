"""keys: sorted by their bytes, by prefix, in pages."""

from __future__ import annotations

import pytest

import memstore

NAMES = ["a", "b", "ab", "a/b", "a/c", "ä", "z", "Z", "🐍", "a" * 500, "\U0010ffff", "\uffff", "\x01", "~"]


def test_they_are_sorted_by_their_utf8_bytes(store: memstore.Store) -> None:
    store.put_many(dict.fromkeys(NAMES, 1))
    expected = sorted(NAMES, key=str.encode)
    assert list(store.keys()) == list(store) == expected
    assert expected != sorted(NAMES, key=lambda name: name.encode("utf-16-be"))


@pytest.mark.parametrize(
    "prefix", ["", "a", "a/", "a/b", "a/bc", "ä", "🐍", "x", "a" * 500, "a" * 501, "\x01", "\uffff"]
)
def test_a_prefix_selects(store: memstore.Store, prefix: str) -> None:
    store.put_many(dict.fromkeys(NAMES, 1))
    assert list(store.keys(prefix)) == sorted((name for name in NAMES if name.startswith(prefix)), key=str.encode)


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 2500])
def test_pages_leave_nothing_out(store: memstore.Store, count: int) -> None:
    names = [f"run/{number:06}" for number in range(count)]
    store.put_many(dict.fromkeys(["r", "run", *names, "run0", "s"], 0))
    assert list(store.keys("run/")) == names
    assert len(store) == count + 4


def test_a_listing_goes_on_while_keys_come_and_go(store: memstore.Store) -> None:
    names = [f"{number:06}" for number in range(3000)]
    store.put_many(dict.fromkeys(names, 0))
    listing = store.keys()
    found = [next(listing) for _ in range(1024)]
    store.delete_many(names[1000:2000])  # also the last one that was returned
    store.put_many({"000500x": 1, "002500x": 1})
    found += listing
    assert found == names[:1024] + sorted([*names[2000:], "002500x"])


def test_two_listings_dont_disturb_each_other(store: memstore.Store) -> None:
    store.put_many(dict.fromkeys([f"{number:06}" for number in range(2100)], 0))
    assert all(one == other for one, other in zip(store.keys(), store.keys(), strict=True))


@pytest.mark.embedded
def test_an_unfinished_listing_holds_nothing(store: memstore.Store) -> None:
    store.put_many(dict.fromkeys([f"{number:06}" for number in range(2100)], 0))
    listings = [store.keys() for _ in range(200)]
    for listing in listings:
        next(listing)
    before = store.stats().catalog_bytes
    for _ in range(500):
        store.put("000000", b"x" * 1400)
    assert store.stats().catalog_bytes == before


@pytest.mark.parametrize("prefix", [None, b"a", 3])
def test_a_prefix_is_text(store: memstore.Store, prefix: object) -> None:
    with pytest.raises(memstore.InvalidKeyError, match="prefix"):
        store.keys(prefix)  # type: ignore[arg-type]
