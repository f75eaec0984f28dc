"""Tables and plots of docs/scale.md, of what a run has found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tests.benchmarks.report import Figure, Role, Series, Unit
from tests.benchmarks.report import Spread as Of
from tests.benchmarks.table import amount
from tests.simulation.costs import Costs, Ends, Rows
from tests.simulation.figures import Change, Rest, Spread
from tests.simulation.large import Network

DOCS = Path(__file__).parents[2] / "docs"
PAGE, IMAGES, DATA = "scale.md", "images/scale", "scale.json"
MILLION = 10**6
_TABLE = "<!-- simulated: {} -->\n{}<!-- end -->\n"


class Found(msgspec.Struct):
    """What one run has found.

    Attributes:
        nbytes: of the value that is broadcast.
    """

    date: str
    machine: str
    network: Network
    ends: Ends
    nbytes: int
    costs: list[Costs]
    rest: list[Rest]
    leased: list[Rest]
    joins: list[Change]
    deaths: list[Change]
    broadcasts: list[Spread]
    rows: list[Rows]


def tables(found: Found) -> dict[str, str]:
    """Returns the tables of the page, by name."""
    last, leased = found.rows[-1], {one.hosts: one for one in found.leased}
    return {
        "costs": _costs(found),
        "rest": _table(
            ("hosts", "seed sends", "messages", "seed is busy", "with leases", "a member sends"),
            (
                (
                    _count(one.hosts),
                    f"{amount(one.nbytes, 'B')}/s",
                    f"{one.messages:.0f}/s",
                    _percent(one.busy),
                    _percent(leased[one.hosts].busy) if one.hosts in leased else "not run",
                    f"{one.member:.0f} B/s",
                )
                for one in found.rest
            ),
        ),
        "joins": _changes(found.joins, "come"),
        "deaths": _changes(found.deaths, "die"),
        "broadcast": _table(
            ("hosts", "owner answers for", "bytes take", "a star takes", "origin sends", "with a tenth dying"),
            (
                (
                    _count(one.hosts),
                    amount(one.asking, "s"),
                    amount(one.sending, "s"),
                    amount(one.star, "s"),
                    f"{one.origin:.2f} times",
                    f"{one.with_deaths:.2f} times",
                )
                for one in found.broadcasts
            ),
        ),
        "groups": _table(
            ("groups", "catalog", "one claim", "of 128 at once", "look at all", "send all to a deputy"),
            (
                (
                    _count(groups) + (", computed" if one.groups < groups else ""),
                    amount(one.nbytes * groups, "B"),
                    amount(one.claim + found.ends.change, "s"),
                    amount(one.claim_many, "s"),
                    amount(one.scan * groups, "s"),
                    amount((one.scan + one.mirror) * groups, "s"),
                )
                for one in found.rows
                for groups in ((one.groups, MILLION) if one.groups < MILLION and one is last else (one.groups,))
            ),
        ),
    }


def _costs(found: Found) -> str:
    rows = [
        ("a message that is read", amount(found.ends.read, "s")),
        ("a message that changes something", amount(found.ends.change, "s")),
        ("a byte of a message, to decode it", amount(found.costs[-1].decode, "s")),
    ]
    for one in found.costs:
        rows.append((f"a look at a roster of {_count(one.hosts)} hosts, in each transaction", amount(one.look, "s")))
        rows.append(("writing it, at a member", amount(one.write, "s")))
    rows += [
        ("latency, stated", amount(found.network.latency, "s")),
        ("network of a host, stated", f"{found.network.bandwidth / 1e9:.0f} GB/s"),
    ]
    return _table(("", "takes"), rows)


def _changes(changes: Sequence[Change], what: str) -> str:
    return _table(
        ("hosts", what, "until all know", "rosters", "seed sends", "seed is busy for", "another host sends"),
        (
            (
                _count(one.hosts),
                _count(one.changed),
                amount(one.seconds, "s"),
                str(one.rosters),
                amount(one.nbytes, "B"),
                amount(one.busy, "s"),
                f"{_count(one.most)} messages",
            )
            for one in changes
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _count(number: int) -> str:
    return f"{number:,}"


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"


def plots(found: Found) -> dict[str, Series]:
    """Returns the plots of the page, by their files' names."""
    return {
        "rest": _plot(
            "how much of its time a seed's process works, in a cluster at rest",
            "x",
            {
                "at rest": [(one.hosts, one.busy) for one in found.rest],
                "with leases of 30 s": [(one.hosts, one.busy) for one in found.leased],
            },
        ),
        "changes": _plot(
            "bytes that a seed sends, when half as many hosts come, or a tenth dies",
            "B",
            {
                "come": [(one.hosts, one.nbytes) for one in found.joins],
                "die": [(one.hosts, one.nbytes) for one in found.deaths],
            },
        ),
        "broadcast": _plot(
            f"{amount(found.nbytes, 'B')} to all hosts",
            "s",
            {
                "memstore": [(one.hosts, one.sending + one.asking) for one in found.broadcasts],
                "of these, messages": [(one.hosts, one.asking) for one in found.broadcasts],
                "a star": [(one.hosts, one.star) for one in found.broadcasts],
            },
        ),
    }


def _plot(title: str, unit: Unit, lines: dict[str, list[tuple[int, float]]]) -> Series:
    def role(name: str) -> Role:
        return "limit" if name == "a star" else "memstore"

    figures = [
        Figure(name, role(name), Of(y, y, y), 1, x=float(x)) for name, points in lines.items() for x, y in points
    ]
    return Series(title, title, unit, figures, x_title="hosts", x_unit="n")


def with_tables(page: str, found: Found) -> str:
    """Returns the page with these tables in place of those that stand there. Its words stay as they are."""
    for name, table in tables(found).items():
        pattern = re.escape(_TABLE).replace(r"\{\}", "{}").format(re.escape(name), "(?:.*\n)*?")
        page, count = re.subn(pattern, lambda _, name=name, table=table: _TABLE.format(name, table), page)
        if count != 1:
            raise ValueError(f"{PAGE} has {count} places for the table {name!r}, and is to have one")
    return page


def publish(found: Found, draw: Callable[[Series], str], docs: Path = DOCS) -> None:
    """Writes data, tables and plots."""
    (docs / DATA).write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    path = docs / PAGE
    path.write_text(with_tables(path.read_text(), found))
    (docs / IMAGES).mkdir(parents=True, exist_ok=True)
    for name, series in plots(found).items():
        (docs / IMAGES / f"{name}.svg").write_text(draw(series))
