"""`python -m tests.benchmarks`: measures, prints the table, and writes JSON, plots and a page.

A workload that fails costs itself only: what was measured is written after each, and `--resume` measures the rest.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from datetime import date
from pathlib import Path

import msgspec

from tests.benchmarks.report import FORMAT, Report, read, write
from tests.benchmarks.workloads import LONG, WORKLOADS

REPOSITORY = Path(__file__).parents[2]
OUTPUT = REPOSITORY / "build" / "benchmarks"  # untracked: runs of this machine
DOCS = REPOSITORY / "docs"  # tracked: the run that docs/performance.md shows
IMAGES = "images/performance"
RESULTS, DATA, LONG_DATA, PAGE = "results.json", "performance.json", "performance-long.json", "performance.md"
MEASUREMENTS_PAGE, GOALS_PAGE = "project/measurements.md", "project/goals.md"
MINUTES, LEAST_MINUTES = 10.0, 0.1


def main() -> None:
    options = parsed()
    if options.list:
        print("\n".join(f"{id:18} {title}" for id, title in (WORKLOADS | LONG).items()))
        return
    logging.basicConfig(level=logging.ERROR)
    report = read(options.report) if options.report else _measure(options)
    from tests.benchmarks.table import text

    print(text(report), flush=True)
    if options.publish:
        publish(report)
    else:
        _write(report, options.output, data=RESULTS, plots="plots")
        _write_page([report], options.output, plots="plots")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("workload", nargs="*", help="which to run (all): see --list")
    parser.add_argument("--list", action="store_true", help="list the workloads")
    parser.add_argument("--minutes", type=float, help="how long `long` runs, which runs by itself (10)")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to try the harness")
    parser.add_argument("--crowded", action="store_true", help="in memory that is full of files, and in pieces")
    parser.add_argument("--peers", help="ids of peers to run, comma-separated; 'none': memstore and the limits only")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="where to put stores (/dev/shm)")
    parser.add_argument("--disk", type=Path, default=OUTPUT.parent, help="a folder on a disk, for cold pages (build)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where JSON, plots and page go (build/benchmarks)")
    parser.add_argument("--resume", action="store_true", help="measure only what results.json there lacks")
    parser.add_argument("--report", type=Path, metavar="JSON", help="show and write this report; measure nothing")
    parser.add_argument("--publish", action="store_true", help="write docs/performance.{json,md} and its plots")
    options = parser.parse_args()
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    asked = set(options.workload)
    if unknown := asked - set(WORKLOADS | LONG):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS | LONG)}")
    if asked & set(LONG) and len(asked) > 1:
        parser.error(f"{', '.join(LONG)} runs by itself: name no other workload with it")
    if options.minutes is not None and not asked & set(LONG):
        parser.error(f"--minutes is for {', '.join(LONG)}")
    if options.minutes is not None and not options.minutes >= LEAST_MINUTES:
        parser.error(f"--minutes is at least {LEAST_MINUTES:g}: the last two thirds have to show a line")
    if options.publish and (options.quick or asked - set(LONG) or options.peers or options.crowded):
        parser.error("--publish shows whole runs only: no workloads but long, no --quick, --peers or --crowded")


def _measure(options: argparse.Namespace) -> Report:
    """In memory as it is, or crowded."""
    if not options.crowded:
        return _measure_all(options)
    from tests.benchmarks.crowding import crowded

    options.disk.mkdir(parents=True, exist_ok=True)
    with crowded(options.disk) as what:
        return _measure_all(options, what)


def _measure_all(options: argparse.Namespace, page_cache: str = "") -> Report:
    from tests.benchmarks.machine import machine, used_by_others, versions
    from tests.benchmarks.session import session
    from tests.benchmarks.workloads import load

    where = machine(options.root) | ({"page cache": page_cache} if page_cache else {})
    found = Report(FORMAT, date.today().isoformat(), options.quick, where, versions(), [])
    if options.resume:
        found = _resumed(found, options.output / RESULTS)
    peers = None if options.peers is None else frozenset(options.peers.split(",")) - {"none"}
    done = {workload.id: workload for workload in found.workloads}
    failed: list[str] = []
    options.output.mkdir(parents=True, exist_ok=True)
    with session(options.root, options.disk, quick=options.quick, peers=peers) as run:
        for id in [id for id in options.workload or WORKLOADS if id not in done]:
            print(f"{id}: {(WORKLOADS | LONG)[id]} ...", file=sys.stderr, flush=True)
            others = max(found.others, round(used_by_others(), 2))
            start = time.monotonic()
            try:
                measured = load(id)(run, options.minutes or MINUTES) if id in LONG else load(id)(run)
            except Exception:
                logging.exception("%s failed", id)
                failed.append(id)
                continue
            done[id] = msgspec.structs.replace(measured, seconds=round(time.monotonic() - start, 1))
            in_order = [done[each] for each in WORKLOADS | LONG if each in done]
            found = msgspec.structs.replace(found, workloads=in_order, others=others)
            write(found, options.output / RESULTS)
    if failed:
        raise SystemExit(f"these failed: {', '.join(failed)}; the others are in {options.output}: --resume goes on")
    return found


def _resumed(new: Report, path: Path) -> Report:
    """The report of an earlier run of this machine, versions and sizes, to be completed."""
    old = read(path)
    if (old.quick, old.machine, old.versions) != (new.quick, new.machine, new.versions):
        raise SystemExit(f"{path} is of another machine, of other versions, or quick: measure again")
    return old


def publish(report: Report) -> None:
    """Writes the data and plots of this run, and the page from this run and the last one of the other kind."""
    found = {workload.id for workload in report.workloads}
    if report.quick or found not in (set(WORKLOADS), set(LONG)):
        raise SystemExit("only a whole run that was not quick is published")
    _write(report, DOCS, data=DATA if found == set(WORKLOADS) else LONG_DATA, plots=IMAGES)
    _write_page([read(DOCS / data) for data in (DATA, LONG_DATA) if (DOCS / data).exists()], DOCS, plots=IMAGES)
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in (PAGE, MEASUREMENTS_PAGE))
    for plot in (DOCS / IMAGES).glob("*.svg"):
        if f"{IMAGES}/{plot.name}" not in pages:  # of a series that has another name by now
            plot.unlink()


def _write(report: Report, folder: Path, *, data: str, plots: str) -> None:
    from tests.benchmarks.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    write(report, folder / data)
    draw(report, folder / plots)
    print(f"wrote {data} and {plots}/ in {folder}")


def _write_page(reports: list[Report], folder: Path, *, plots: str) -> None:
    from tests.benchmarks.document import choices, goals, markdown

    pages = {
        PAGE: choices(reports[0], plots),
        MEASUREMENTS_PAGE: markdown(reports[0], f"../{plots}", *reports[1:]),
        GOALS_PAGE: goals(reports[0], *reports[1:]),
    }
    for name, text in pages.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(pages)} in {folder}")


if __name__ == "__main__":
    main()
