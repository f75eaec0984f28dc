"""A trainer publishes a network's weights after every step; two evaluators follow, and one of them is killed.

    python -m examples.follow_policy [--steps N] [--pace SECONDS] [--root PATH]

Three processes share one folder, without a server. They communicate only through keys of the store: the weights are
under "policy", and each process puts its state under "report/NAME", which this process reads to draw the picture.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from rich.console import Console

import memstore
from examples.follow_policy.display import Display, Reports, summary
from examples.follow_policy.evaluator import follow
from examples.follow_policy.model import KEY
from examples.follow_policy.trainer import train

# Fresh processes, forked from one that has imported torch and opened nothing: a restart takes no seconds of imports.
processes_from = multiprocessing.get_context("forkserver")
processes_from.set_forkserver_preload(["examples.follow_policy.trainer", "examples.follow_policy.evaluator"])
EVALUATORS = ("evaluator 1", "evaluator 2")
RESTARTED = "evaluator 2b"  # started in its place


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.follow_policy")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pace", type=float, default=0.025, help="seconds a step takes at least")
    parser.add_argument("--sabotage", type=int, default=0, metavar="STEP", help="damage the weights of one step")
    parser.add_argument("--root", default="/dev/shm/memstore-demo", help="of the store, which begins anew")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps is 2 or more, so that the evaluators see one")
    with memstore.open(options.root, "w") as store:  # "w": without what a run has left that was killed
        try:
            return run(store, options)
        except KeyboardInterrupt:
            return 130
        finally:
            memstore.destroy(options.root)


def run(store: memstore.Store, options: argparse.Namespace) -> int:
    root, console = store.root, Console()
    console.print(f"store [bold]{root}[/], {options.steps} steps, {len(EVALUATORS)} evaluators", highlight=False)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process, which ends the others
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    processes: dict[str, Any] = {}
    try:
        with Display(console, options.steps) as display:
            for name in EVALUATORS:
                processes[name] = start(follow, root, name, options.steps)
            for name in EVALUATORS:
                wait_until_ready(store, name, processes[name])
            processes["trainer"] = start(train, root, options.steps, options.pace, options.sabotage)
            watch(store, display, processes, options)
        reports = collect(store, processes)
        if KEY in store:
            console.print(summary(reports, options.steps, store.info(KEY).nbytes))
        return verdict(console, reports, processes)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Ctrl-C meanwhile is taken when it has started: half started, nobody would know it to end it."""
    process = processes_from.Process(target=target, args=arguments, daemon=True)
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    process.start()
    signal.signal(signal.SIGINT, handler)
    if interrupts:
        process.kill()
        raise KeyboardInterrupt
    return process


def wait_until_ready(store: memstore.Store, name: str, process: Any) -> None:
    while process.is_alive():
        with contextlib.suppress(memstore.StoreTimeoutError):
            store.wait(f"report/{name}", timeout=0.5)
            return


def watch(store: memstore.Store, display: Display, processes: dict[str, Any], options: argparse.Namespace) -> None:
    """Draws until all have ended; kills an evaluator after a third of the steps, and starts it anew."""
    victim = processes[EVALUATORS[1]]
    while any(process.is_alive() for process in processes.values()):
        reports = collect(store, processes)
        display.show(reports)
        if RESTARTED not in processes and reports.get("trainer", {"step": 0})["step"] >= options.steps / 3:
            victim.kill()
            victim.join()
            processes[RESTARTED] = start(follow, store.root, RESTARTED, options.steps)
            display.event(f"{EVALUATORS[1]} (pid {victim.pid}) got SIGKILL; a new one starts")
        time.sleep(0.05)
    display.show(collect(store, processes), last=True)


def collect(store: memstore.Store, processes: dict[str, Any]) -> Reports:
    """What each process last said, the trainer first."""
    reports: Reports = {}
    for name in sorted(processes, key=lambda name: (name != "trainer", name)):
        report = store.get(f"report/{name}", None)
        if report is not None:
            reports[name] = {**report, "state": state(processes[name])}
    return reports


def state(process: Any) -> str:
    if process.exitcode is None:
        return "running"
    return {0: "done", -9: "killed"}.get(process.exitcode, f"failed ({process.exitcode})")


def verdict(console: Console, reports: Reports, processes: dict[str, Any]) -> int:
    """0 if nothing was torn, every evaluator saw something, and nobody failed but the one that was killed."""
    wrong = [f"{name}: {report['torn']} torn" for name, report in reports.items() if report.get("torn")]
    wrong += [f"{name} saw nothing" for name in (*EVALUATORS, RESTARTED) if not reports.get(name, {}).get("seen")]
    wrong += [f"{name} {state(p)}" for name, p in processes.items() if state(p).startswith("failed")]
    for line in wrong:
        console.print(f"[bold red]{line}")
    if not wrong:
        console.print("[green]no torn read; the killed evaluator left nothing to clean up")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
