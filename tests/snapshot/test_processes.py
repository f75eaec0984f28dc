"""Whether a process has ended: only what is sure is said."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from memstore.snapshot.ranks import Process, has_ended, this_process
from tests.children import Child, Wire


def _tell(wire: Wire) -> None:
    wire.send(this_process())
    wire.receive()


def test_a_process_that_runs_has_not_ended_and_one_that_was_killed_has() -> None:
    mine = this_process()
    assert mine.pid == os.getpid() and not has_ended(mine, mine)
    with Child(_tell) as child:
        theirs: Process = child.receive()
        assert not has_ended(theirs, mine)
        assert has_ended(msgspec.structs.replace(theirs, started=theirs.started - 1), mine)  # a later one of its number
        child.kill()
        assert has_ended(theirs, mine)


def test_a_dead_process_that_nobody_has_waited_for_has_ended() -> None:
    mine = this_process()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with open(f"/proc/{process.pid}/stat") as file:
            started = int(file.read().rpartition(")")[2].split()[19])
        theirs = Process(mine.host, process.pid, started)
        assert not has_ended(theirs, mine)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert has_ended(theirs, mine)


def test_of_a_process_of_another_host_or_namespace_nothing_is_known() -> None:
    mine = this_process()
    assert mine.host is not None
    boot, namespace = mine.host
    for host in ((bytes(16), namespace), (boot, namespace + 1), None):
        elsewhere = Process(host, 1 << 22, 0)  # a number that no process here has
        assert not has_ended(elsewhere, mine) and not has_ended(elsewhere, msgspec.structs.replace(mine, host=None))
    assert has_ended(Process(mine.host, 1 << 22, 0), mine)
