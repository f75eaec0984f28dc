"""DTensors of all layouts, put by real ranks, come back whole, and in every other layout."""

from __future__ import annotations

import itertools

import pytest
import torch

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


def test_layouts_of_two_dimensions_are_cast_by_the_ranks_that_put_them(root: str, ranks4: Ranks) -> None:
    cases = [case for case in layouts.CASES if case.mesh == (2, 2)]
    assert any(layouts.Replicate() in case.placements for case in cases) and len(cases) > 4
    ranks4.run(layouts.put_matrix, root, [case.name for case in cases], torch.bfloat16)
    with memstore.open(root) as store:
        found = store.get("key")
        for case in cases:
            assert layouts.is_same(found[case.name], layouts.whole(case).to(torch.bfloat16)), case
        wanted = {case.name: case._replace(dtype=torch.bfloat16, placements=case.placements[::-1]) for case in cases
                  if "strided" not in case.name}  # fmt: skip
    ranks4.run(layouts.get_into_matrix, root, wanted)


def other_layouts(case: layouts.Case, world_size: int) -> list[layouts.Case]:
    """The layouts of a tensor for ranks that read it, on meshes of one and of two dimensions."""
    ways: list[layouts.Placement] = [layouts.Replicate(), *(layouts.Shard(dim) for dim in range(len(case.shape)))]
    found = [case._replace(mesh=(world_size,), placements=(way,)) for way in ways]
    found += [
        case._replace(mesh=(2, world_size // 2), placements=both)
        for both in itertools.product(ways, repeat=2)
        if len(set(map(repr, both))) > 1 or not case.shape
    ]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("turn", [0, 2, *(pytest.param(turn, marks=pytest.mark.full) for turn in (1, 3, 4, 5, 6, 7))])
def test_every_layout_is_read_into_others(root: str, ranks2: Ranks, ranks4: Ranks, world_size: int, turn: int) -> None:
    ranks4.run(layouts.put_matrix, root, list(CASES))
    choices = {name: other_layouts(case, world_size) for name, case in CASES.items()}
    wanted = {name: found[(turn + i) % len(found)] for i, (name, found) in enumerate(choices.items())}
    (ranks2 if world_size == 2 else ranks4).run(layouts.get_into_matrix, root, wanted)
