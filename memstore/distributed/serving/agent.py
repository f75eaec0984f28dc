"""The agent of a host: a plain process that serves a root by an index process, which it starts again when it ends.

1. The agent checks what can be checked beforehand, opens the root, or creates it, and takes ROOT/agent.lock.
2. It starts the index process, which inherits that lock, and is killed by the kernel when the agent ends.
3. When the index process ends otherwise than it was told to, the agent starts it again: at once, and later and later
   if it keeps ending. One that hangs (`watchdog.py`) it kills first.
4. SIGTERM, SIGINT, or SIGHUP unless that is ignored (nohup): it passes that on, waits, notes a clean end, and ends.

A kill of the agent leaves nothing but the lock's line, and a kill of the index process what its transactions make of
it: nothing. It has one thread, imports neither numpy nor torch nor monarch, and opens no catalog while it serves: so
it can be forked (`child.py`).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence

from memstore.distributed.actors import need_monarch
from memstore.distributed.links import Hello, hello_of_this_process, parse_own_address, secret_of
from memstore.distributed.serving.agent_lock import AgentLock, Note
from memstore.distributed.serving.child import IndexChild
from memstore.distributed.serving.lines import say
from memstore.distributed.serving.news import Kind, News, tell
from memstore.distributed.serving.options import Options
from memstore.distributed.serving.service import READY, STOPPING, notify
from memstore.distributed.serving.signals import OF_AGENTS, Stop
from memstore.distributed.serving.transports import check_transport
from memstore.distributed.serving.watchdog import HANG_AFTER, LEAST
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


def serve(
    root: str,
    address: str,
    *,
    join: Sequence[str] = (),
    secret_file: str | None = None,
    insecure: bool = False,
    is_home: bool = True,
    ready_fd: int | None = None,
    hang_after: float = HANG_AFTER,
    monarch: bool = False,
    shared: bool = False,
    maps: bool = False,
    transport: str = "auto",
) -> None:
    """Serves a root until SIGTERM, SIGINT or SIGHUP. Call it in the main thread of a process that does nothing else.

    Args:
        root: the store's folder, which is created if there is none.
        address: where the other hosts reach this one, "tcp://IP:PORT". It is this root's for life.
        join: the address of the cluster's seed, and others; the first one counts. If it is `address`, or there is
            none, this host is the seed.
        secret_file: the file of the secret that all hosts have; None: `MEMSTORE_SECRET_FILE` names it. ROOT/secret,
            which `memstore.serve` leaves, goes before both.
        insecure: serve without a secret where others than this host can connect.
        is_home: False: no key has its home here, as on a host that comes and goes.
        ready_fd: a line is written there when this host is a member, or can't be (`news.py`).
        hang_after: seconds without a sign of life of its index process, after which that is killed and started again;
            0.5 or more. Time in which this process was stopped too doesn't count.
        monarch: its index process has an index actor beside its listener. **Whoever can connect to Monarch's port
            there may run code as this user: Monarch authenticates nobody.**
        shared: the folder is on storage that all hosts mount, and each reads there what others have put: see
            docs/shared-storage.md. What the seed finds, or makes, holds for all.
        maps: with `shared`, at the store's creation: that storage keeps files that a host has mapped, also when another
            one has removed them, so gets need not copy.
        transport: which way bytes of values take to and from hosts that have the same: "tcp"; "rdma", experimental,
            since it has not run on hardware yet; "monarch", as "rdma" over Monarch's TCP fallback, for tests. Both run
            Monarch, as `monarch` does. "auto": "rdma" with `monarch` and where there is ibverbs, else "tcp".

    Raises:
        NotServedError: the root can't be served, or no longer; the message says why.
        NotAStoreError, PermissionDeniedError, and what else `memstore.open` raises of a folder.
        MissingPackageError: `monarch`, or a transport that takes it, and it isn't installed.
        TransportUnavailableError: "rdma", and this host has no ibverbs.
        ValueError, MemstoreError: an address, or the secret; or `hang_after` is too short.
    """
    try:
        seed = join[0] if join else address
        path = os.path.realpath(absolute_path(root))
        options = Options(path, address, seed, is_home, insecure, monarch, hang_after, transport)
        if shared and transport in ("rdma", "monarch"):
            raise TransportUnavailableError(
                f"transport {transport!r} with shared: hosts read files there, and send no bytes: leave it out"
            )
        hello = hello_of_this_process()
        _check(options, (address, *join), secret_file, hello)
        creation = Creation(shared=None if not shared else "map" if maps else "copy")
        _serve(options, hello, ready_fd, creation)
    except (MemstoreError, OSError, ValueError) as error:
        if ready_fd is not None:
            tell(ready_fd, News(Kind.REFUSED, str(error)))
        raise


def _check(options: Options, addresses: Sequence[str], secret_file: str | None, hello: Hello) -> None:
    """What can be checked before anything is made."""
    if options.monarch:
        need_monarch(hello.monarch)
    check_transport(options.transport, hello.monarch)
    if not options.hang_after >= LEAST:
        raise ValueError(
            f"hang_after is {options.hang_after} s: an index process needs {LEAST:g} s to say that it lives"
        )
    for one in addresses:
        parse_own_address(one)
    if secret_file is not None:
        os.environ[SECRET_FILE] = secret_file
    secret = secret_of(options.root)
    if secret is None and options.insecure:
        say("no secret: whoever can connect may read and change the store")
    if options.monarch or options.transport in ("rdma", "monarch"):
        say("Monarch listens too: it authenticates nobody, and whoever can connect there may run code as this user")


def _serve(options: Options, hello: Hello, ready_fd: int | None, creation: Creation) -> None:
    path = options.root
    if creation.shared is not None and options.seed != options.address:
        wait_for_storage(path, time.monotonic() + _OPEN_WITHIN)
    with gone_if_new(path):
        if _serve_opened(options, hello, ready_fd, _open_once(path, creation)):
            destroy_root(path, _OPEN_WITHIN)
            say(f"{path} was removed, as another process has asked")


def _serve_opened(options: Options, hello: Hello, ready_fd: int | None, durable: bool) -> bool:
    """Returns whether the root is to be removed."""
    path = options.root
    state = state_folder(path)
    lock = AgentLock(path)
    try:
        on_a_disk = not is_in_memory(state)
        if on_a_disk and not durable:
            _check_last_end(path, lock)
        reason, removes = _keep_serving(options, lock, hello, ready_fd)
        notify(STOPPING)
        if on_a_disk and not durable:
            os.sync()  # else the next boot could find an older catalog
        lock.write(Note("", lock.read().incarnation))
        say(f"{path} is served no longer: {reason or 'another host has ended it'}")
        return removes
    finally:
        lock.close()


def _open_once(path: str, creation: Creation) -> bool:
    """Creates the root if there is none. Returns whether its puts are synced to a disk."""
    with resource_errors(path):
        use = open_root(path, "a", creation, _OPEN_WITHIN)
        try:
            return use.root.settings.durable
        finally:
            close_root(use)


def _check_last_end(path: str, lock: AgentLock) -> None:
    """A catalog that isn't synced may go back when the host goes down: and calls, epochs and versions with it."""
    boot = lock.read().boot
    if boot and boot != boot_id().hex():
        raise NotServedError(
            f"{path} was served until this host went down, and its durability is 'process': it may have lost what "
            "other hosts know of it. Remove this host from its cluster (memstore remove), and serve an empty folder, "
            "or one with durability='disk'"
        )


