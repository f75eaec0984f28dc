"""What it costs a host that its root is served, and how soon lookups go on when an index process was killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch

import memstore
from tests.benchmarks.measure import Contestant, compare, spread
from tests.benchmarks.on_hosts import OWNER, READER, TwoHosts, not_here, two_hosts
from tests.benchmarks.report import Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most
from tests.distributed.hosts.clusters import ROOT

TITLE = "A root that is served: its own keys, and a killed index process"
SERVED, ALONE = "served", "not served"
KILLS, QUICK_KILLS = 9, 2
KEY = "served/value"
LOOKED_UP = 2.0  # seconds around each kill


def measure(session: Session) -> Workload:
    nowhere = not_here("served", TITLE)
    if nowhere is not None:
        return nowhere
    hosts = two_hosts(session)
    local = hosts.process_on(OWNER)
    series = local.run(compare_roots, session.rounds)
    local.close()
    gaps = _kill_index_processes(hosts, QUICK_KILLS if session.quick else KILLS)
    figure = Figure("the longest time between two lookups", "memstore", spread(gaps), len(gaps))
    return Workload(
        id="served",
        title=TITLE,
        text="The same calls on a root that a cluster serves, of keys that this host owns, and on one beside it "
        "that nobody serves. Then a process of another host looks up one key again and again, while the index process "
        "of its owner is killed with SIGKILL: the time until lookups go on.",
        series=[*series, Series("killed", "lookups around the kill of an index process", "s", [figure])],
        goals=[
            *(at_most(one.title.removesuffix(" or not"), one, 1.05, ALONE, name=SERVED) for one in series),
            Goal("lookups after SIGKILL of the index process, the longest wait", exactly(max(gaps)), "<=", 1, "s"),
        ],
    )


# --- on the owner -----------------------------------------------------------------------------------------------------


def compare_roots(rounds: int) -> list[Series]:
    """Gets and puts of several sizes, in a served root and in one that nobody serves."""
    folder = Path(tempfile.mkdtemp(dir=Path(ROOT).parent))
    values = {
        "1 KiB": torch.randn(256),
        "64 KiB": torch.randn(16 << 10),
        "300 leaves": {f"layers.{number}.weight": torch.randn(64, 64) for number in range(300)},
    }
    with memstore.open(ROOT, "r+") as served, memstore.open(folder / "store") as alone:
        stores = {SERVED: served, ALONE: alone}
        series = [
            compare(
                f"{verb}-{name.replace(' ', '-').lower()}",
                f"{verb} of {name}, served or not",
                [_contestant(label, store, verb, name, value) for label, store in stores.items()],
                rounds=rounds,
                reference=SERVED,
            )
            for name, value in values.items()
            for verb in ("get", "put")
        ]
    shutil.rmtree(folder)
    return series


def _contestant(
    label: str, store: memstore.Store, verb: str, name: str, value: torch.Tensor | dict[str, torch.Tensor]
) -> Contestant:
    key = f"{name}/kept"
    store.put(key, value)
    role = "memstore" if label == SERVED else "limit"
    return Contestant(label, role, (lambda: store.get(key)) if verb == "get" else (lambda: store.put(key, value)))


# --- on another host --------------------------------------------------------------------------------------------------


def look_up(seconds: float) -> list[float]:
    """Looks a key up until the time is over. The moments, of the machine's own clock, when each was answered."""
    answered: list[float] = []
    with memstore.open(ROOT, "r+") as store:
        end = time.monotonic() + seconds
        while not answered or answered[-1] < end:
            store.get(KEY, timeout=30.0)
            answered.append(time.monotonic())
    return answered


def put_one() -> None:
    with memstore.open(ROOT, "r+") as store:
        store.put(KEY, torch.randn(256))


# --- around them ------------------------------------------------------------------------------------------------------


def _kill_index_processes(hosts: TwoHosts, kills: int) -> list[float]:
    owner, reader = hosts.process_on(OWNER), hosts.process_on(READER)
    owner.run(put_one)
    reader.run(look_up, 0.0)
    gaps: list[float] = []
    for _ in range(kills):
        reader.begin(look_up, LOOKED_UP)
        time.sleep(LOOKED_UP / 4)  # any moment of the lookups will do
        killed = time.monotonic()
        os.kill(hosts.cluster.index_process(OWNER), signal.SIGKILL)
        answered = reader.answer()
        if answered[0] > killed:
            raise RuntimeError("nobody had looked anything up before the kill")
        after = [moment for moment in answered if moment > killed]
        before = answered[len(answered) - len(after) - 1]
        gaps.append(max(later - sooner for sooner, later in zip([before, *after], after, strict=False)))
    for process in (owner, reader):
        process.close()
    return gaps
