"""A process is killed at each of its returns from the kernel, those inside of LMDB and of libc included.

So falls the axe mostly: a SIGKILL that arrives during a system call takes effect when that is done.
"""

from __future__ import annotations

import pytest

import memstore
from tests.crash import workers
from tests.crash.operations import OPERATIONS
from tests.crash.test_kill_at_steps import FIRST, KILLED, First, check_goes_on
from tests.crash.tracer import Tracer
from tests.crash.values import SMALL, stamped
from tests.support.fork_server import ForkServer

FULL = pytest.mark.full


@pytest.mark.parametrize("first", [pytest.param(first, marks=() if first in FIRST[2:] else FULL) for first in FIRST])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "overwrite-small" else FULL) for name in OPERATIONS]
)
@pytest.mark.parametrize("durability", ["process", pytest.param("disk", marks=FULL)])
def test_kill_at_each_system_call(
    name: str,
    durability: str,
    first: First,
    request: pytest.FixtureRequest,
    server: ForkServer,
) -> None:
    store: memstore.Store = request.getfixturevalue("store" if durability == "process" else "disk_store")
    operation = OPERATIONS[name]
    outcomes: list[str] = []
    returns = ended = 0
    while ended < 4:  # LMDB makes a few calls more or less, depending on which pages are free
        returns += 1
        what = f"{name}, killed at return {returns} from the kernel, then {first.__name__}"
        operation.reset(store)
        if not _killed_at_return(server, store.root, name, returns):
            ended += 1
            continue
        first(store, server)
        seen = operation.outcome(store)
        store.put("other", stamped(7, SMALL))
        outcomes.append(operation.outcome(store))
        # Where the kill fell into LMDB's commit, readers see it when the next writer has been. Never the other way.
        assert seen == outcomes[-1] or (seen, first) == ("old", FIRST[0]), f"{what}: {seen}, then {outcomes[-1]}"
        check_goes_on(store, min(operation.keys), what)
    assert set(outcomes) == ({"old", "new"} if operation.changes else {"new"}), outcomes


def _killed_at_return(server: ForkServer, path: str, name: str, returns: int) -> bool:
    with server.start(workers.perform, path, name) as worker:
        worker.recv()  # it is ready, and waits for a word
        try:
            tracer = Tracer(worker.pid)
        except PermissionError as error:
            pytest.skip(f"no tracing on this machine: {error}")
        worker.send("go")
        killed = tracer.run(returns)
        assert worker.wait() == (KILLED if killed else 0)
        return killed
