"""The program of an index process, which an agent forks.

It answers for its host, and does what its host owes the others. All that must outlive it is in the catalog. It ends
when it is told to, by SIGTERM or `Halt`, and when it can't go on: it says why, and its agent starts another one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from memstore._threads import between_forks
from memstore._version import __version__
from memstore.distributed.catalog import CatalogTables, entry_of, look, record_of, run
from memstore.distributed.links import INDEX, Address, Hello, Links, Listener, Traffic, parse_address, secret_of
from memstore.distributed.rules import (
    ROWS_LIMIT,
    Answer,
    Commit,
    Done,
    Entry,
    Failed,
    HostLease,
    Index,
    Later,
    Member,
    NotPromoted,
    Policy,
    Refused,
    Replicate,
    Replicated,
    Settle,
    Standing,
    Steps,
    failed_of,
    replace_places,
)
from memstore.distributed.serving.cluster import LOST_NAMED, policy_of
from memstore.distributed.serving.duties import Driver, Duties, Ending, ProcessEnded
from memstore.distributed.serving.membership import Membership, name_of, own_member, read_left_of, remove_cluster_file
from memstore.distributed.serving.questions import Leaving, Promote, Reported, standing_of
from memstore.distributed.serving.requests import Answers, Connections, KeyWaits, SeedWaits
from memstore.distributed.serving.returns import PutAnew, RootSetAside, set_aside_before
from memstore.distributed.serving.supervision import (
    OF_AGENTS,
    Kind,
    News,
    Options,
    Pulse,
    Start,
    log_by_lines,
    need_monarch,
    note_end,
    say,
    tell,
)
from memstore.engine import (
    Creation,
    Record,
    Root,
    SealedSegment,
    boot_clock,
    close_root,
    deltas_here,
    need_cluster,
    open_root,
    sweep_if_due,
    syscalls,
    tables,
)
from memstore.errors import (
    HomeUnavailableError,
    MemstoreError,
    NotAStoreError,
    NotServedError,
    StoreFullError,
    StoreTimeoutError,
)

if TYPE_CHECKING:
    from memstore.distributed.transfers import Senders, Transfers
    from memstore.distributed.transfers.rdma import RdmaPlane

SHARED = "shared"  # the transport of who reads files in place of streams
_OPEN_WITHIN = 30.0  # seconds
_SWITCH = 0.0005  # seconds: with 5 ms, threads that look through all keys hold up one that has the store's mutex
_LOOK_EVERY = 1.0  # seconds: is the root still there?
_TAKE_WITHIN = 600.0  # seconds, to copy one value
_SWEEP_WITHIN = 1.0  # seconds
_FAILED = 1  # exit code: the agent starts another one
# A host that is cut off for a minute must not end, by Monarch's defaults, who has a message for it.
_OF_MONARCH = {"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1h", "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "1h"}

log = logging.getLogger("memstore")


def _policy_of(options: Options) -> Policy | None:
    """Returns what this host is to state of the store's replicas; None: nothing."""
    if not options.replicas:
        return None
    replicas = options.replicas if options.replicas == "async" else int(options.replicas)
    return policy_of("", replicas, options.on_missing)[0]


