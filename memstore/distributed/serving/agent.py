"""The agent of a host: a plain process that serves a root by an index process, which it starts again when it ends.

1. The agent checks what can be checked beforehand, opens the root, or creates it, and takes ROOT/agent.lock.
2. It forks the index process, which inherits that lock, and is killed by the kernel when the agent ends.
3. When the index process ends otherwise than it was told to, the agent starts it again: at once, and later and later
   if it keeps ending. One that hangs it kills first.
4. SIGTERM, SIGINT, or SIGHUP unless that is ignored (nohup): it passes that on, waits, notes a clean end, and ends.

A kill of the agent leaves nothing but the lock's line, and a kill of the index process what its transactions make of
it: nothing. An agent has one thread, imports neither numpy nor torch nor monarch, and opens no catalog while it serves:
so it can be forked. A fresh interpreter would import for a third of a second what the agent has already, and other
hosts wait for the index process after a kill.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import msgspec

from memstore._threads import between_forks
from memstore.distributed.links import Hello, hello_of_this_process, parse_own_address, secret_of
from memstore.distributed.serving.cluster import policy_of
from memstore.distributed.serving.returns import members_before, set_aside, was_removed
from memstore.distributed.serving.supervision import (
    HANG_AFTER,
    OF_AGENTS,
    SHORTEST_HANG,
    AgentLock,
    Kind,
    Lines,
    News,
    Note,
    Options,
    Start,
    Watchdog,
    check_silence,
    check_transport,
    look_every,
    say,
    tell,
)
from memstore.engine import (
    Creation,
    absolute_path,
    boot_id,
    close_root,
    destroy_root,
    gone_if_new,
    is_in_memory,
    open_root,
    resource_errors,
    state_folder,
    wait_for_storage,
)
from memstore.errors import MemstoreError, NotServedError, TransportUnavailableError

SECRET_FILE = "MEMSTORE_SECRET_FILE"
_OPEN_WITHIN = 30.0  # seconds
_STEADY = 1.0  # seconds: an index process that has lived so long is no failure of its start
_AT_ONCE = 3  # starts without a delay
_FIRST_DELAY, _LONGEST_DELAY = 0.2, 5.0  # seconds
_END_WITHIN = 10.0  # seconds after SIGTERM; then the index process is killed
_FAILED = 1  # exit code


def serve(
    root: str,
    address: str,
    *,
    join: Sequence[str] = (),
    new: bool = False,
    moved: bool = False,
    owner: bool = True,
    secret_file: str | None = None,
    insecure: bool = False,
    ready_fd: int | None = None,
    hang_after: float = HANG_AFTER,
    shared: bool = False,
    maps: bool = False,
    transport: str = "auto",
    promote_after: float | None = None,
    remove_after: float | None = None,
    replicas: str = "",
    on_missing: str = "fail",
) -> None:
    """Serves a root until SIGTERM, SIGINT or SIGHUP. Call it in the main thread of a process that does nothing else.

    Args:
        root: the store's folder, which is created if there is none.
        address: where the other hosts reach this one, "tcp://IP:PORT".
        join: addresses of members, or of hosts of a first boot that name each other; its own may be among them. A root
            that is a member already needs none. Without any, and without a cluster, the root makes one after 3 s,
            unless members of one find it at this address.
        new: a root without a cluster makes one at once.
        moved: the root was served at another address before. **A copy of its folder must not be served as well.**
        owner: False: what processes of this host put first is owned by another host, as on one that comes and goes.
        secret_file: the file of the secret that all hosts have; None: `MEMSTORE_SECRET_FILE` names it. ROOT/secret,
            which `memstore.serve` leaves, goes before both.
        insecure: serve without a secret where others than this host can connect.
        ready_fd: a line is written there when this host is a member, or can't be.
        hang_after: seconds without a sign of life of its index process, after which that is killed and started again;
            0.5 or more. Time in which this process was stopped too doesn't count.
        shared: the folder is on storage that all hosts mount, and each reads there what others have put: see
            docs/shared-storage.md. What the first host finds, or makes, holds for all.
        maps: with `shared`, at the store's creation: that storage keeps files that a host has mapped, also when another
            one has removed them, so gets need not copy.
        transport: which way bytes of values take to and from hosts that have the same: "tcp"; "rdma", experimental,
            since it has not run on hardware yet; "monarch", as "rdma" over Monarch's TCP fallback, for tests. Both run
            Monarch in the index process: **whoever can connect to its port there may run code as this user.** "auto"
            is "tcp".
        promote_after: seconds, 1 or more. If this host is a deputy, and a majority of the hosts hasn't heard the seed
            for so long, it makes itself the seed, as ``memstore promote`` would. Give it to all hosts, or none. Of two
            hosts none is a majority: neither takes over by itself. None: a person does it.
        remove_after: seconds, 30 or more. While this host is the seed, it removes a host by itself that is silent for
            longer, and what that has put is lost. **All hosts that don't hear a majority for so long refuse all calls
            with FencedError**, puts and gets of their own keys, too. It is for three hosts or more: of two, none is
            removed, and none stops. Hosts with durability="disk" aren't removed by it. Give it to all hosts, or none;
            `promote_after` is 10 s then if it isn't given. None: a person, or a scheduler, removes hosts.
        replicas: "2": a put of any key returns when two hosts have its value; "async": the second one gets it
            afterwards; "1": the host that puts it. The store has it from then on, on all hosts. Empty: as it has it.
        on_missing: "fail", or "warn": what becomes of a put that finds no second host.

    Raises:
        NotServedError: the root can't be served, or no longer; the message says why.
        NotAStoreError, PermissionDeniedError, and what else `memstore.open` raises of a folder.
        MissingPackageError: a transport takes Monarch, and it isn't installed.
        TransportUnavailableError: "rdma", and this host has no ibverbs.
        ValueError, MemstoreError: an address, or the secret; or a time is too short.
    """
    try:
        path = os.path.realpath(absolute_path(root))
        own = str(parse_own_address(address))
        named = tuple(dict.fromkeys(one for one in (str(parse_own_address(one)) for one in join) if one != own))
        promote_after = check_silence(promote_after, remove_after)
        patience = hang_after, transport, promote_after or 0.0, remove_after or 0.0
        options = Options(path, own, named, new, moved, owner, insecure, *patience, replicas, on_missing)
        hello = hello_of_this_process()
        _check(options, secret_file, hello, shared=shared)
        creation = Creation(shared=None if not shared else "map" if maps else "copy")
        if shared and named and not new:
            wait_for_storage(path, time.monotonic() + _OPEN_WITHIN)
        with gone_if_new(path):
            durable = _open_once(path, creation)
            while _serve_opened(options, hello, ready_fd, durable=durable):
                pass  # it was removed from its cluster, and comes back
    except (MemstoreError, OSError, ValueError) as error:
        if ready_fd is not None:
            tell(ready_fd, News(Kind.REFUSED, str(error)))
        raise


def _check(options: Options, secret_file: str | None, hello: Hello, *, shared: bool) -> None:
    """Checks what can be checked before anything is made."""
    if options.replicas:
        policy_of("", options.replicas if options.replicas == "async" else int(options.replicas), options.on_missing)
    if shared and options.transport in ("rdma", "monarch"):
        raise TransportUnavailableError(
            f"transport {options.transport!r} with shared: hosts read files there, and send no bytes: leave it out"
        )
    check_transport(options.transport, hello.monarch)
    if not options.hang_after >= SHORTEST_HANG:
        raise ValueError(
            f"hang_after is {options.hang_after} s: an index process needs {SHORTEST_HANG:g} s to say that it lives"
        )
    if secret_file is not None:
        os.environ[SECRET_FILE] = secret_file
    if secret_of(options.root) is None and options.insecure:
        say("no secret: whoever can connect may read and change the store")
    if options.transport in ("rdma", "monarch"):
        say("Monarch listens too: it authenticates nobody, and whoever can connect there may run code as this user")


def _open_once(path: str, creation: Creation) -> bool:
    """Creates the root if there is none. Returns whether its puts are synced to a disk."""
    with resource_errors(path):
        use = open_root(path, "a", creation, _OPEN_WITHIN)
        try:
            return use.root.settings.durable
        finally:
            close_root(use)


def _serve_opened(options: Options, hello: Hello, ready_fd: int | None, *, durable: bool) -> bool:
    """Serves a root. Returns whether it was removed from its cluster, and is to be served once more."""
    path = options.root
    lock, end = AgentLock(path), End()
    try:
        may_go_back = not durable and not is_in_memory(state_folder(path))
        boot = lock.read().boot
        if may_go_back and boot and boot != boot_id().hex():
            # A catalog that isn't synced may be an older one: and so calls, epochs and versions with it.
            raise NotServedError(
                f"{path} was served until this host went down, and its durability is 'process': it may have lost what "
                "other hosts know of it. Remove this host from its cluster (memstore remove), and serve an empty "
                "folder, or one with durability='disk'"
            )
        if was_removed(path) is not None:
            say(f"{path} was removed from its cluster: it is {set_aside(path)} now, and comes back as a new host")
            lock.close()
            lock = AgentLock(path)
        members = [one for one in members_before(path) if one != options.address]
        if members:
            join = tuple(dict.fromkeys([*options.join, *members]))
            options = msgspec.structs.replace(options, join=join, is_new=False)
        end = _keep_serving(options, lock, hello, ready_fd)
        if end.comes_back:
            return True
        notify_service("STOPPING=1")
        if may_go_back:
            os.sync()  # else the next boot could find an older catalog
        lock.write(Note("", lock.read().incarnation))
        say(f"{path} is served no longer: {end.reason or 'another host has ended it'}")
    finally:
        lock.close()
    if end.removes:
        destroy_root(path, _OPEN_WITHIN)
        say(f"{path} is removed")
    return False


class End(NamedTuple):
    """How a service has ended.

    Attributes:
        reason: a signal, a drain, or (empty) another host.
        removes: the root is to go.
        comes_back: it was removed from its cluster, and is to be served anew.
    """

    reason: str = ""
    removes: bool = False
    comes_back: bool = False


def _keep_serving(options: Options, lock: AgentLock, hello: Hello, ready_fd: int | None) -> End:
    """Serves until it is told to stop."""
    failures, was_ready, removes, why, boot = 0, False, False, "", boot_id().hex()
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)  # what the index process starts must not keep it
    is_to_stay = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # when its terminal goes
    with Stop(*(number for number in OF_AGENTS if not (is_to_stay and number == signal.SIGHUP))) as stop:
        while True:
            incarnation = lock.read().incarnation + 1
            lock.write(Note(boot, incarnation))
            with IndexChild(options, incarnation, hello) as child:
                for news in child.told(stop):
                    if news.kind is Kind.READY and not was_ready:
                        was_ready = True
                        say(f"{socket.gethostname()} serves {options.root} at {options.address} (pid {os.getpid()})")
                        notify_service("READY=1", f"STATUS=serving {options.root} at {options.address}")
                        if ready_fd is not None:
                            tell(ready_fd, news)
                    elif news.kind is Kind.REMOVE:
                        removes, why = True, news.text
                    elif news.kind is Kind.REMOVED:
                        return End(comes_back=True)
                    elif news.kind is Kind.LOST or (news.kind is Kind.REFUSED and not was_ready):
                        raise NotServedError(news.text)
                    elif news.kind is Kind.REFUSED:
                        say(news.text)
                if child.ended_well():
                    return End(why or stop.name, removes)
                failures = failures + 1 if child.age() < _STEADY else 1
                late = failures - _AT_ONCE
                delay = 0.0 if late <= 0 else min(_FIRST_DELAY * 2 ** (late - 1), _LONGEST_DELAY)
                again = "at once" if not delay else f"in {delay:g} s"
                say(f"the index process (pid {child.pid}) {child.how_it_ended()}: started again {again}")
            if stop.wait(delay):
                return End(stop.name)


def notify_service(*states: str) -> None:
    """Tells systemd how a service of `Type=notify` is (sd_notify(3)). Nothing happens where nobody wants to hear it."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path[:1] not in ("/", "@"):
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto("\n".join(states).encode(), address)


