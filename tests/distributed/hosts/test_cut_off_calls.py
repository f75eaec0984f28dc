"""Calls of a store beside a host that gives no answer: they end at their timeouts, and their errors name host and key.

The host is cut off; or its processes are stopped, so that the kernel takes what is sent to them, and nobody reads it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.distributed.hosts import timed_calls
from tests.distributed.hosts.clusters import ROOT, ServedHosts
from tests.distributed.hosts.timed_calls import LATE_BY, LOCAL


def signal_all(cluster: ServedHosts, number: int) -> None:
    """To the processes that serve host 1. The agent stops first: it would replace an index process that is silent."""
    pids = [cluster.agent(1).pid, cluster.index_process(1)]
    for pid in pids if number == signal.SIGSTOP else reversed(pids):
        os.kill(pid, number)


FAULTS: dict[str, tuple[Callable[[ServedHosts], None], Callable[[ServedHosts], None]]] = {
    "cut off": (lambda cluster: cluster.hosts.cut(0, 1), lambda cluster: cluster.hosts.heal(0, 1)),
    "stopped": (
        lambda cluster: signal_all(cluster, signal.SIGSTOP),
        lambda cluster: signal_all(cluster, signal.SIGCONT),
    ),
}


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_ends_at_its_timeout_and_names_the_host_and_the_key(fault: str, cluster: ServedHosts) -> None:
    begin, end = FAULTS[fault]
    far, near = cluster.group_of(1), cluster.group_of(0)
    cluster.call(1, timed_calls.prepare, far, near)
    wrong: list[str] = []
    kinds: list[str] = []
    with cluster.start(0, timed_calls.time_calls, ROOT, far, near) as worker:
        assert worker.recv() == "ready"
        begin(cluster)
        worker.send("begin")
        while (message := worker.recv()) is not None:
            kind, name, key, limit, seconds, error, text, error_key = message
            kinds.append(kind)
            told = f"{kind} {name}: {seconds:.2f} s of {limit} s, {error} {text}"
            if seconds > limit + LATE_BY:
                wrong.append(f"late: {told}")
            allowed = {""} if name in LOCAL else {"HomeUnavailableError"}
            if name.startswith("put_sharded"):
                allowed.add("UnknownOutcomeError")  # the attempt may be completed by others
            if error not in allowed:
                wrong.append(f"another end: {told}")
            elif error and cluster.address(1) not in text:
                wrong.append(f"names no host: {told}")
            elif key and (repr(key) not in text or error_key != key):
                wrong.append(f"names no key, or {error_key!r}: {told}")
    end(cluster)
    assert not wrong, "\n".join(wrong)
    assert set(kinds) == {"far", "near", "listing", "local"}
