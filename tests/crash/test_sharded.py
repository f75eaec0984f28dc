"""Ranks are killed before and after each of their steps: what they put becomes one version of all ranks, or none."""

from __future__ import annotations

import pytest

import memstore
from tests.crash import shards
from tests.crash.leftovers import headers_not_live, headers_unlike_rows, left_after_gc
from tests.crash.shards import KEY, NEW, OLD, SCENES, Scene, put, put_all, stamp_at
from tests.crash.test_kill_at_steps import FIRST, KILLED
from tests.crash.values import INLINE, SMALL, stamped
from tests.inside import root_of
from tests.support.fork_server import ForkServer


@pytest.mark.parametrize(
    ("name", "durability", "stride"),
    [
        *(pytest.param(name, "process", 25, id=name) for name in SCENES),
        pytest.param("last-over-sharded", "disk", 25, id="last-over-sharded-disk"),
        *(pytest.param(name, "process", 1, id=f"{name}-whole", marks=pytest.mark.full) for name in SCENES),
        *(pytest.param(name, "disk", 1, id=f"{name}-disk-whole", marks=pytest.mark.full) for name in SCENES),
    ],
)
def test_kill_at_each_step(
    name: str, durability: str, stride: int, request: pytest.FixtureRequest, server: ForkServer
) -> None:
    """Kills before a step and after it in turn; with a stride of 1 both."""
    store: memstore.Store = request.getfixturevalue("store" if durability == "process" else "disk_store")
    scene = SCENES[name]
    put_all(store, OLD, "the first one of the store")
    scene.reset(store, name)
    with server.start(shards.steps_of, store.root, name, name) as worker:
        names = worker.recv()
        worker.join()
    check_and_go_on(store, scene, name, 0, f"{name}, to its end")

    outcomes: list[str] = []
    for half in [*range(stride // 2, 2 * len(names) - 1, stride), 2 * len(names) - 1]:
        number, after = half // 2 + 1, half % 2 == 1
        what = f"{name}, killed {'after' if after else 'before'} step {number} of {names}: {names[number - 1]}"
        attempt = f"{name} {half}"
        before = scene.reset(store, attempt)
        with server.start(shards.die_at, store.root, name, attempt, number, after) as worker:
            assert worker.wait() == KILLED, what
        FIRST[half // stride % len(FIRST)](store, server)
        assert stamp_at(store) in (NEW, OLD if scene.over != "none" else None), what
        store.put("other", stamped(6, INLINE))  # who gets the mutex next recovers
        assert headers_unlike_rows(store) == [], what
        outcomes.append(check_and_go_on(store, scene, attempt, before, what))
    # Once it has ended, it stays so.
    assert outcomes == sorted(outcomes, reverse=True), outcomes
    assert outcomes[-1] == ("ended" if scene.ends else "published")


def check_and_go_on(store: memstore.Store, scene: Scene, attempt: str, before: int, what: str) -> str:
    """The ranks put their parts again, and all get one answer; the next attempt works, and nothing is left over."""
    found = [answer(store, rank, attempt) for rank in (0, 1)]
    found[0] = answer(store, 0, attempt)
    assert found[0] == found[1], f"{what}: the ranks were told {found}"
    version = found[0]
    if isinstance(version, int):
        assert (stamp_at(store), store.version(KEY)) == (NEW, version), what
        assert version > before, what
    else:
        assert stamp_at(store) == (OLD if scene.over != "none" else None), what
    assert put_all(store, NEW + 1, f"{attempt}, next") == store.version(KEY), what
    assert stamp_at(store) == NEW + 1 and store.pending() == (), what
    store.put("other", stamped(5, SMALL))
    assert left_after_gc(store) == [], what
    assert headers_not_live(store) == [], what
    assert root_of(store).mutex.owner() == 0, what
    return "published" if isinstance(version, int) else "ended"


def answer(store: memstore.Store, rank: int, attempt: str) -> int | str | None:
    """What a rank is told that is started again, and puts its part: a version, an error, or that others are missing."""
    try:
        pending = put(store, rank, NEW, attempt)
        return pending.wait(10.0) if pending.done() else None
    except (memstore.PartialCommitError, memstore.ShardMismatchError, memstore.StoreTimeoutError) as error:
        return str(error)
