"""The program of an index process, which an agent forks (`child.py`).

It answers for its host, and does what its host owes the others. All that must outlive it is in the catalog. It ends
when it is told to, by SIGTERM or `Halt`, and when it can't go on: it says why, and its agent starts another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from memstore._threads import between_forks
from memstore._version import __version__
from memstore.distributed.actors import FoundActor, start_actor, start_monarch
from memstore.distributed.links import INDEX, Hello, Links, Listener, Traffic, secret_of
from memstore.distributed.rules import Index, Member, Standing
from memstore.distributed.serving import membership
from memstore.distributed.serving.agent_lock import note_end
from memstore.distributed.serving.answering import Answers
from memstore.distributed.serving.cluster_file import remove_cluster_file, write_cluster_file
from memstore.distributed.serving.connections import Connections
from memstore.distributed.serving.driving import Driver
from memstore.distributed.serving.duties import Duties
from memstore.distributed.serving.ending import Ended, Ending
from memstore.distributed.serving.former import note_owner, remove_former_lives
from memstore.distributed.serving.lines import log_by_lines, say
from memstore.distributed.serving.news import Kind, News, tell
from memstore.distributed.serving.notices import Notices
from memstore.distributed.serving.options import Start
from memstore.distributed.serving.pulse import Pulse
from memstore.distributed.serving.reporting import Beside, Reporter, standing_of
from memstore.distributed.serving.signals import OF_AGENTS
from memstore.distributed.serving.transports import needs_monarch, transport_of
from memstore.distributed.serving.waiting import Waits
from memstore.engine import Creation, Root, boot_clock, close_root, need_cluster, open_root, sweep_if_due, syscalls
from memstore.errors import MemstoreError, NotAStoreError, NotServedError, StoreFullError, StoreTimeoutError

if TYPE_CHECKING:
    from memstore.distributed.rdma import Plane
    from memstore.distributed.transfers import Senders

_OPEN_WITHIN = 30.0  # seconds
_LOOK_EVERY = 1.0  # seconds: is the root still there?
_SWEEP_WITHIN = 1.0  # seconds
_FAILED = 1  # exit code: the agent starts another one

log = logging.getLogger("memstore")


class IndexProcess:
    """All of its parts, put together."""

    def __init__(self, root: Root, start: Start, ending: Ending, pulse: Pulse) -> None:
        options = start.options
        self._root, self._news, self._ending, self._pulse = root, start.news, ending, pulse
        self._place = membership.place_of(root, options)
        member, secret = self._place.member, secret_of(root.state)
        storage = "" if root.settings.shared is None else root.settings.shared.store
        hello = Hello(__version__, start.torch, start.monarch, start.incarnation, os.getpid(), member.name, storage)
        self._index = Index(member, self._place.seed, boot_clock)
        self._waits = Waits(root, self._index, ending)
        self._traffic = Traffic()
        self._links = Links(secret=secret, kind=INDEX, hello=hello, traffic=self._traffic)
        connections = Connections()
        self._driver = Driver(root, self._links, ending, self._waits.look_again)
        self._duties = Duties(self._index, self._driver, ending, self._has_asked, connections.sessions)
        self._senders: Senders | None = None
        self._plane: Plane | None = None
        self._transport = options.transport
        self._hello, self._has_actor = hello, options.monarch
        self._actor = FoundActor(b"", "it is started" if options.monarch else "this host is served without --monarch")
        self._answers = Answers(
            root,
            self._index,
            self._waits,
            ending,
            report=Reporter(root, self._index, hello, self._traffic, self._beside).report,
            actor=lambda: self._actor,
            owes=self._duties.owed.set,
            connections=connections,
        )
        self._listener = Listener(
            member.address,
            secret=secret,
            member=member.id,
            hello=hello,
            serve=self._answers.take,
            stream=self._send,
            ended=connections.end,
            insecure=options.insecure,
            traffic=self._traffic,
        )
        self._told: tuple[int, bool, bool, int] | None = None  # what ROOT/cluster says
        self._notices = Notices(member, hello)

    def run(self) -> None:
        """Until `ending`."""
        self._listener.start()
        self._pulse.follow(self._listener)
        self._waits.start()
        try:
            if standing_of(self._root) is None:
                self._driver.ended_by = self._place.seed
            membership.begin(self._root, self._place, self._driver)
            self._duties.start()
            self._open_senders()
            self._open_actor()
            self._open_plane()
            while not self._ending.wait(_LOOK_EVERY):
                self._root.check_in_place()
                self._sweep()
        except Ended:
            pass
        finally:
            self._ending.end()
            if self._ending.reason is None:
                note_end(self._root.path)
            self._listener.close()
            if self._senders is not None:
                self._senders.close()
            self._close_plane()
            self._links.close()
        if self._ending.reason is None:
            remove_cluster_file(self._root)

    def _sweep(self) -> None:
        """On storage that hosts share, what is in its grace time is removed though nobody puts."""
        try:
            sweep_if_due(self._root, time.monotonic() + _SWEEP_WITHIN)
        except (OSError, MemstoreError) as error:
            log.info("%s: nothing swept: %s", self._root.path, str(error))

    def _open_senders(self) -> None:
        """Late: it imports numpy, and lookups need not wait for that after a kill."""
        with between_forks():
            from memstore.distributed.transfers import Senders, announce

        announce(self._root, "tcp")  # one that was killed may have said otherwise
        self._senders = Senders(self._root, traffic=self._traffic)

    def _open_actor(self) -> None:
        """If it is wanted. Late: Monarch takes seconds to import. Without it all else goes on."""
        if not self._has_actor:
            return
        member = self._place.member
        try:
            reference = start_actor(member.id, member.address, self._hello, self._answers.take, self._lose_actor)
        except Exception as error:  # Monarch's are of many classes
            log.warning("%s at %s has no index actor: %s", member.name, member.address, str(error))
            self._actor = FoundActor(b"", str(error)[:4096])
        else:
            self._actor = FoundActor(reference)
        _heed_signals(self._ending)  # Monarch has handlers of its own

    def _open_plane(self) -> None:
        """If it is wanted. Late, as the actor: until then, and without it, all goes over TCP."""
        member, senders = self._place.member, self._senders
        if senders is None or self._root.storage.sees_all_hosts:
            return
        if not needs_monarch(self._transport, has_monarch=self._has_actor):
            return
        try:
            start_monarch(member.address, self._hello.monarch, self._lose_monarch)
            with between_forks():
                from memstore.distributed.rdma import has_ibverbs, open_plane
                from memstore.distributed.transfers import announce

            transport = transport_of(self._transport, has_ibverbs=has_ibverbs())
            if transport != "tcp":
                plane = open_plane(self._root, self._links, self._member, transport, self._hello.monarch)
                self._plane = senders.plane = plane
                announce(self._root, transport)
        except Exception as error:  # Monarch's are of many classes
            log.warning("%s at %s sends bytes over TCP: %s", member.name, member.address, str(error))
        _heed_signals(self._ending)

    def _close_plane(self) -> None:
        if self._plane is None:
            return
        with between_forks():
            from memstore.distributed.transfers import announce

        with contextlib.suppress(OSError):  # the root may be gone
            announce(self._root, "tcp")
        self._plane.close()

    def _member(self, id: bytes) -> Member | None:
        standing = standing_of(self._root)
        return None if standing is None else standing.view.member(id)

    def _beside(self) -> Beside:
        plane = self._plane
        return Beside() if plane is None else Beside(plane.transport, plane.moved())

    def _lose_monarch(self, why: str) -> None:
        self._ending.fail(Kind.REFUSED, f"Monarch ended: {why}")

    def _lose_actor(self, why: str) -> None:
        self._ending.fail(Kind.REFUSED, f"the index actor ended: {why}")

    def _send(self, stream: socket.socket) -> None:
        if self._senders is None:
            stream.close()  # who wants bytes tries again
        else:
            self._senders.serve(stream)

    def _has_asked(self) -> int:
        """After each question to the seed: tells people, and the agent, what has come of it. Returns the epoch."""
        standing = standing_of(self._root)
        is_member = standing is not None
        hello = self._links.hello_of(self._place.seed)
        refusal = membership.refusal_of(self._root, self._place, self._index, self._driver, hello, is_member=is_member)
        if refusal is not None:
            kind = Kind.LOST if is_member else Kind.REFUSED
            self._ending.fail(kind, str(refusal))
        elif standing is None:
            self._say(self._notices.of_waiting(self._place.seed, self._index.heard))
        else:
            self._driver.ended_by = ""
            state = (standing.view.epoch, standing.is_joining, standing.is_removed, len(standing.missing))
            if state != self._told:
                self._say(self._notices.of_standing(standing))
                write_cluster_file(self._root, self._place.member, standing)
                if self._told is None:
                    tell(self._news, News(Kind.READY))
                    self._clear_former_lives(standing)
                self._told = state
            seed = self._place.seed
            self._say(self._notices.of_hello(seed, self._links.hello_of(seed)))
        return 0 if standing is None else standing.view.epoch

    def _clear_former_lives(self, standing: Standing) -> None:
        """On storage that hosts share: what this host has left there before it lost its state folder."""
        if self._root.settings.shared is None:
            return
        member = self._place.member
        try:
            note_owner(self._root, member)
            for former in remove_former_lives(self._root, member, standing.view):
                say(f"removed what the host {former} has left on the storage, which was served at this address")
        except OSError as error:
            log.warning("%s: what former hosts at %s have left stays: %s", self._root.path, member.address, str(error))

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            say(line)


def main(start: Start) -> None:
    """Until the end of the process. Call it in its main thread, with `OF_AGENTS` blocked."""
    if not syscalls.die_with_parent(start.agent):
        os._exit(_FAILED)  # the agent is dead already: nobody would be told
    log_by_lines()
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
    os._exit(0 if news is None or news.kind is Kind.REMOVED else _FAILED)  # its threads may be anywhere


def _serve(start: Start, ending: Ending, pulse: Pulse) -> News | None:
    """None: it was told to end."""
    try:
        use = open_root(start.options.root, "r+", Creation(), _OPEN_WITHIN)
        try:
            need_cluster(use.root, time.monotonic() + _OPEN_WITHIN)
            IndexProcess(use.root, start, ending, pulse).run()
        finally:
            close_root(use)
    except (StoreTimeoutError, StoreFullError) as error:  # another start may do better
        return News(Kind.REFUSED, str(error))
    except NotAStoreError as error:
        return News(Kind.LOST, str(error))
    except (NotServedError, MemstoreError, OSError, ValueError) as error:
        return News(Kind.REFUSED, str(error))
    return None if ending.reason is None else News(*ending.reason)


def _heed_signals(ending: Ending) -> None:
    for number in OF_AGENTS:
        signal.signal(number, signal.SIG_IGN)  # the agent passes on what they mean
    signal.signal(signal.SIGTERM, lambda number, frame: ending.end())
