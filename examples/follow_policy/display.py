"""Shows the demo: a live picture on a terminal, otherwise a line now and then, and the table at the end."""

from __future__ import annotations

import time
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WIDTH = 36
BARS = "▁▂▃▄▅▆▇█"
Reports = dict[str, dict[str, Any]]  # by process: what it last put, and its state


class Display:
    """Shows reports as they come. Use as a context manager around the run."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self._curves: dict[str, list[str]] = {}
        self._next_line, self._last_line = 0.0, ""
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def event(self, text: str) -> None:
        self.console.print(Text(text, style="bold yellow"))

    def show(self, reports: Reports, *, last: bool = False) -> None:
        if self._live:
            self._live.update(self._picture(reports), refresh=True)
        elif last or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 1
            alive = {n: r for n, r in reports.items() if n != "trainer" and r["state"] != "killed"}
            followers = (f"{name}: {report['accuracy']:.1%}" for name, report in alive.items() if report["seen"])
            line = "   ".join((f"step {_step(reports):>4} of {self.steps}", *followers))
            if line != self._last_line:
                self.console.print(line, highlight=False, soft_wrap=True)
            self._last_line = line

    def _picture(self, reports: Reports) -> Group:
        grid = Table.grid(padding=(0, 2))
        trainer = reports.get("trainer", {"step": 0, "loss": 0.0, "state": "starting"})
        bar = ProgressBar(total=self.steps, completed=trainer["step"], width=WIDTH)
        loss = f"loss {trainer['loss']:.2f}" if trainer["step"] else ""
        grid.add_row("[bold]trainer", f"{trainer['step']:>4}", bar, loss, trainer["state"])
        for name, report in reports.items():
            if name != "trainer":
                colour = "red" if report["state"] == "killed" else "green"
                curve, accuracy = f"[cyan]{self._curve(name, report)}", f"{report['accuracy']:.1%}"
                grid.add_row(f"[bold]{name}", f"{report['step']:>4}", curve, accuracy, f"[{colour}]{report['state']}")
        return Group(Text(), grid, Text())

    def _curve(self, name: str, report: dict[str, Any]) -> str:
        """Accuracy over steps, below the trainer's bar; blank where this process saw nothing."""
        curve = self._curves.setdefault(name, [" "] * WIDTH)
        if report["seen"]:
            curve[min(report["step"] * WIDTH // self.steps, WIDTH - 1)] = BARS[round(7 * report["accuracy"])]
        return "".join(curve)


def _step(reports: Reports) -> int:
    return reports.get("trainer", {"step": 0})["step"]


def summary(reports: Reports, steps: int, nbytes: int) -> Table:
    """The table at the end. Latencies are of the put or get alone; GB/s is a version over the median put."""
    title = f"{steps} versions of {nbytes / 1e6:.1f} MB"
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("process", "versions", "torn", "p50 µs", "p99 µs", "GB/s", "accuracy", ""):
        table.add_column(column, justify="left" if column in ("process", "") else "right", no_wrap=True)
    for name, report in reports.items():
        middle, tail = _percentile(report["seconds"], 0.5), _percentile(report["seconds"], 0.99)
        latency = (f"{middle * 1e6:,.0f}", f"{tail * 1e6:,.0f}")
        if name == "trainer":
            cells = (f"{report['step']} put", "", *latency, f"{nbytes / middle / 1e9:.1f}", "")
        else:
            torn = f"[{'red' if report['torn'] else 'green'}]{report['torn']}"
            cells = (f"{report['seen']} got", torn, *latency, "no copy", f"{report['accuracy']:.1%}")
        table.add_row(name, *cells, report["state"])
    return table


def _percentile(seconds: Any, q: float) -> float:
    return seconds.double().quantile(q).item() if len(seconds) else float("nan")
