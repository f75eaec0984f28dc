"""DTensors of all layouts, put by real ranks, come back whole, and in every other layout."""

from __future__ import annotations

import memstore
from tests.ranks import layouts
from tests.ranks.launcher import Ranks

CASES = {case.name: case for case in layouts.CASES}


def test_every_layout_comes_back_whole(root: str, ranks4: Ranks) -> None:
    versions = ranks4.run(layouts.put_matrix, root, list(CASES))
    with memstore.open(root) as store:
        assert versions == [store.version("key")] * 4
        found = store.get("key")
        for case in layouts.CASES:
            assert layouts.is_same(found[case.name], layouts.whole(case)), case
