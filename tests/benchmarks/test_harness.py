"""The harness itself: turns, ratios, verdicts, and a document that says what was lost."""

from __future__ import annotations

import mmap
import os
import random
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import memstore
import tests.benchmarks.__main__ as main
from tests.benchmarks import pages, workloads
from tests.benchmarks.crowding import crowded
from tests.benchmarks.document import CHOSEN, choices, goals, markdown
from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Contestant, compare, spread, take_turns
from tests.benchmarks.peers import same
from tests.benchmarks.peers.checkpoints import Checkpointer, PlainFile, Snapshots, State
from tests.benchmarks.peers.sharded import KEY, StoreShards, Weights
from tests.benchmarks.peers.store import Store
from tests.benchmarks.report import (
    FORMAT,
    Absent,
    Figure,
    Goal,
    Report,
    Role,
    Series,
    Spread,
    Unit,
    Workload,
    exactly,
    read,
    write,
)
from tests.benchmarks.session import session
from tests.benchmarks.table import amount, text
from tests.benchmarks.workloads import WORKLOADS, by_ranks
from tests.benchmarks.workloads.gather import Picks
from tests.benchmarks.workloads.large_fresh import _mapped_huge
from tests.benchmarks.workloads.long import NOISE, drift_of
from tests.benchmarks.workloads.readers import is_torn
from tests.benchmarks.workloads.slice import Boxes
from tests.benchmarks.workloads.snapshot import check_saves
from tests.huge_pages import require_huge_pages


