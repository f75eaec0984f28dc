"""The harness itself: turns, ratios, verdicts, and a document that says what was lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.benchmarks.document import markdown
from tests.benchmarks.measure import Contestant, compare, spread, take_turns
from tests.benchmarks.peers import same
from tests.benchmarks.report import FORMAT, Absent, Figure, Goal, Report, Series, Spread, Workload, exactly, read, write
from tests.benchmarks.table import amount, text


def _sleeper(name: str, log: list[str], seconds: float = 0.0) -> Contestant:
    import time

    return Contestant(name, "peer", lambda: time.sleep(seconds), before=lambda: log.append(name))


def _report(*goals: Goal) -> Report:
    figures = [Figure("memstore", "memstore", Spread(3e-6, 2e-6, 4e-6), 9), Figure("Peer", "peer", exactly(1e-6), 9)]
    series = Series("get", "get of a thing", "s", figures, reference="memstore")
    workload = Workload("w", "A thing", "What was done.", [series], list(goals), [Absent("Other", "not installed")])
    return Report(FORMAT, "2026-01-01", False, {"cpu": "a | b"}, {"python": "3"}, [workload])


def test_contestants_take_turns_and_each_round_starts_with_another() -> None:
    log: list[str] = []
    take_turns([_sleeper("a", log, 0.02), _sleeper("b", log, 0.02)], rounds=4, burst_seconds=0.01)
    assert "".join(log[6:]) == "abbaabba"


def test_a_contestant_that_leaves_bytes_makes_no_more_calls_than_it_may() -> None:
    log: list[str] = []
    take_turns([Contestant("a", "peer", lambda: None, before=lambda: log.append("a"), most=12)], rounds=5)
    assert len(log) <= 12


def test_the_ratio_is_to_the_reference() -> None:
    log: list[str] = []
    series = compare("x", "x", [_sleeper("a", log, 0.004), _sleeper("b", log, 0.012)], rounds=3, reference="a")
    ratio = series.figure("b").ratio
    assert ratio is not None and 2 < ratio.median < 4


def test_what_a_call_returned_lives_until_its_time_was_taken() -> None:
    dropped: list[str] = []

    class Result:
        def __del__(self) -> None:
            dropped.append("dropped")

    seen: list[int] = []
    contestant = Contestant("a", "peer", Result, after=lambda result: seen.append(len(dropped)))
    take_turns([contestant], rounds=1)
    assert seen == list(range(len(seen))), "each result was alive when `after` got it"


def test_spread_is_the_median_and_the_outer_tenths() -> None:
    assert spread([float(i) for i in range(11)]) == Spread(5.0, 1.0, 9.0)


@pytest.mark.parametrize(("sense", "met"), [("<=", False), (">=", True)])
def test_a_goal_is_met_or_missed(sense: str, met: bool) -> None:
    assert Goal("g", exactly(2.0), sense, 1.0, "x").met is met  # type: ignore[arg-type]


def test_the_table_and_the_document_say_what_was_missed_and_who_was_faster() -> None:
    report = _report(Goal("get of a thing", exactly(3e-6), "<=", 2e-6, "s"))
    assert "MISSED" in text(report) and "0 of 1 goals met" in text(report)
    page = markdown(report, "plots")
    assert "Missed: get of a thing: 3 µs" in page
    assert "get of a thing: Peer 1 µs, memstore 3 µs" in page
    assert "Not measured: Other, not installed" in page


def test_a_run_that_others_disturbed_says_so() -> None:
    quiet, disturbed = _report(), msgspec.structs.replace(_report(), others=0.5)
    assert "took up to 50%" in text(disturbed) and "took up to 50%" in markdown(disturbed, "plots")
    assert "took up to" not in text(quiet) + markdown(quiet, "plots")


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = _report()
    write(report, tmp_path / "r.json")
    assert read(tmp_path / "r.json") == report


def test_a_wrong_result_is_seen() -> None:
    value = {"a": torch.zeros(3)}
    assert same({"a": torch.zeros(3)}, value)
    assert not same({"a": torch.ones(3)}, value)
    assert not same({"b": torch.zeros(3)}, value)
    assert not same({"a": torch.zeros(3, dtype=torch.float64)}, value)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (2.134e-5, "s", "21.3 µs"),
        (0.25, "s", "250 ms"),
        (1536.0, "B", "1.5 KiB"),
        (3.1e9, "B/s", "3.1 GB/s"),
        (20.0, "x", "20x"),
    ],
)
def test_amounts_are_short(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown  # type: ignore[arg-type]