class Stop:
    """Takes signals while it is entered, in the main thread, as something that a poll waits for.

    Attributes:
        is_set: one has come.
        name: of the first one; empty: none has come.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}
        self.is_set, self.name = False, ""
        self._reader, self._writer = -1, -1

    def fileno(self) -> int:
        """Returns what is readable from the first signal on."""
        return self._reader

    def wait(self, seconds: float) -> bool:
        """Returns whether one came within that time."""
        if not self.is_set:
            select.select([self], [], [], seconds)
        return self.is_set

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self.is_set:
            self.is_set, self.name = True, signal.Signals(number).name
            os.write(self._writer, b"\n")

    def __enter__(self) -> Stop:
        self._reader, self._writer = os.pipe()
        self._before = {number: signal.signal(number, self._take) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)


class IndexChild:
    """A fork of this process that runs the index process. Use it in a `with`, which leaves none behind.

    It has this process's files, and so keeps the agent's lock as long as it lives.

    Args:
        hello: versions of what is installed.

    Attributes:
        pid: its process id.
    """

    def __init__(self, options: Options, incarnation: int, hello: Hello) -> None:
        with between_forks():  # late: only agents need it
            from memstore.distributed.serving.index_process import main

        self._hang_after, self._has_hung = options.hang_after, False
        self._reader, writer = os.pipe()
        pulse = look_every(options.hang_after)
        start = Start(options, os.getpid(), incarnation, writer, pulse, hello.torch, hello.monarch)
        self._started = time.monotonic()
        self._code: int | None = None
        self._is_told_to_end = False
        try:
            self.pid = _fork(lambda: main(start))
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)

    def told(self, stop: Stop) -> Iterator[News]:
        """Yields what it tells, until it has ended. It is killed when it hangs.

        From `stop` on it is told to end, and killed if it doesn't.
        """
        lines, deadline = Lines(self._reader), None
        watchdog = Watchdog(self._hang_after, time.monotonic())
        while True:
            if stop.is_set and deadline is None:
                deadline = time.monotonic() + _END_WITHIN
                self._is_told_to_end = True
                os.kill(self.pid, signal.SIGTERM)
            wait = watchdog.look_every if deadline is None else max(deadline - time.monotonic(), 0.0)
            files = [self._reader] if deadline is not None else [self._reader, stop.fileno()]
            ready, _, _ = select.select(files, [], [], wait)
            if self._reader in ready:
                news = lines.read()
                if news is None:  # the process has ended: it alone had the pipe's other end
                    break
                watchdog.hear(time.monotonic())
                yield from (one for one in news if one.kind is not Kind.ALIVE)
            elif deadline is None:
                if watchdog.is_over(time.monotonic()):
                    self._has_hung = True
                    os.kill(self.pid, signal.SIGKILL)
                    break
            elif time.monotonic() >= deadline:
                os.kill(self.pid, signal.SIGKILL)
                break
        self._reap()

    def ended_well(self) -> bool:
        """Returns whether it was told to end, by us or by another host."""
        return self._code == 0 or self._is_told_to_end

    def how_it_ended(self) -> str:
        if self._has_hung:
            return f"has answered nothing for {self._hang_after:g} s, and was killed"
        code = self._reap()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def age(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> IndexChild:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
        os.close(self._reader)

    def _reap(self) -> int:
        """Waits for its end. Returns its exit code, or minus the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _fork(program: Callable[[], None]) -> int:
    """Runs `program` in a fork of this process. Returns its pid.

    The fork takes no signal that this process has handlers for: the program unblocks them when it has its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_AGENTS)
    try:
        pid = os.fork()
        if pid == 0:
            _become(program)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(program: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()  # a Ctrl-C in the terminal is the agent's to pass on
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        program()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(_FAILED)
