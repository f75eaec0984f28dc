"""What a put costs whose value is to lie on two hosts, beside one transfer of the same bytes."""

from __future__ import annotations

import time

import torch

import memstore
from tests.benchmarks.measure import spread
from tests.benchmarks.on_hosts import OWNER, READER, not_here, two_hosts
from tests.benchmarks.report import Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.distributed.hosts.clusters import ROOT

TITLE = "A put whose value lies on two hosts when it returns"
SIZES = {"1 KiB": 1 << 10, "2 MiB": 2 << 20, "64 MiB": 64 << 20}
QUICK_SIZES = {"1 KiB": 1 << 10, "2 MiB": 2 << 20}
ROUNDS, QUICK_ROUNDS = 15, 3
ALONE, REPLICATED, FETCHED = "on one host", "on two hosts", "fetched by the second host"


def measure(session: Session) -> Workload:
    nowhere = not_here("replicated", TITLE)
    if nowhere is not None:
        return nowhere
    hosts = two_hosts(session)
    owner, reader = hosts.process_on(OWNER), hosts.process_on(READER)
    owner.run(state_policies)
    series: list[Series] = []
    goals: list[Goal] = []
    for name, nbytes in (QUICK_SIZES if session.quick else SIZES).items():
        taken: dict[str, list[float]] = {ALONE: [], REPLICATED: [], FETCHED: []}
        for number in range(QUICK_ROUNDS if session.quick else ROUNDS):
            taken[ALONE].append(owner.run(put, "alone", nbytes, number))
            taken[FETCHED].append(reader.run(fetch, "alone", nbytes, number))
            taken[REPLICATED].append(owner.run(put, "replicated", nbytes, number))
        one, two, way = (spread(taken[label][1:]) for label in (ALONE, REPLICATED, FETCHED))
        figures = [
            Figure(ALONE, "limit", one, len(taken[ALONE]) - 1),
            Figure(FETCHED, "limit", way, len(taken[FETCHED]) - 1),
            Figure(REPLICATED, "memstore", two, len(taken[REPLICATED]) - 1),
        ]
        series.append(Series(name.replace(" ", "-").lower(), f"put of {name}", "s", figures))
        if nbytes >= 1 << 20:
            share = exactly(two.median / way.median)
            goals.append(Goal(f"put of {name} on two hosts, against one transfer of it", share, "<=", 1.5, "x"))
    for process in (owner, reader):
        process.close()
    return Workload(
        id="replicated",
        title=TITLE,
        text="Host 0 puts values over the last ones: in a group without a policy, and in one with `replicas=2`, whose "
        "puts return when host 1 has the value, too. In between a process of host 1 gets each value of the first "
        "group: one transfer of the same bytes. A put fills a file, and a transfer another one.",
        series=series,
        goals=goals,
    )


# --- on the hosts -----------------------------------------------------------------------------------------------------


def state_policies() -> None:
    with memstore.open(ROOT, "r+") as store:
        store.set_policy("replicated", replicas=2)


_stores: dict[str, memstore.Store] = {}
_values: dict[int, torch.Tensor] = {}


def _store() -> memstore.Store:
    if not _stores:
        _stores[ROOT] = memstore.open(ROOT, "r+")
    return _stores[ROOT]


def put(group: str, nbytes: int, number: int) -> float:
    """Returns the seconds that a put takes."""
    value = _values.setdefault(nbytes, torch.randn(nbytes // 4))
    value[0] = number
    store = _store()
    began = time.perf_counter()
    store.put(f"{group}/{nbytes}", value)
    return time.perf_counter() - began


def fetch(group: str, nbytes: int, number: int) -> float:
    """Returns the seconds that a get takes of a value that is new. Raises ValueError: it is another one."""
    store = _store()
    began = time.perf_counter()
    found = store.get(f"{group}/{nbytes}")
    took = time.perf_counter() - began
    if found[0] != number:
        raise ValueError(f"value {found[0]} was got, and not {number}")
    return took
