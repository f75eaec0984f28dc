"""`memstore watch`: a live table of keys, versions and rates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.live import Live
from rich.table import Table

from memstore.cli import render
from memstore.listing import Keyspace, Listed, entries, opened

_SMOOTHING = 0.3  # weight of the newest look in a rate
_ROWS = 40


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the store. `puts` are those of all keys, a second; `changes` of one key, as far as looks tell."""

    time: float
    puts: float
    entries: list[Listed]
    changes: dict[str, float]


def looks(store: Keyspace, prefix: str, interval: float) -> Iterator[Look]:
    seen: dict[str, int] = {}
    rates: dict[str, float] = {}
    before, published, puts = 0.0, 0, 0.0
    while True:
        found, now, count = list(entries(store, prefix)), time.monotonic(), _publications(store)
        if before:
            spent = now - before
            puts += _SMOOTHING * ((count - published) / spent - puts)
            for one in found:
                rate = (seen.get(one.key) != one.version) / spent
                rates[one.key] = rates.get(one.key, 0.0) + _SMOOTHING * (rate - rates.get(one.key, 0.0))
        before, published, seen = now, count, {one.key: one.version for one in found}
        rates = {name: rate for name, rate in rates.items() if name in seen}
        yield Look(time.time(), puts, found, rates)
        time.sleep(max(interval - (time.monotonic() - now), 0.0))


def _publications(store: Keyspace) -> int:
    return opened(store).catalog.view(lambda transaction: transaction.counters().publications)


def follow(store: Keyspace, prefix: str, interval: float, count: int, *, as_json: bool) -> None:
    found = looks(store, prefix, interval)
    if as_json:
        for number, look in enumerate(found, 1):
            render.print_json(look)
            if number == count:
                return
    with Live(console=render.console, refresh_per_second=10, transient=False) as live:
        for number, look in enumerate(found, 1):
            live.update(_table(look), refresh=True)
            if number == count:
                return


def _table(look: Look) -> Table:
    newest = sorted(look.entries, key=lambda one: -one.version)[:_ROWS]
    rows = [
        (
            one.key,
            str(one.version),
            render.size(one.nbytes),
            render.age(one.created),
            f"{look.changes.get(one.key, 0):.1f}",
        )
        for one in newest
    ]
    made = render.table(
        ("key", "version", "size", "age", "changes/s"), rows, right=("version", "size", "age", "changes/s")
    )
    more = f", the newest {_ROWS} shown" if len(look.entries) > _ROWS else ""
    made.caption = f"{len(look.entries):,} keys{more}; {look.puts:.1f} publications a second in the store"
    made.caption_justify = "left"
    return made
