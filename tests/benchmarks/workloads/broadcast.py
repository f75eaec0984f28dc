"""One value for eight hosts at once: how long it takes, and what the host sends that has put it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import spread
from tests.benchmarks.on_hosts import OWNER, HostProcess, not_here
from tests.benchmarks.peers import far_sockets, far_store
from tests.benchmarks.peers.far import Work
from tests.benchmarks.report import Figure, Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.distributed.hosts.clusters import served
from tests.support.hosts import Hosts

READERS, QUICK_READERS = 8, 3
TITLE = f"One value for {READERS} hosts"
ROUNDS, QUICK_ROUNDS = 7, 2
MIB = 1 << 20
STORE, STAR = "memstore", "plain sockets, a star"
MOST_SENT, MOST_TIME = 3, 1.3


def measure(session: Session) -> Workload:
    nowhere = not_here("broadcast", TITLE)
    if nowhere is not None:
        return nowhere
    count = QUICK_READERS if session.quick else READERS
    return measure_with(count, (16 if session.quick else 256) * MIB, QUICK_ROUNDS if session.quick else ROUNDS)


def measure_with(count: int, nbytes: int, rounds: int) -> Workload:
    """Measures a broadcast of so many bytes to so many hosts."""
    work = Work("broadcast", nbytes)
    seconds: dict[str, list[float]] = {STORE: [], STAR: []}
    sent: dict[str, list[float]] = {STORE: [], STAR: []}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-bench-hosts-")))
        hosts = stack.enter_context(Hosts(count + 1, shm_bytes=2 * nbytes + 32 * MIB))
        cluster = stack.enter_context(served(hosts, logs))
        processes = [HostProcess(host, cluster.environment) for host in hosts]
        for process in processes:
            stack.callback(process.close)
            process.run(far_store.open_store)
        owner, readers = processes[OWNER], processes[OWNER + 1 :]
        port = owner.run(far_sockets.listen, hosts[OWNER].address)
        for process in readers:
            process.run(far_sockets.connect, hosts[OWNER].address, port)
        ways: dict[str, tuple[Callable[..., Any], Any, Callable[..., Any]]] = {
            STORE: (far_store.put_all, lambda number: [number], far_store.take),
            STAR: (far_sockets.hold, lambda number: number, far_sockets.take),
        }
        for number in range(rounds + 1):  # the first one warms up
            for name, (offer, argument, take) in ways.items():
                owner.run(offer, work, argument(number))
                before = owner.sent_bytes()
                began = time.perf_counter()
                for process in readers:
                    process.begin(take, work, [number], number in (0, rounds))
                for process in readers:
                    process.answer()
                if number:
                    seconds[name].append(time.perf_counter() - began)
                    sent[name].append((owner.sent_bytes() - before) / nbytes)
    size = f"{nbytes // MIB} MiB"
    figures = [
        Figure(
            name,
            "memstore" if name == STORE else "limit",
            spread(taken),
            len(taken),
            ratio=spread([one / other for one, other in zip(taken, seconds[STORE], strict=True)]),
        )
        for name, taken in seconds.items()
    ]
    shares = [Figure(name, figure.role, spread(sent[name]), rounds) for name, figure in zip(sent, figures, strict=True)]
    against = spread([one / other for one, other in zip(seconds[STORE], seconds[STAR], strict=True)])
    return Workload(
        id="broadcast",
        title=f"One value for {count} hosts",
        text=f"{count + 1} hosts are network namespaces on this machine. One puts {size}, and all others get it at the "
        "same moment: the time until the last one has summed it. Plain sockets send it from memory to each of the "
        "others, into memory that is warm. All hosts share the cores of this machine, so a relay saves no time here: "
        "what it saves is the sender's network.",
        series=[
            Series("time", f"{size} for {count} hosts, until all have summed it", "s", figures, reference=STORE),
            Series("sent", "sent by the host that has put it, in times of the value", "x", shares),
        ],
        goals=[
            Goal(
                f"{size} for {count} hosts: sent by its host, of its bytes", spread(sent[STORE]), "<=", MOST_SENT, "x"
            ),
            Goal(f"{size} for {count} hosts, against {STAR}", against, "<=", MOST_TIME, "x"),
        ],
    )
