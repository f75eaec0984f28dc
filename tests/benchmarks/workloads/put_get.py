"""Put, overwrite and get of one value by memstore, its peers and the limits: what several workloads share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from tests.benchmarks.machine import SMALL, back_memory
from tests.benchmarks.measure import Contestant, compare
from tests.benchmarks.peers import Peer, Value, same
from tests.benchmarks.peers.limits import Memcpy
from tests.benchmarks.report import Beside, Goal, Series, Spread
from tests.benchmarks.session import Session

KEPT = "kept"  # the key that gets read
LARGE_ROUNDS = 20
MIB = 1 << 20


def nbytes(value: Value) -> int:
    return sum(tensor.nbytes for tensor in ([value] if not isinstance(value, dict) else value.values()))


def compare_puts(
    session: Session, peers: Sequence[Peer], value: Value, *, fresh: bool, title: str, rounds: int = 0
) -> Series:
    """Each put until it is published: under new keys (fresh), or again and again under one."""
    contestants = [put_contestant(session, peer, value, fresh=fresh) for peer in peers if fresh or peer.overwrites]
    id = "put" if fresh else "overwrite"
    return compare(id, title, contestants, rounds=rounds or session.rounds, reference="memstore")


def large_puts(session: Session, peers: Sequence[Peer], what: str, *, fresh: bool) -> tuple[torch.Tensor, str, Series]:
    """Puts of one tensor of 256 MiB, checked before and after: the tensor, its size as text, and the times."""
    value = torch.randn((64 if session.quick else 256) * MIB // 4)
    size = f"{value.nbytes // MIB} MiB"
    stored = [peer for peer in peers if not isinstance(peer, Memcpy)]
    check(stored, value)
    rounds = min(session.rounds, LARGE_ROUNDS)
    series = compare_puts(session, peers, value, fresh=fresh, title=f"{what} of {size}", rounds=rounds)
    check(stored, value)
    return value, size, series


def put_contestant(session: Session, peer: Peer, value: Value, *, fresh: bool) -> Contestant:
    """Fresh puts take new space: a new key and, where values have files, nothing left to use again."""
    ready: list[Any] = [None]
    numbers = count()
    name = [KEPT]
    size = nbytes(value)

    def before() -> None:
        if fresh and peer.overwrites:
            if size >= SMALL:
                peer.drop(name[0])
            name[0] = f"fresh-{next(numbers)}"
        back_memory(size)
        ready[0] = peer.ready(value)
        read(value)

    return Contestant(
        name=peer.name,
        role=peer.role,
        call=lambda: peer.put(name[0], ready[0]),
        before=before,
        most=session.fresh_calls(size) if fresh else 100_000,
        note=peer.settings,
    )


def read(value: Value) -> None:
    """Reads all of a value: it is put as if it had just been computed."""
    for tensor in [value] if isinstance(value, torch.Tensor) else value.values():
        tensor.sum()


def keep(peer: Peer, key: str, value: Value) -> None:
    """A put that is not timed, for gets to read."""
    back_memory(nbytes(value))
    peer.put(key, peer.ready(value))


def compare_gets(session: Session, peers: Sequence[Peer], value: Value, *, title: str) -> Series:
    """Each get until it returns; what it returned is dropped outside the time."""
    for peer in peers:
        keep(peer, KEPT, value)
    contestants = [
        Contestant(
            name=peer.name,
            role=peer.role,
            call=lambda peer=peer: peer.get(KEPT),
            before=lambda peer=peer: peer.before_get(KEPT),
            note=peer.settings,
        )
        for peer in peers
    ]
    return compare("get", title, contestants, rounds=session.rounds, reference="memstore")


def check(peers: Sequence[Peer], value: Value) -> None:
    """What each peer has equals what was put, or the run ends here: a fast wrong answer is no figure."""
    for peer in peers:
        keep(peer, KEPT, value)
        peer.before_get(KEPT)
        if not same(peer.get(KEPT), value):
            raise SystemExit(f"{peer.name}: what was got differs from what was put")


def within(what: str, series: Series, seconds: float, *, name: str = "memstore") -> Goal:
    """The goal that memstore takes at most so long, beside the machine's limit and the best peer."""
    limit, peer = series.best("limit"), series.best("peer")
    return Goal(
        what,
        series.figure(name).value,
        "<=",
        seconds,
        "s",
        limit=limit and Beside(limit.name, limit.value.median),
        peer=peer and Beside(peer.name, peer.value.median),
    )


def at_most(what: str, series: Series, factor: float, other: str, *, name: str = "memstore") -> Goal:
    """The goal that memstore takes at most `factor` times as long as another contestant: a limit, as a rule."""
    against, ours = series.figure(other), series.figure(name)
    ratio = against.ratio
    assert ratio is not None
    scale = 1.0 if name == series.reference else ours.value.median / series.figure(series.reference).value.median
    found = Spread(scale / ratio.median, scale / ratio.p90, scale / ratio.p10)
    beside = Beside(other, against.value.median)
    is_limit = against.role == "limit"
    return Goal(
        f"{what}, against {other}", found, "<=", factor, "x",
        limit=beside if is_limit else None, peer=None if is_limit else beside,
    )  # fmt: skip


def times_faster(what: str, series: Series, factor: float, names: Sequence[str] = ()) -> list[Goal]:
    """The goal that the best of the named peers (or of all) takes at least `factor` times as long."""
    peers = [f for f in series.figures if f.role == "peer" and (not names or f.name in names)]
    best = min(peers, key=lambda figure: figure.value.median, default=None)
    if best is None or best.ratio is None:
        return []
    return [
        Goal(f"{what}, against {best.name}", best.ratio, ">=", factor, "x", peer=Beside(best.name, best.value.median))
    ]