def _keep_serving(options: Options, lock: AgentLock, hello: Hello, ready_fd: int | None) -> tuple[str, bool]:
    """Until it is told to stop. Returns by which signal, or an empty text: by a host; and whether the root goes too."""
    failures, was_ready, removes, boot = 0, False, False, boot_id().hex()
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)  # what the index process starts must not keep it
    with Stop(*_signals()) as stop:
        while True:
            incarnation = lock.read().incarnation + 1
            lock.write(Note(boot, incarnation))
            with IndexChild(options, incarnation, hello) as child:
                for news in child.told(stop):
                    if news.kind is Kind.READY and not was_ready:
                        was_ready = True
                        say(f"{socket.gethostname()} serves {options.root} at {options.address} (pid {os.getpid()})")
                        notify(READY, f"STATUS=serving {options.root} at {options.address}")
                        if ready_fd is not None:
                            tell(ready_fd, news)
                    elif news.kind is Kind.LOST or (news.kind is Kind.REFUSED and not was_ready):
                        raise NotServedError(news.text)
                    elif news.kind is Kind.REFUSED:
                        say(news.text)
                    elif news.kind is Kind.REMOVED:
                        removes = True
                if child.ended_well():
                    return stop.name, removes
                failures = failures + 1 if child.age() < _STEADY else 1
                delay = _delay(failures)
                again = "at once" if not delay else f"in {delay:g} s"
                say(f"the index process (pid {child.pid}) {child.how_it_ended()}: started again {again}")
            if stop.wait(delay):
                return stop.name, False


def _signals() -> list[signal.Signals]:
    is_to_stay = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # when its terminal goes
    return [number for number in OF_AGENTS if not (is_to_stay and number == signal.SIGHUP)]


def _delay(failures: int) -> float:
    if failures <= _AT_ONCE:
        return 0.0
    return min(_FIRST_DELAY * 2 ** (failures - _AT_ONCE - 1), _LONGEST_DELAY)
