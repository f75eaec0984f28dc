"""`python -m tests.simulation`: measures what messages cost, runs the rules with many hosts, and writes docs/scale.md.

It takes an hour on one core with 4,000 hosts, so each figure is kept as it comes: `--into` names a file that another
run goes on with.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TypeVar

import msgspec

from tests.simulation.costs import Costs, measure, measure_ends, measure_rows
from tests.simulation.figures import GB, LEASE, broadcast, deaths, joins, rest
from tests.simulation.large import Network
from tests.simulation.page import DATA, DOCS, Found, publish, tables

SIZES = [50, 100, 250, 500, 1000, 2000, 4000]
NBYTES = 140 * GB
GROUPS = [10_000, 100_000, 1_000_000]
MOST_JOINS = 500
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of hosts")
    parser.add_argument("--deaths", type=int, default=1000, help="with at most so many hosts a tenth dies (1000)")
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS, help="sizes of directories that are measured")
    parser.add_argument("--into", type=Path, default=Path("build/scale.json"), help="keeps figures (build/scale.json)")
    parser.add_argument("--publish", action="store_true", help="write docs/scale.md, its plots and docs/scale.json")
    options = parser.parse_args()
    logging.getLogger("memstore").setLevel(logging.ERROR)  # of each host that is lost
    found = _read(options.into)
    network = found.network

    def keep(kept: list[Result], size: int, sizes: Callable[[Result], int], make: Callable[[], Result]) -> None:
        if any(sizes(one) == size for one in kept):
            return
        began = time.monotonic()
        kept.append(make())
        kept.sort(key=sizes)
        print(f"{time.monotonic() - began:6.1f} s  {kept[[sizes(one) for one in kept].index(size)]}", flush=True)
        options.into.parent.mkdir(parents=True, exist_ok=True)
        options.into.write_bytes(msgspec.json.encode(found))

    for size in options.sizes:
        hosts: Callable[[Costs], int] = lambda one: one.hosts  # noqa: E731
        keep(found.costs, size, hosts, lambda size=size: measure(size, found.ends))
        costs = next(one for one in found.costs if one.hosts == size)
        keep(found.rest, size, lambda one: one.hosts, lambda costs=costs: rest(costs, network))
        keep(
            found.leased,
            size,
            lambda one: one.hosts,
            lambda costs=costs: rest(costs, network, remove_after=LEASE),
        )
        come = min(MOST_JOINS, size // 2)
        keep(found.joins, size, lambda one: one.hosts, lambda costs=costs, come=come: joins(costs, network, come))
        if size <= options.deaths:
            keep(found.deaths, size, lambda one: one.hosts, lambda costs=costs: deaths(costs, network))
        keep(
            found.broadcasts,
            size,
            lambda one: one.hosts,
            lambda costs=costs: broadcast(costs, network, found.nbytes),
        )
    for groups in options.groups:
        keep(found.rows, groups, lambda one: one.groups, lambda groups=groups: measure_rows(groups))
    for name, table in tables(found).items():
        print(f"\n{name}\n\n{table}")
    if options.publish:
        from tests.benchmarks.plots import drawn

        publish(found, drawn)
        print(f"wrote {DOCS / DATA}")


def _read(path: Path) -> Found:
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Found)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return Found(str(date.today()), machine, Network(), measure_ends(), NBYTES, [], [], [], [], [], [], [])


if __name__ == "__main__":
    main()