class CountedSeldom:
    """A number that is counted in a long table, for who looks often: counting takes a twentieth of the time at most.

    Args:
        count: counts it.
        clock: seconds, monotonic.
    """

    def __init__(self, count: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._found, self._due = 0, 0.0

    def value(self) -> int:
        began = self._clock()
        if began >= self._due:
            self._found = self._count()
            now = self._clock()
            self._due = now + 19 * (now - began)
        return self._found


class IndexProcess:
    """All of its parts, put together."""

    def __init__(self, root: Root, start: Start, ending: Ending, pulse: Pulse) -> None:
        options = start.options
        self._root, self._options, self._ending, self._pulse = root, options, ending, pulse
        self._member = member = own_member(root, options)
        secret = secret_of(root.state)
        storage = "" if root.settings.shared is None else root.settings.shared.store
        hello = Hello(__version__, start.torch, start.monarch, start.incarnation, os.getpid(), member.name, storage)
        self._hello, self._traffic = hello, Traffic()
        self._copies = CountedSeldom(self._count_copies)
        self._index = Index(
            member,
            options.join,
            boot_clock,
            cluster=os.urandom(16),
            is_new=options.is_new,
            moved=options.moved,
            promote_after=int(options.promote_after * 1e9),
            remove_after=int(options.remove_after * 1e9),
            host_lease=HostLease(boot_clock, root.host_lease, is_exempt=root.settings.durable),
            left=partial(read_left_of, root) if root.storage.sees_all_hosts else None,
        )
        self._links = Links(secret=secret, kind=INDEX, hello=hello, traffic=self._traffic)
        self._waits = KeyWaits(root, self._index, ending)
        self._driver = Driver(root, self._links, ending, self._has_transacted)
        self._membership = Membership(
            *(root, options, member, self._index, self._driver, self._links, ending),
            hello=hello,
            news=start.news,
            clear=lambda former, cleared: self._duties.clear(former, cleared),
        )
        connections = Connections()
        self._duties = Duties(
            root,
            self._index,
            self._driver,
            ending,
            has_changed=self._membership.has_changed,
            has_asked=self._membership.has_asked,
            connected=connections.sessions,
            mirrored=lambda: self._at_seed.look_at_once(),
            noted=lambda: self._at_seed.look_at_once(),
            take=self._take,
            fetch=partial(self._fetch, copied=None),
            policy=_policy_of(options),
            promote_after=options.promote_after,
        )
        self._at_seed = SeedWaits(
            root, self._index, ending, is_asked=self._duties.mirror_soon, changed=self._duties.look_again
        )
        answers = Answers(
            root,
            self._index,
            ending,
            waits=self._waits,
            at_seed=self._at_seed,
            duties=self._duties,
            report=self._report,
            promote=self._promote,
            copy=self._answer_by_copies,
            connections=connections,
        )
        self._listener = Listener(
            member.address,
            secret=secret,
            member=member.id,
            hello=hello,
            serve=answers.take,
            stream=self._send,
            ended=connections.end,
            insecure=options.insecure,
            traffic=self._traffic,
        )
        self._senders: Senders | None = None
        self._transfers: Transfers | None = None
        self._making = threading.Lock()
        self._plane: RdmaPlane | None = None
        self._formers: list[RootSetAside] = []

    def run(self) -> None:
        """Runs until `ending`."""
        self._listener.start()
        self._pulse.follow(self._listener)
        self._waits.start()
        self._at_seed.start()
        try:
            self._duties.start()
            threading.Thread(target=self._membership.compare_clusters, name="named", daemon=True).start()
            self._open_senders()
            self._bring_back()
            self._open_plane()
            while not self._ending.wait(_LOOK_EVERY):
                self._root.check_in_place()
                self._sweep()
        except ProcessEnded:
            pass
        finally:
            self._ending.end()
            if self._ending.reason is None:
                note_end(self._root.path)
            self._listener.close()
            if self._senders is not None:
                self._senders.close()
            self._close_plane()
            if self._transfers is not None:
                self._transfers.close()
            self._links.close()
        if self._ending.reason is None:
            remove_cluster_file(self._root)

    def _has_transacted(self) -> None:
        """Looks again at what a step of the rules may have changed."""
        self._waits.look_again()
        self._at_seed.look_again()
        self._duties.look_again()

    def _promote(self, request: Promote) -> Answer:
        try:
            self._driver.run(self._index.promote(forced=request.force))
        except NotPromoted as why:
            return Refused(str(why))
        except (ProcessEnded, MemstoreError, OSError) as error:
            return Refused(f"it could not be done: {error}")
        return Done()

    def _report(self) -> Reported:
        standing, moved = standing_of(self._root), self._traffic.moved()
        plane = None if self._plane is None else self._plane.moved()
        keys, live, spilled = self._root.catalog.view(
            lambda transaction: (
                transaction.count("entries"),
                transaction.counters().live,
                sum(tables.spilled_segments(transaction).values()),
            )
        )
        transport = "tcp" if self._plane is None else self._plane.transport
        return Reported(
            name=self._member.name,
            epoch=0 if standing is None else standing.roster.epoch,
            is_settled=standing is not None and not standing.is_joining and not standing.unheard,
            incarnation=self._hello.incarnation,
            pid=os.getpid(),
            keys=keys,
            live_bytes=live,
            transport=transport if self._root.settings.shared is None else SHARED,
            sent=moved.sent + (plane.sent if plane else 0),
            received=moved.received + (plane.received if plane else 0),
            memstore=self._hello.memstore,
            torch=self._hello.torch,
            monarch=self._hello.monarch,
            leaving=None if standing is None or not standing.roster.is_leaver(self._member.id) else self._leaving(),
            lost=self._lost(),
            recovering="" if standing is None else self._recovering(standing),
            lacking=look(self._root, CatalogTables.count_lacking, time.monotonic() + _OPEN_WITHIN),
            spilled_bytes=spilled,
        )

    def _lost(self) -> tuple[tuple[str, str], ...]:
        found = look(self._root, lambda tables: tables.all_lost(LOST_NAMED), time.monotonic() + _OPEN_WITHIN)
        return tuple((name.decode(errors="replace"), who) for name, who in found)

    def _recovering(self, standing: Standing) -> str:
        pairs = zip(self._formers, self._index.returns, strict=False)
        back = [f"{former.who} comes back: {one.said()}" for former, one in pairs if one.left or not one.is_over]
        if back:
            return "; ".join(back)
        own = [one.member.label for one in standing.roster.departed if one.heir == self._member.id]
        silent = ", ".join(member.label for member in self._index.recovery.silent)
        waits = f"; it waits for {silent}" if silent else ""
        return f"{name_of(self._member)} recovers what {' and '.join(own)} owned{waits}" if own else ""

    def _leaving(self) -> Leaving:
        groups, live, spilled = self._root.catalog.view(
            lambda transaction: (
                transaction.count("owned"),
                transaction.counters().live,
                sum(tables.spilled_segments(transaction).values()),
            )
        )
        trouble, live = self._index.leaver.trouble, max(live - self._copies.value(), 0) + spilled
        if trouble is None:
            return Leaving(groups, live)
        failed, at = trouble.failed, "" if trouble.at is None else trouble.at.address
        key = (failed.key or b"").decode(errors="replace")
        return Leaving(groups, live, failed.error, failed.text, key, at)

    def _count_copies(self) -> int:
        """Returns the bytes of copies of other hosts' values."""
        nbytes, after, deadline = 0, b"", time.monotonic() + _OPEN_WITHIN
        while page := look(self._root, lambda tables, start=after: tables.copies(start, ROWS_LIMIT), deadline):
            nbytes += sum(copy.record.size for _, copy in page)
            after = page[-1][0]
        return nbytes

    def _sweep(self) -> None:
        """Removes, on storage that hosts share, what is in its grace time, though nobody puts."""
        try:
            sweep_if_due(self._root, time.monotonic() + _SWEEP_WITHIN)
        except (OSError, MemstoreError) as error:
            log.info("%s: nothing swept: %s", self._root.path, str(error))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _take(self, key: bytes, entry: Entry, leaver: bytes) -> Steps[bool | Failed]:
        """Copies the bytes of an entry that lie on a host that leaves to this one: see `rules.Take`."""
        with between_forks():  # late: it imports numpy
            from memstore.distributed.transfers import GoneError

        deadline = time.monotonic() + _TAKE_WITHIN

        def publish(record: Record, sealed: Sequence[SealedSegment]) -> None:
            after = entry_of(record, self._member.id)

            def replace(tables: CatalogTables) -> bool:
                is_done = replace_places(tables, key, entry, after)
                if is_done:
                    tables.delete_copy(key)  # of what is here now
                return is_done

            if not run(self._root, replace, deadline, sealed=sealed):
                raise GoneError  # the record is another one by now

        try:
            self._all_transfers().take(key, record_of(entry, self._member.id), leaver, publish, deadline)
        except (GoneError, HomeUnavailableError, StoreTimeoutError):
            return False
        except (MemstoreError, OSError) as error:
            return msgspec.structs.replace(failed_of(error), key=key)
        return True
        yield  # steps, as the rules want it, and none of them

    def _bring_back(self) -> None:
        """Begins to bring back what roots have that were set aside."""
        for path in set_aside_before(self._root.path):
            try:
                former = RootSetAside(path, self._member)
            except (MemstoreError, OSError) as error:
                say(f"{path} was set aside, and can't be opened to bring back what it has: {error}")
                continue
            self._formers.append(former)
            self._index.bring_back(former, PutAnew(self._root, self._links))
        if self._formers:
            self._duties.bring_back(self._end_returns)

    def _end_returns(self) -> None:
        for former, one in zip(self._formers, self._index.returns, strict=True):
            path = former.end()
            say(f"{former.who} has come back: {one.said()}" + (f"; what is left is in {path}" if path else ""))

    def _answer_by_copies(self, request: Replicate | Commit) -> Answer | None:
        """Answers what takes copies of other hosts' bytes. None: there is no answer, and who asked asks again."""
        copied: list[int] = []
        fetch = partial(self._fetch, copied=copied)
        try:
            if isinstance(request, Replicate):
                answer = self._driver.run(self._index.replicate(request, fetch))
            else:
                answer = self._driver.run(self._index.commit_copied(request, fetch))
                if self._index.is_fenced:
                    return None
                self._duties.note_soon()
        except (ProcessEnded, StoreTimeoutError):
            return None
        except (MemstoreError, OSError) as error:
            log.warning("%s: %s: %s", self._root.path, type(request).__name__, str(error))
            return Later()
        self._duties.pay_soon()
        return msgspec.structs.replace(answer, nbytes=sum(copied)) if isinstance(answer, Replicated) else answer

    def _fetch(
        self, entries: Sequence[tuple[bytes, Entry]], settle: Settle, *, copied: list[int] | None
    ) -> Steps[bool | Failed]:
        """Copies what entries name on other hosts to this one: see `rules.Fetch`."""
        with between_forks():  # late: it imports numpy
            from memstore.distributed.transfers import GoneError

        member, deadline = self._member.id, time.monotonic() + _TAKE_WITHIN
        keys, versions = [key for key, _ in entries], [entry.version for _, entry in entries]

        def publish(records: Sequence[Record], sealed: Sequence[SealedSegment]) -> None:
            copies = [
                msgspec.structs.replace(entry_of(record, member), version=version)
                for record, version in zip(records, versions, strict=True)
            ]
            if not self._driver.run(settle(copies), sealed=sealed):
                raise GoneError  # another version is there by now
            if copied is not None:
                copied.extend(record.nbytes for record in records)

        try:
            values = [(key, record_of(entry, member)) for key, entry in entries]
            self._all_transfers().take_all(values, publish, deadline)
        except (GoneError, HomeUnavailableError, StoreTimeoutError):
            return False
        except (MemstoreError, OSError) as error:
            return msgspec.structs.replace(failed_of(error), key=keys[0])
        return True
        yield  # steps, as the rules want it, and none of them

    def _all_transfers(self) -> Transfers:
        """Returns what copies bytes of other hosts. The first call makes it, for all threads."""
        with between_forks():
            from memstore.distributed.transfers import Transfers

        with self._making:
            if self._transfers is None:
                self._transfers = Transfers(self._root, self._links, self._member_of)
            return self._transfers

    def _send(self, stream: socket.socket) -> None:
        if self._senders is None:
            stream.close()  # who wants bytes tries again
        else:
            self._senders.serve(stream)

    def _open_senders(self) -> None:
        """Opens what sends bytes. Late: it imports numpy, and lookups need not wait for that after a kill."""
        with between_forks():
            from memstore.distributed.transfers import Senders, announce

        announce(self._root, "tcp")  # one that was killed may have said otherwise
        self._senders = Senders(self._root, traffic=self._traffic)

    def _open_plane(self) -> None:
        """Opens Monarch's way for bytes, if it is wanted. Until then, and without it, all goes over TCP."""
        member, senders, transport = self._member, self._senders, self._options.transport
        if senders is None or self._root.storage.sees_all_hosts or transport not in ("rdma", "monarch"):
            return
        try:
            need_monarch(self._hello.monarch)
            _start_monarch(member.address, self._lose_monarch)
            with between_forks():
                from memstore.distributed.transfers import announce
                from memstore.distributed.transfers.rdma import open_plane

            plane = open_plane(self._root, self._links, self._member_of, transport, self._hello.monarch)
            self._plane = senders.plane = plane
            announce(self._root, transport)
        except Exception as error:  # Monarch's are of many classes
            log.warning("%s at %s sends bytes over TCP: %s", member.name, member.address, str(error))
        _heed_signals(self._ending)  # Monarch has handlers of its own

    def _close_plane(self) -> None:
        if self._plane is None:
            return
        with between_forks():
            from memstore.distributed.transfers import announce

        with contextlib.suppress(OSError):  # the root may be gone
            announce(self._root, "tcp")
        self._plane.close()

    def _member_of(self, id: bytes) -> Member | None:
        standing = standing_of(self._root)
        return None if standing is None else standing.roster.member(id)

    def _lose_monarch(self, why: str) -> None:
        self._ending.fail(Kind.REFUSED, f"Monarch ended: {why}")


def _start_monarch(address: str, failed: Callable[[str], None]) -> None:
    """Starts Monarch in this process, which takes seconds. It listens to whoever can connect.

    Args:
        address: of this process's listener; Monarch listens at the same IP, at a port of its own.
        failed: told once Monarch can't go on.

    Raises RuntimeError, and what else Monarch raises.
    """
    for name, value in _OF_MONARCH.items():
        os.environ.setdefault(name, value)
    with between_forks():
        monarch: Any = importlib.import_module("monarch.actor")

    def fail(failure: Any) -> None:
        failed(str(failure.report()))

    place = parse_address(address)
    monarch.enable_transport(str(Address(place.ip, 0, place.scope)))
    monarch.unhandled_fault_hook = fail
    monarch.this_proc()


def main(start: Start) -> None:
    """Runs until the end of the process. Call it in its main thread, with `OF_AGENTS` blocked."""
    if not syscalls.die_with_parent(start.agent):
        os._exit(_FAILED)  # the agent is dead already: nobody would be told
    log_by_lines()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # shells allow 1,024: a client each
    sys.setswitchinterval(_SWITCH)
    gc.freeze()  # what was imported stays
    gc.set_threshold(20_000, 20, 20)  # with 700, a recovery of many keys takes a quarter longer
    ending = Ending()
    _heed_signals(ending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_AGENTS)
    pulse = Pulse(start.news, start.pulse)
    pulse.start()
    news = _serve(start, ending, pulse)
    pulse.close()
    if news is not None:
        tell(start.news, news)
    sys.stderr.flush()
    os._exit(0 if news is None or news.kind is Kind.REMOVE else _FAILED)  # its threads may be anywhere


def _serve(start: Start, ending: Ending, pulse: Pulse) -> News | None:
    """Serves. Returns why it ends, or None if it was told to."""
    try:
        use = open_root(start.options.root, "r+", Creation(), _OPEN_WITHIN)
        try:
            _let_others_in(use.root, time.monotonic() + _OPEN_WITHIN)
            IndexProcess(use.root, start, ending, pulse).run()
        finally:
            close_root(use)
    except (StoreTimeoutError, StoreFullError) as error:  # another start may do better
        return News(Kind.REFUSED, str(error))
    except NotAStoreError as error:
        return News(Kind.LOST, str(error))
    except (NotServedError, MemstoreError, OSError, ValueError) as error:
        return News(Kind.REFUSED, str(error))
    if ending.reason is not None:
        return News(*ending.reason)
    return News(Kind.REMOVE, "it was drained" if ending.is_drained else "") if ending.removes else None


def _let_others_in(root: Root, deadline: float) -> None:
    """Lets a store be served, and puts whole before that what shares files. Raises NotServedError, MemstoreError."""
    if deltas_here(root):
        contents: Any = importlib.import_module("memstore.contents")  # it imports torch, which no other start needs
        contents.put_deltas_whole(root, deadline)
    need_cluster(root, deadline)


def _heed_signals(ending: Ending) -> None:
    for number in OF_AGENTS:
        signal.signal(number, signal.SIG_IGN)  # the agent passes on what they mean
    signal.signal(signal.SIGTERM, lambda number, frame: ending.end())
