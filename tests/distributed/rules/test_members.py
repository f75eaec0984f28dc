"""Homes: every member finds the same ones, few move, and whoever begins knows whom to wait for."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from memstore.distributed.rules import Member, Standing, View, group_of
from memstore.distributed.rules.members import givers_to, takers_from
from tests.examples import examples

KEYS = [f"group{number}/a".encode() for number in range(100)]


def view(homes: list[int], before: list[int], visitors: tuple[int, ...] = ()) -> View:
    members = [Member(name(one), f"h{one}") for one in homes]
    members += [Member(name(one), f"h{one}", is_home=False) for one in visitors]
    return View(b"C" * 16, 2, tuple(members), tuple(map(name, before)))


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


numbers = st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True)


def test_the_group_is_what_stands_before_the_first_slash() -> None:
    assert group_of(b"policy/actor/w") == group_of(b"policy/critic") == b"policy"
    assert group_of(b"policy") == b"policy"
    assert group_of(b"/x") == b""


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(numbers, st.integers(21, 30))
def test_a_new_home_takes_from_all_and_nothing_else_moves(old: list[int], new: int) -> None:
    before, after = view(old, old), view([*old, new], old)
    moved = [key for key in KEYS if after.home_of(key) != before.home_of(key)]
    assert all(after.home_of(key) == name(new) for key in moved)
    assert len(moved) < 2.5 * len(KEYS) / (len(old) + 1) + 20
    assert set(givers_to(after, name(new))) == set(map(name, old))
    assert all(givers_to(after, name(one)) == () for one in old)


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(numbers, numbers, st.lists(st.integers(0, 20), max_size=3, unique=True))
def test_whoever_may_have_a_key_is_waited_for(homes: list[int], before: list[int], visitors: list[int]) -> None:
    now = view(homes, before, tuple(one for one in visitors if one not in homes))
    for key in KEYS[:50]:
        home, old = now.home_of(key), now.home_before(key)
        if old != home and old in now.ids:
            assert old in givers_to(now, home)
            assert home in takers_from(now, old)
            waiting = Standing(home, now, givers_to(now, home))
            assert not waiting.is_ready_for(key)
        else:
            assert Standing(home, now, givers_to(now, home)).is_ready_for(key)


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(numbers, numbers)
def test_takers_are_those_that_have_the_giver_missing(homes: list[int], before: list[int]) -> None:
    now = view(homes, before)
    for member in now.ids:
        assert set(takers_from(now, member)) == {one for one in now.ids if member in givers_to(now, one)}


def test_homes_are_the_same_in_every_version() -> None:
    """These stand in the catalogs of clusters: a change of the hash would lose their keys."""
    homes = view([1, 2, 3], [1, 2, 3])
    assert [int.from_bytes(homes.home_of(key), "big") for key in (b"a", b"b", b"c", b"policy/w", "über".encode())] == [
        3,
        3,
        2,
        3,
        1,
    ]
