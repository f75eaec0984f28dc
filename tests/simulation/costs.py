"""Costs of a message, a transaction and a row of the directory: CPU seconds of the real code on this machine."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from memstore.distributed.catalog import look, run
from memstore.distributed.rules import Member, Roster, Standing, directory
from memstore.distributed.rules.messages import (
    PORTION,
    ROWS_LIMIT,
    ClaimGroups,
    IsRoster,
    Meet,
    Mirror,
)
from memstore.distributed.rules.nouns import (
    TERM_BITS,
)
from memstore.distributed.serving.questions import Asking, encode
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from tests.distributed.serving.agents import Caller, agents_in
from tests.engine.bytes_store import opened

CLUSTER = b"C" * 16
_MESSAGES = 1000
_TIMES = 15


class Costs(msgspec.Struct, frozen=True):
    """CPU seconds.

    Attributes:
        read: of an index process, for a request that it only reads for, its answer included, in a cluster of one.
        change: the same for a request that takes a transaction.
        look, write: what each transaction costs more with a roster of so many hosts; what writing such a roster costs.
        decode: a byte of a message.
    """

    hosts: int
    read: float
    change: float
    look: float
    write: float
    decode: float


class Ends(msgspec.Struct, frozen=True):
    """What the real index process takes for a message: see `Costs`."""

    read: float
    change: float


def members(count: int) -> tuple[Member, ...]:
    return tuple(Member(b"%016d" % number, address_of(number), address_of(number)) for number in range(count))


def address_of(number: int) -> str:
    return f"tcp://10.0.{number // 256}.{number % 256}:7400"


def roster_of(count: int) -> Roster:
    all_members = members(count)
    ids = tuple(member.id for member in all_members)
    return Roster(CLUSTER, 1, 1, all_members, ids[0], deputies=ids[1:3], voters=ids)


def measure_ends() -> Ends:
    """Asks a real index process, whose kernel says how long it took."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.TemporaryDirectory() as logs:
        os.environ["MEMSTORE_SECRET_FILE"] = f"{logs}/secret"
        with agents_in(Path(folder), Path(logs)) as agents, Caller(agents.secret) as caller:
            agent = agents.serve("a")
            pid = agent.index_process()
            here = members(1)[0]

            def each(request: Asking) -> float:
                for _ in range(_MESSAGES // 4):
                    caller.call(agent, request)
                began = _seconds_of(pid)
                for _ in range(_MESSAGES):
                    caller.call(agent, request)
                return (_seconds_of(pid) - began) / _MESSAGES

            return Ends(each(Meet(here, None)), each(ClaimGroups((b"g",), None)))


def _seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int, ends: Ends) -> Costs:
    """Measures what grows with the number of hosts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(f"{folder}/a") as root:
        few, many = (_transactions(root, number) for number in (1, count))
    said = msgspec.msgpack.encode(IsRoster(roster_of(count)))
    decode = _least(lambda: msgspec.msgpack.decode(said, type=IsRoster)) / len(said)
    return Costs(count, ends.read, ends.change, max(0.0, many[0] - few[0]), max(0.0, many[1] - few[1]), decode)


def _transactions(root: Root, count: int) -> tuple[float, float]:
    """Returns what a look at a roster of so many members takes, and what writing it does."""
    standing = Standing(root.member_id(), roster_of(count), 1 << TERM_BITS, 1)

    def put() -> None:
        run(root, lambda tables: tables.put_standing(standing), deadline_after(10))

    write = _least(put)
    return _least(lambda: look(root, lambda tables: tables.standing(), deadline_after(10))), write


def _least(action: Callable[[], object]) -> float:
    """Returns the CPU seconds of this thread for it, at least: what others do on the machine adds to some of them."""
    action()
    taken: list[float] = []
    for _ in range(_TIMES):
        began = time.thread_time()
        action()
        taken.append(time.thread_time() - began)
    return min(taken)


class Rows(msgspec.Struct, frozen=True):
    """A directory, of which the last groups were measured. Seconds are CPU seconds of one thread.

    Attributes:
        groups: how many are in it.
        claim: to write the row of a group that is claimed alone.
        claim_many: the same of one of PORTION groups.
        scan: to look at a row, as after the removal of a host.
        mirror: to take in a row, as a deputy.
        nbytes: of the catalog.
    """

    groups: int
    claim: float
    claim_many: float
    scan: float
    mirror: float
    nbytes: float


def measure_rows(groups: int) -> Rows:
    """Fills the directory of a real catalog, and reads it as rules do."""
    roster = roster_of(3)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, opened(f"{folder}/a") as root:
        member = root.member_id()
        standing = Standing(member, roster, 1 << TERM_BITS, 1)
        run(root, lambda tables: tables.put_standing(standing), deadline_after(10))
        at = iter(range(groups))

        def claim(count: int) -> float:
            names = [b"batch-%07d" % number for number in itertools.islice(at, count)]
            began = time.thread_time()
            run(
                root,
                lambda tables: [directory.give(tables, roster, name, roster.seed) for name in names],
                deadline_after(60),
            )
            return (time.thread_time() - began) / len(names)

        before = _bytes_of(root)
        many = 0.0
        for _ in range((groups - 100) // PORTION):
            many = claim(PORTION)
        one = min(claim(1) for _ in range(50))
        nbytes = _bytes_of(root) - before
        after, rows, seen, began = 0, (), 0, time.thread_time()
        while page := look(root, lambda tables, start=after: tables.ownerships(start, ROWS_LIMIT), deadline_after(10)):
            after, rows, seen = page[-1].grant.number, tuple(page), seen + len(page)
        scan = (time.thread_time() - began) / seen
        mirror = Mirror(1, 0, after, tuple(msgspec.structs.replace(row, owner=b"%016d" % 1) for row in rows))
        began = time.thread_time()
        run(root, lambda tables: directory.take_mirror(tables, standing, mirror), deadline_after(10))
        encode(mirror)
        return Rows(groups, one, many, scan, (time.thread_time() - began) / len(rows), nbytes / seen)


def _bytes_of(root: Root) -> int:
    environment = root.catalog._environment  # pyright: ignore[reportPrivateUsage]
    return environment.opened().info()["last_pgno"] * environment.page_size
