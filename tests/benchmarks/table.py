"""The report as text: the goals first, then every contestant of every series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.benchmarks.report import ROLES, Figure, Goal, Report, Series, Spread, Unit, Workload

GOALS = ("what", "memstore", "p10 to p90", "goal", "", "the machine", "best peer")


def text(report: Report) -> str:
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"memstore benchmarks, {report.date}{', quick: not to be quoted' if report.quick else ''}"
    yield ", ".join(f"{name} {value}" for name, value in report.machine.items())
    if report.disturbed:
        yield report.disturbed
    for workload in report.workloads:
        yield ""
        yield f"== {workload.id}: {workload.title} ({workload.seconds:.0f} s)"
        for series in workload.series:
            yield ""
            yield f"   {series.title}"
            if not series.is_over_time:
                yield from _aligned([("", "median", "p10 to p90", "ratio", "calls"), *figure_rows(series)], "   ")
        yield from (f"   {note}" for note in workload.notes)
        yield from (f"   not here: {absent.name}: {absent.reason}" for absent in workload.absent)
    yield ""
    yield "== goals"
    yield ""
    goals = [goal for workload in report.workloads for goal in workload.goals]
    yield from _aligned([GOALS, *(row for workload in report.workloads for row in goal_rows(workload))])
    yield ""
    yield f"{sum(goal.met for goal in goals)} of {len(goals)} goals met"


def goal_rows(workload: Workload) -> list[tuple[str, ...]]:
    return [_goal_row(goal) for goal in workload.goals]


def _goal_row(goal: Goal) -> tuple[str, ...]:
    bound = "≤" if goal.sense == "<=" else "≥"
    limit, peer = goal.limit, goal.peer
    beside_unit: Unit = "s" if goal.unit == "x" else goal.unit
    return (
        goal.what,
        amount(goal.found.median, goal.unit),
        spread_text(goal.found, goal.unit),
        f"{bound} {amount(goal.goal, goal.unit)}",
        "met" if goal.met else "MISSED",
        f"{amount(limit.value, beside_unit)} {limit.name}" if limit else "",
        f"{amount(peer.value, beside_unit)} {peer.name}" if peer else "",
    )


def figure_rows(series: Series) -> list[tuple[str, ...]]:
    """A row a contestant: median, spread, how many times the reference's time, calls."""
    return [
        (
            named(figure) if figure.x is None else f"{amount(figure.x, series.x_unit)}, {named(figure)}",
            amount(figure.value.median, series.unit),
            spread_text(figure.value, series.unit),
            amount(figure.ratio.median, "x") if figure.ratio else "",
            str(figure.calls),
        )
        for figure in sorted(series.figures, key=lambda figure: (figure.x or 0.0, ROLES.index(figure.role)))
    ]


def named(figure: Figure) -> str:
    return f"{figure.name} (limit)" if figure.role == "limit" else figure.name


def spread_text(spread: Spread, unit: Unit) -> str:
    if spread.p10 == spread.p90:
        return ""
    return f"{amount(spread.p10, unit)} to {amount(spread.p90, unit)}"


def amount(value: float, unit: Unit) -> str:
    """Three figures and a fitting unit: 0.0000213 s is 21.3 µs."""
    if unit == "x":
        return f"{_figures(value)}x"
    if unit == "n/s":
        return f"{_figures(value)}/s"
    if unit == "n":
        return f"{value:,.0f}" if value == int(value) else _figures(value)
    if unit == "s":
        return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))
    binary = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
    decimal = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))
    return _scaled(value, binary if unit == "B" else decimal)


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    if not value:
        return f"0 {next(name for name, size in units if size == 1.0)}"
    name, size = next(((name, size) for name, size in units if abs(value) >= size), units[-1])
    return f"{_figures(value / size)} {name}"


def _figures(value: float) -> str:
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _aligned(rows: Sequence[Sequence[str]], indent: str = "") -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(width) if column in (0, len(row) - 1) or len(row) == len(GOALS) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield (indent + "  ".join(cells)).rstrip()
