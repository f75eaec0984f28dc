"""Flipped bits of data.mdb while nobody has the store open: it is refused or served right, and repaired afterwards."""

from __future__ import annotations

import random

import pytest

import memstore
from tests.children import in_child
from tests.damage.stores import CATALOG, INLINE, check_repaired, copy, flip, make, read_all, values
from tests.damage.test_catalog import PAGE, used_pages

METAS = 2  # LMDB's first pages, of which it takes the newer one


@pytest.mark.parametrize("count", [2, pytest.param(600, marks=[pytest.mark.full, pytest.mark.timeout(3000)])])
def test_flipped_bits(scratch: str, count: int) -> None:
    """Whoever opens it then may be ended by LMDB; he takes nothing from what a repair finds."""
    make(f"{scratch}0")
    numbers = random.Random(17)
    pages = [page for page in used_pages(f"{scratch}0") if page >= METAS]
    for number in range(count):
        # Every other one in the page's own words, where a page number or a size may be.
        bit = numbers.choice(pages) * PAGE * 8 + numbers.randrange(PAGE * 8 if number % 2 else 80 * 8)
        copy(f"{scratch}0", scratch)
        flip(f"{scratch}/{CATALOG}", bit)
        try:
            was_ok = in_child(open_flipped, scratch)
        except RuntimeError as error:
            assert "exit code -" in str(error), f"bit {bit}: {error}"
            was_ok = False
        repaired = memstore.repair(scratch)
        lost = INLINE - set(repaired.recovered)
        assert set(values()) - INLINE <= set(repaired.recovered), (bit, repaired)
        assert not was_ok or not lost, (bit, repaired)
        check_repaired(scratch, lost=lost)


def open_flipped(root: str) -> bool:
    """Whether `verify` finds the store in order; its values are as they were then."""
    try:
        with memstore.open(root, verify=True, timeout=5.0) as store:
            report = store.verify()
            if report.ok:
                assert set(read_all(store, values()).values()) == {"same"}
            return report.ok
    except memstore.CorruptionError as error:
        assert error.path == f"{root}/{CATALOG}"
        return False