class _Clock:
    """Time that passes only where somebody sleeps: on a busy machine a sleep takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)

    def sleeper(self, name: str, log: list[str], seconds: float) -> Contestant:
        return Contestant(name, "peer", lambda: self.sleep(seconds), before=lambda: log.append(name))


def _report(*goals: Goal) -> Report:
    figures = [Figure("memstore", "memstore", Spread(3e-6, 2e-6, 4e-6), 9), Figure("Peer", "peer", exactly(1e-6), 9)]
    series = Series("get", "get of a thing", "s", figures, reference="memstore")
    workload = Workload("w", "A thing", "What was done.", [series], list(goals), [Absent("Other", "not installed")])
    return Report(FORMAT, "2026-01-01", False, {"cpu": "a | b"}, {"python": "3"}, [workload])


def test_contestants_take_turns_and_each_round_starts_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    clock = _Clock(monkeypatch)
    take_turns([clock.sleeper("a", log, 0.02), clock.sleeper("b", log, 0.02)], rounds=4, burst_seconds=0.01)
    assert "".join(log[6:]) == "abbaabba"


def test_a_contestant_that_leaves_bytes_makes_no_more_calls_than_it_may() -> None:
    log: list[str] = []
    take_turns([Contestant("a", "peer", lambda: None, before=lambda: log.append("a"), most=12)], rounds=5)
    assert len(log) <= 12


def test_the_ratio_is_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    contestants = [clock.sleeper("a", [], 0.004), clock.sleeper("b", [], 0.012)]
    series = compare("x", "x", contestants, rounds=3, reference="a")
    assert series.figure("b").ratio == exactly(3.0)
    assert series.figure("b").value == exactly(0.012)


def test_huge_pages_are_those_of_the_reader_alone(store: memstore.Store) -> None:
    require_huge_pages(store.root)
    store.put("key", torch.ones(4 << 20, dtype=torch.uint8))  # its mapping is kept for the next put
    value = store.get("key")
    assert value.sum() == 4 << 20
    (file,) = store.info("key").files
    assert _mapped_huge(file) == 4 << 20


def test_crowded_memory_is_full_of_files_and_nothing_is_backed_meanwhile(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with crowded(tmp_path, share=(30 << 20) / total, settles=0) as what:
        (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert file.stat().st_size >= 60 << 20 and "GiB of files" in what
        assert _faults_of_backing() < 100
    assert _faults_of_backing() >= (8 << 20) // mmap.PAGESIZE
    assert list(tmp_path.iterdir()) == []


def _faults_of_backing() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    back_memory(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


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
    slower = markdown(report, "plots").partition("## What memstore is slower at")[2]
    assert "## Goals that were missed\n\n- get of a thing: 3 µs, the goal is at most 2 µs." in goals(report)
    assert "| get of a thing | 3 µs | Peer | 1 µs | 0.333x |" in slower.replace("\N{NO-BREAK SPACE}", " ")
    assert "Not measured: Other, not installed" in slower


def test_who_was_faster_is_told_by_ratios_and_of_the_fastest_way_too() -> None:
    def figure(name: str, role: Role, median: float, ratio: float) -> Figure:
        return Figure(name, role, exactly(median), 9, ratio=exactly(ratio))

    ours = [figure("memstore", "memstore", 4.0, 1.0), figure("memstore, kept", "memstore", 2.0, 0.5)]
    peers = [figure("Peer", "peer", 5.0, 0.8), figure("Quick", "peer", 1.0, 0.25), figure("Slow", "peer", 3.0, 1.2)]
    series = Series("get", "get", "s", [*ours, *peers, figure("copy", "limit", 0.1, 0.1)], reference="memstore")
    page = markdown(msgspec.structs.replace(_report(), workloads=[Workload("w", "W", "", [series], [])]), "plots")
    page = page.replace("\N{NO-BREAK SPACE}", " ")
    rows = page.partition("## What memstore is slower at")[2].partition("## W")[0]
    assert [line.strip("| ") for line in rows.splitlines() if line.startswith("| get")] == [
        "get | 4 s | Peer | 5 s | 0.8x",
        "get | 4 s | Quick | 1 s | 0.25x",
        "get, kept | 2 s | Quick | 1 s | 0.5x",
    ]
    chosen = choices(msgspec.structs.replace(_report(), workloads=[Workload("w", "W", "", [series], [])]), "plots")
    chosen = chosen.replace("\N{NO-BREAK SPACE}", " ")
    assert [line for line in chosen.splitlines() if line.startswith("| get")] == ["| get | 4 s | Quick | 1 s |"]


def test_the_page_opens_with_what_a_reader_chooses_by_and_says_where_memstore_is_slower() -> None:
    whole = choices(read(main.DOCS / main.DATA), "plots")
    page = whole.partition("## What to choose by")[2].partition("## ")[0]
    assert len(whole.split()) < 1500, "tables belong to the page of measurements"
    for words in CHOSEN.values():
        assert f"| {words} |" in page
    assert "| **" in page and page.count(" times as fast as ") == len(CHOSEN)


def test_what_is_published_is_what_the_report_says() -> None:
    reports = [read(main.DOCS / data) for data in (main.DATA, main.LONG_DATA)]
    published = {
        main.PAGE: choices(reports[0], main.IMAGES),
        main.MEASUREMENTS_PAGE: markdown(reports[0], f"../{main.IMAGES}", *reports[1:]),
        main.GOALS_PAGE: goals(reports[0], *reports[1:]),
    }
    for name, page in published.items():
        assert (main.DOCS / name).read_text() == page, (
            "python -m tests.benchmarks --report docs/performance.json --publish"
        )


def test_headings_of_what_is_published_can_be_told_apart() -> None:
    page = markdown(read(main.DOCS / main.DATA), "plots", read(main.DOCS / main.LONG_DATA))
    headings = [line.lstrip("# ").lower() for line in page.splitlines() if line.startswith("#")]
    assert len(headings) > 100, "this tests nothing"
    assert sorted(headings) == sorted(set(headings))


def test_a_run_that_others_disturbed_says_so() -> None:
    quiet, disturbed = _report(), msgspec.structs.replace(_report(), others=0.5)
    assert "took up to 50%" in text(disturbed) and "took up to 50%" in markdown(disturbed, "plots")
    assert "took up to 50%" in choices(disturbed, "plots")
    assert "took up to" not in text(quiet) + markdown(quiet, "plots") + choices(quiet, "plots")


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


def _over_time() -> Workload:
    figures = [Figure("rate", "memstore", exactly(10.0), 1, x=float(second)) for second in range(3)]
    series = Series("rate", "throughput", "B/s", figures, x_title="time", x_unit="s")
    return Workload("long", "Minutes", "What was done.", [series], [Goal("drift", exactly(0.5), "<=", 2, "x")])


def test_moments_of_a_run_are_a_plot_and_no_table() -> None:
    report = msgspec.structs.replace(_report(), workloads=[_over_time()])
    assert "10 B/s" not in text(report)
    page = markdown(report, "plots")
    assert "![throughput](plots/long-rate.svg)" in page and "10 B/s" not in page


def test_a_run_of_its_own_stands_after_the_first_with_its_date_and_goals() -> None:
    other = msgspec.structs.replace(_report(), workloads=[_over_time()], date="2026-02-02", others=0.5)
    page = markdown(_report(), "plots", other)
    first, _, second = page.partition("## Minutes")
    assert "2026-02-02" in second and "took up to 50%" in second
    assert "1 of 1 met" in goals(_report(), other).partition("2026-02-02")[2]
    assert "2026-02-02" not in first and "took up to" not in first


def test_a_plot_is_drawn_for_sizes_counts_and_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # comes with the extra `bench`
    from tests.benchmarks.plots import draw

    figures = [Figure("rate", "memstore", exactly(10.0), 1, x=x) for x in (1.0, 64.0)]
    units: tuple[Unit, ...] = ("B", "n", "s")
    series = [Series(unit, "throughput", "B", figures, x_title="x", x_unit=unit) for unit in units]
    assert [one.has_plot for one in series] == [False, False, True], "bytes are numbers, but over time"
    rates = [msgspec.structs.replace(one, unit="B/s") for one in series]
    draw(msgspec.structs.replace(_report(), workloads=[Workload("w", "A thing", "", rates, [])]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w-B.svg", "w-n.svg", "w-s.svg"]
    assert [">64 B<" in (tmp_path / f"w-{unit}.svg").read_text() for unit in units] == [True, False, False]


def test_what_grows_drifts_and_what_only_wavers_does_not() -> None:
    chance = random.Random(0)
    wavering = [(float(second), 100 + chance.gauss(0, 5)) for second in range(600)]
    growing = [(at, value + 0.05 * at) for at, value in wavering]
    flat, grown = drift_of(wavering), drift_of(growing)
    assert abs(flat.drift) < NOISE * flat.noise
    assert grown.drift > NOISE * grown.noise and 15 < grown.drift < 25, "of 30 in all, those of the last two thirds"


def test_what_grew_only_at_first_is_flat() -> None:
    points = [(float(second), min(float(second), 100.0)) for second in range(300)]
    assert drift_of(points).drift == 0


def test_a_value_with_two_stamps_is_torn() -> None:
    value = torch.full((1 << 20,), 3)
    assert not is_torn(value)
    for half in (slice(None, 1 << 19), slice(1 << 19, None), slice(1 << 18, 3 << 18), slice(-1, None), slice(1)):
        torn = value.clone()
        torn[half] = 4
        assert is_torn(torn)


def test_a_first_put_finds_nothing_to_use_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.setup()
    for _ in range(2):
        store.put("key", torch.zeros(1 << 16))
    assert store.store.stats().reusable_bytes
    store.drop("key")
    stats = store.store.stats()
    store.close()
    assert (stats.keys, stats.live_bytes, stats.reusable_bytes) == (0, 0, 0)


def test_a_run_of_its_own_keeps_the_page_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(main, "DOCS", tmp_path)
    whole = msgspec.structs.replace(_report(), workloads=[Workload(id, f"The {id}", "", [], []) for id in WORKLOADS])
    long = msgspec.structs.replace(_report(), workloads=[_over_time()])
    old = tmp_path / main.IMAGES / "renamed.svg"
    old.parent.mkdir(parents=True)
    old.touch()
    for report in (whole, long, whole):
        main.publish(report)
    page = (tmp_path / "project/measurements.md").read_text()
    assert (tmp_path / "project/goals.md").exists()
    assert "## The small" in page and "## Minutes" in page
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["performance-long.json", "performance.json"]
    assert [path.name for path in old.parent.iterdir()] == ["long-rate.svg"], "plots that the page shows"


@pytest.mark.parametrize("shards", [1, 16])
@pytest.mark.parametrize("shape", [(16, 4096), (256, 256)])
def test_a_slice_has_rows_of_two_shards(shards: int, shape: tuple[int, int]) -> None:
    boxes = Boxes(4096, shards, shape)
    matrix = torch.arange(4096 * 4096, dtype=torch.int32).reshape(4096, 4096)
    stored = dict(enumerate(matrix.split(4096 // shards)))
    for row, column in boxes.all():
        pieces = boxes.pieces(row, column)
        assert pieces[0].row == row
        parts = [stored[int(name.removeprefix("rows-"))][rows, columns] for name, rows, columns, _ in pieces]
        assert torch.equal(torch.cat(parts), matrix[row : row + shape[0], column : column + shape[1]])
        assert len(pieces) == min(shards, 2)


class _Forgetful(Snapshots):
    """Restores all but the last tensor."""

    def restore(self, path: Path, state: State) -> None:
        super().restore(path, dict(list(state.items())[:-1]))


@pytest.mark.parametrize(("kind", "is_right"), [(Snapshots, True), (PlainFile, True), (_Forgetful, False)])
def test_what_was_restored_is_compared(tmp_path: Path, kind: type[Checkpointer], is_right: bool) -> None:
    state, target = ({f"layers.{i}": torch.randn(4, 4) for i in range(3)} for _ in range(2))
    call = partial(check_saves, [kind(tmp_path)], state, target, "save")
    if is_right:
        call()
    else:
        with pytest.raises(SystemExit, match="differs"):
            call()


class _Stale(StoreShards):
    """Publishes once."""

    def publish(self, step: int, weights: Weights) -> None:
        if KEY not in self.store:
            super().publish(step, weights)


class _Torn(StoreShards):
    """Fills one tensor of an older step."""

    def fill(self, targets: Weights, found: Any = None) -> None:
        name = next(iter(targets))
        old = targets[name].to_local().clone()
        super().fill(targets, found)
        targets[name].to_local().copy_(old)


@pytest.mark.full
def test_what_was_handed_over_between_ranks_is_compared(tmp_path: Path) -> None:
    plan = by_ranks.Plan(publishers=(0, 1), followers=(2, 3), side=8)
    peers = [kind(tmp_path / kind.__name__) for kind in (StoreShards, _Stale, _Torn)]
    for peer in peers:
        peer.root.mkdir()
    with by_ranks.started(plan, peers) as ranks:
        for _ in range(2):
            ranks.run(by_ranks.hand_over, 0)
            ranks.run(by_ranks.check, 0)
        followed = ranks.run(by_ranks.follow, 0, 5)
        assert [rank.torn for rank in followed] == [0] * 4 and followed[0].steps == 5 and followed[2].steps > 0
        ranks.run(by_ranks.hand_over, 1)
        ranks.run(by_ranks.check, 1)
        for number, what in ((1, "filled with step 8, of step 9"), (2, "parts of several steps")):
            ranks.run(by_ranks.hand_over, number)
            with pytest.raises(ValueError, match=what):
                ranks.run(by_ranks.check, number)


def test_every_contestant_gathers_the_same_rows() -> None:
    one, other = Picks(1000, seed=1), Picks(1000, seed=1)
    first = one.index
    for picks in (one, other):
        picks.next()
    assert torch.equal(one.index, other.index) and not torch.equal(one.index, first)


def test_dropped_pages_are_gone_and_a_mapped_one_stays(disk_root: str) -> None:
    path = Path(f"{disk_root}-file")
    path.write_bytes(bytes(1 << 20))
    pages.flush(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert not sum(mapping[:: mmap.PAGESIZE])
        pages.drop(path)
        assert pages.are_in_memory(path)
    pages.drop(path)
    assert not pages.are_in_memory(path)
    path.unlink()


def test_a_folder_in_memory_is_no_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert not pages.can_drop_pages(Path(folder))


def test_what_workloads_share_is_made_once_and_closed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.benchmarks.session.NEEDED_BYTES", 0)
    log: list[str] = []
    with session(tmp_path, tmp_path, quick=True, peers=None) as run:

        def make() -> str:
            run.until_end.callback(log.append, "closed")
            log.append("made")
            return "it"

        assert [run.shared("it", make), run.shared("it", make)] == ["it", "it"]
        assert log == ["made"]
    assert log == ["made", "closed"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["long small", "small --minutes 1", "long --minutes 0", "small --publish"])
def test_what_can_not_be_run_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *given.split()])
    with pytest.raises(SystemExit):
        main.parsed()


def test_a_workload_that_fails_costs_itself_only_and_the_rest_is_measured_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    calls: list[str] = []

    def load(id: str) -> Any:
        def measure(_: Any) -> Workload:
            calls.append(id)
            if id == "slice" and calls.count(id) == 1:
                raise RuntimeError("the first time")
            return Workload(id, id, "", [], [])

        return measure

    monkeypatch.setattr(workloads, "load", load)
    arguments = ["", "small", "slice", "start", "--quick", "--output", str(tmp_path), "--root", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="these failed: slice"):
        main.main()
    assert [one.id for one in read(tmp_path / main.RESULTS).workloads] == ["small", "start"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume"])
    main.main()
    assert [one.id for one in read(tmp_path / main.RESULTS).workloads] == ["small", "slice", "start"]
    assert calls == ["small", "slice", "start", "slice"]
    monkeypatch.setattr(sys, "argv", [*(word for word in arguments if word != "--quick"), "--resume"])
    with pytest.raises(SystemExit, match="measure again"):
        main.main()
