"""The nouns of a benchmark run. Times are seconds, sizes are bytes; what is printed is made from these alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["memstore", "peer", "limit"]
QUIET = 0.1  # the share of the cores that others may take
ROLES: tuple[Role, ...] = ("memstore", "peer", "limit")  # in the order of a table
Unit = Literal["s", "B", "B/s", "x", "n", "n/s"]  # "n": a number of things
RATES: tuple[Unit, ...] = ("B/s", "n/s")  # of them more is better


class Spread(msgspec.Struct, frozen=True):
    """The median of some measurements, and the tenth and ninetieth of a hundred."""

    median: float
    p10: float
    p90: float


class Figure(msgspec.Struct, frozen=True):
    """What one contestant took. `x` is its place on a plot's axis, where a series goes by size."""

    name: str
    role: Role
    value: Spread
    calls: int
    ratio: Spread | None = None  # to the series' reference, taken round by round
    x: float | None = None
    note: str = ""


class Series(msgspec.Struct, frozen=True):
    """Contestants that took turns at the same work. `reference` names the one that ratios are to."""

    id: str
    title: str
    unit: Unit
    figures: list[Figure]
    reference: str = ""
    x_title: str = ""
    x_unit: Unit = "B"

    def figure(self, name: str, x: float | None = None) -> Figure:
        for figure in self.figures:
            if figure.name == name and (x is None or figure.x == x):
                return figure
        raise KeyError(f"series {self.id!r} has no figure {name!r}; it has {[f.name for f in self.figures]}")

    @property
    def is_over_time(self) -> bool:
        """Its figures are moments of one run: shown as a plot, not as a table."""
        return self.x_unit == "s"

    @property
    def has_plot(self) -> bool:
        """Bytes are read better as numbers, and a logarithm shows nothing of times that may be negative."""
        return self.is_over_time or (self.unit not in ("B", "n") and all(f.value.p10 > 0 for f in self.figures))

    def best(self, role: Role) -> Figure | None:
        """The fastest of the contestants in this role, or None where none is here."""
        found = [figure for figure in self.figures if figure.role == role]
        return min(found, key=lambda figure: figure.value.median, default=None)


class Beside(msgspec.Struct, frozen=True):
    """A named figure to show beside another."""

    name: str
    value: float


class Goal(msgspec.Struct, frozen=True):
    """A goal and what was found. `found` must be at most (or at least) `goal`, as `sense` says."""

    what: str
    found: Spread
    sense: Literal["<=", ">="]
    goal: float
    unit: Unit
    limit: Beside | None = None  # what the machine itself takes for this
    peer: Beside | None = None  # what the best peer takes

    @property
    def met(self) -> bool:
        return self.found.median <= self.goal if self.sense == "<=" else self.found.median >= self.goal


class Absent(msgspec.Struct, frozen=True):
    """A peer that could not run here."""

    name: str
    reason: str


class Workload(msgspec.Struct, frozen=True):
    id: str
    title: str
    text: str  # what was done, in a sentence or three
    series: list[Series]
    goals: list[Goal]
    absent: list[Absent] = []
    notes: list[str] = []
    seconds: float = 0.0

    def plot_name(self, series: Series) -> str:
        return f"{self.id}.svg" if series.id == self.id else f"{self.id}-{series.id}.svg"


class Report(msgspec.Struct, frozen=True):
    """One run. `quick` runs are for trying the harness: their figures are not to be shown to anyone."""

    format: int
    date: str
    quick: bool
    machine: dict[str, str]
    versions: dict[str, str]
    workloads: list[Workload]
    others: float = 0.0  # the share of the cores that other processes took, the highest that was seen

    @property
    def disturbed(self) -> str:
        """What to say of a run on a machine that was not ours alone; empty if it was."""
        if self.others <= QUIET:
            return ""
        return (
            f"Other processes took up to {self.others:.0%} of the cores during this run: measure again before quoting."
        )


FORMAT = 1


def write(report: Report, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read(path: Path) -> Report:
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    if report.format != FORMAT:
        raise SystemExit(f"{path} has format {report.format}, this is {FORMAT}: measure again")
    return report


def exactly(value: float) -> Spread:
    """A figure that was counted, not timed."""
    return Spread(value, value, value)
