"""A process that waits for a version: how soon after the put is it awake?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tests.benchmarks.measure import spread
from tests.benchmarks.peers.wakers import FutexWaker, QueueWaker, RayWaker, StoreWaker, Waker, Woken
from tests.benchmarks.report import Beside, Figure, Goal, Series, Workload
from tests.benchmarks.session import Session

WAKERS = (StoreWaker, FutexWaker, QueueWaker, RayWaker)
A_ROUND = 8


def measure(session: Session) -> Workload:
    with session.started(WAKERS) as (started, absent):
        wakers = [waker for waker in started if isinstance(waker, Waker)]
        rounds = _take_turns(wakers, session.rounds * 2)
    series = [
        _series("wake", "wake, from the commit", wakers, rounds, _from_commit),
        _series("from-start", "wake, from the start of the call", wakers, rounds, _from_start),
        _series("from-return", "wake, from the return of the call", wakers, rounds, _from_return),
    ]
    committed = series[0]
    store, futex = committed.figure(StoreWaker.name), committed.figure(FutexWaker.name)
    assert store.ratio is not None
    peer = committed.best("peer")
    return Workload(
        id="wake",
        title="wait() in another process",
        text="A put of a 1 KiB tensor while another process sleeps in `wait`, up to the line after `wait`. The goal "
        "counts from the put's commit; the second table has the whole put in it. In the third a negative time says "
        "that the other process was awake before the call had returned. Others have no commit: theirs is the start.",
        series=series,
        goals=[
            Goal(
                "wake, from the commit, against a bare futex",
                store.ratio,
                "<=",
                3,
                "x",
                limit=Beside(futex.name, futex.value.median),
                peer=peer and Beside(peer.name, peer.value.median),
            )
        ],
        absent=absent,
    )


def _take_turns(wakers: Sequence[Waker], rounds: int) -> list[list[list[Woken]]]:
    """For each waker its rounds, each of several wakes."""
    for waker in wakers:
        for _ in range(A_ROUND):
            waker.wake()
    taken: list[list[list[Woken]]] = [[] for _ in wakers]
    for turn in range(rounds):
        for place in range(len(wakers)):
            i = (turn + place) % len(wakers)
            taken[i].append([wakers[i].wake() for _ in range(A_ROUND)])
    return taken


def _from_commit(woken: Woken) -> float:
    return (woken.awake - woken.committed) * 1e-9


def _from_start(woken: Woken) -> float:
    return (woken.awake - woken.start) * 1e-9


def _from_return(woken: Woken) -> float:
    return (woken.awake - woken.returned) * 1e-9


def _series(
    id: str, title: str, wakers: Sequence[Waker], rounds: list[list[list[Woken]]], seconds: Callable[[Woken], float]
) -> Series:
    medians = [[median(map(seconds, burst)) for burst in taken] for taken in rounds]
    base = next(m for w, m in zip(wakers, medians, strict=True) if isinstance(w, FutexWaker))
    figures = [
        Figure(
            name=waker.name,
            role=waker.role,
            value=spread([seconds(woken) for burst in taken for woken in burst]),
            calls=sum(map(len, taken)),
            ratio=spread([m / b for m, b in zip(own, base, strict=True)]) if id != "from-return" else None,
            note=waker.settings,
        )
        for waker, taken, own in zip(wakers, rounds, medians, strict=True)
    ]
    return Series(
        id=id, title=title, unit="s", figures=figures, reference="" if id == "from-return" else FutexWaker.name
    )
