"""Parts that an agent and its index process share: how a root is served, who serves it, what one tells the other.

Options, Start    how a root is served, and one start of its index process
AgentLock         ROOT/agent.lock: who serves a root holds it
News, tell, Lines what an index process tells its agent, and the agent whoever waits for it: lines in a pipe
Pulse, Watchdog   an index process says that it goes on, and an agent kills one that doesn't
say               what both print: one line an event, on stderr, for people
check_silence     how long a seed may be silent
check_transport   which way bytes of values take: what a host is served with, and what it has
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from enum import Enum
from typing import NamedTuple

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import Listener
from memstore.engine import lock_holders, state_folder, syscalls
from memstore.errors import MissingPackageError, NotServedError, TransportUnavailableError

# --- how a root is served ---------------------------------------------------------------------------------------------

HANG_AFTER = 10.0  # seconds without a word of the index process
PROMOTE_AFTER = 10.0  # seconds, where a mesh or a launcher runs the cluster
SHORTEST_SILENCE, LONGEST_SILENCE = 1.0, 86_400.0  # seconds after which a deputy takes over
SHORTEST_LEASE = 30.0  # seconds of silence after which the seed removes a host
OF_AGENTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that an agent takes


class Options(msgspec.Struct, frozen=True):
    """How a root is served.

    Attributes:
        root: its folder, absolute.
        address: where its index process listens.
        join: addresses of members, which a root without a cluster asks.
        is_new: a root without a cluster makes one at once.
        moved: the root was served at another address before.
        is_owner: False: what is put here first is owned by another host.
        insecure: listen without a secret where others can connect.
        hang_after: seconds of silence after which the index process is killed.
        transport: which way bytes of values take.
        promote_after: seconds of the seed's silence after which this host takes over, as a deputy; 0: never by itself.
        remove_after: seconds of a member's silence after which this host removes it, as the seed; 0: never by itself.
        replicas: "1", "2" or "async": on how many hosts each value is to lie; empty: as the store has it.
        on_missing: "fail" or "warn": what becomes of a put that finds no second host.
    """

    root: str
    address: str
    join: tuple[str, ...] = ()
    is_new: bool = False
    moved: bool = False
    is_owner: bool = True
    insecure: bool = False
    hang_after: float = HANG_AFTER
    transport: str = "auto"
    promote_after: float = 0.0
    remove_after: float = 0.0
    replicas: str = ""
    on_missing: str = "fail"


def check_silence(promote_after: float | None, remove_after: float | None = None) -> float | None:
    """Returns `promote_after`, which goes with `remove_after`: without a seed, all leases would be over soon.

    Raises ValueError: a deputy would take over too soon or too late, or a host would be removed too soon.
    """
    if promote_after is not None and not SHORTEST_SILENCE <= promote_after <= LONGEST_SILENCE:
        raise ValueError(
            f"promote_after is {promote_after} s, and a seed may be silent for a moment because its machine is busy: "
            f"expected {SHORTEST_SILENCE:g} to {LONGEST_SILENCE:g} s, or None"
        )
    if remove_after is None:
        return promote_after
    if not SHORTEST_LEASE <= remove_after <= LONGEST_SILENCE:
        raise ValueError(
            f"remove_after is {remove_after} s, and a host that is removed loses what it has put: expected "
            f"{SHORTEST_LEASE:g} to {LONGEST_SILENCE:g} s, or None"
        )
    most = remove_after / 3
    if promote_after is not None and promote_after > most:
        raise ValueError(
            f"promote_after is {promote_after} s, with remove_after {remove_after} s: hosts that have no seed for so "
            f"long stop; expected {most:g} s or less, or None, which is {min(PROMOTE_AFTER, most):g} s then"
        )
    return min(PROMOTE_AFTER, most) if promote_after is None else promote_after


class Start(msgspec.Struct, frozen=True):
    """One start of an index process.

    Attributes:
        agent: the pid of who starts it.
        incarnation: how often it was started.
        news: a pipe's end, for what the agent is to hear.
        pulse: seconds between two words that it goes on.
        torch, monarch: versions, which the agent has looked up once: that takes longer than all else at a start.
    """

    options: Options
    agent: int
    incarnation: int
    news: int
    pulse: float
    torch: str
    monarch: str


# --- who serves it ----------------------------------------------------------------------------------------------------

LOCK, CLUSTER_FILE = "agent.lock", "cluster"
_PATIENCE = 2.0  # seconds: an agent that was killed takes its index process with it, but not in the same moment
_NO_BOOT = "-"
_LINE = 61  # bytes
_ENDS, _GOES_ON = b"ending\n", b"       "


class Note(NamedTuple):
    """The line of ROOT/agent.lock.

    Attributes:
        boot: in which the root is served, hexadecimal; empty: the last service had a clean end, or there was none.
        incarnation: how often its index process was started.
    """

    boot: str
    incarnation: int


class AgentLock:
    """The lock of who serves a root, held until it is closed, and by whoever has inherited `fd`.

    The index process inherits it, so it is free when both are dead. Behind its line stands a mark, once the index
    process was told to end: who would join waits then. Of a store on storage that hosts share, it lies in the state
    folder.

    Raises:
        NotServedError: somebody else serves the root.
    """

    def __init__(self, root: str, *, patience: float = _PATIENCE) -> None:
        self.path = f"{state_folder(root)}/{LOCK}"
        self.fd = syscalls.open_file(self.path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + patience
        while not syscalls.lock_exclusive(self.fd):
            pids = holders(self.path)
            if any(map(_lives, pids)) or time.monotonic() > deadline:
                self.close()
                who = f"pid {', '.join(map(str, pids))}" if pids else "a process that can't be seen from here"
                raise NotServedError(f"{root} is served already, by {who}: end that agent first (SIGTERM)")
            time.sleep(0.01)

    def read(self) -> Note:
        return _note_of(syscalls.read_at(self.fd, _LINE, 0))

    def write(self, note: Note) -> None:
        """Writes the line, also to the disk, if there is one."""
        line = f"{note.boot or _NO_BOOT} {note.incarnation}"
        mark = _GOES_ON if note.boot else b""  # else it stays as it is
        syscalls.write_at(self.fd, f"{line:<{_LINE - 1}}\n".encode() + mark, 0)
        syscalls.sync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            syscalls.close(self.fd)
            self.fd = -1


def _note_of(line: bytes) -> Note:
    with contextlib.suppress(ValueError):
        boot, number = line.decode(errors="replace").split()
        return Note("" if boot == _NO_BOOT else boot, int(number))
    return Note("", 0)


def is_served(root: str) -> bool:
    """Returns whether an agent or its index process lives. It takes the lock for a moment, if it is free."""
    try:
        fd = syscalls.open_file(f"{state_folder(root)}/{LOCK}", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if not syscalls.lock_exclusive(fd):
            return True
        syscalls.unlock(fd)  # a child that is forked meanwhile has the file open too
        return False
    finally:
        syscalls.close(fd)


def note_end(root: str) -> None:
    """Notes that whoever serves the root is about to end. Nothing happens where its folder is gone."""
    with contextlib.suppress(OSError):
        fd = syscalls.open_file(f"{state_folder(root)}/{LOCK}", os.O_RDWR)
        try:
            syscalls.write_at(fd, _ENDS, _LINE)
        finally:
            syscalls.close(fd)


def is_about_to_end(root: str) -> bool:
    """Returns whether that was noted, and no index process was started since."""
    return _read_lock(root, len(_ENDS), _LINE) == _ENDS


def has_ended_well(root: str) -> bool:
    """Returns whether who served the root last has ended as it was told to. The root may be gone: that is as well."""
    return _note_of(_read_lock(root, _LINE, 0)).boot == ""


def _read_lock(root: str, size: int, at: int) -> bytes:
    """Returns bytes of the lock's file; none if nobody ever served the root, or it is gone."""
    try:
        fd = syscalls.open_file(f"{state_folder(root)}/{LOCK}", os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        return syscalls.read_at(fd, size, at)
    finally:
        syscalls.close(fd)


def agent_of(root: str) -> int:
    """Returns the pid of the agent that serves the root; 0: there is none, or it doesn't say so just now."""
    state = state_folder(root)
    try:
        with open(f"{state}/{CLUSTER_FILE}", "rb") as file:
            pid = msgspec.json.decode(file.read(), type=_Serving).agent
    except (OSError, *UNDECODABLE):
        return 0
    # Others take the lock for a moment, to see whether it is free; and the file may be of an agent that was killed.
    return pid if pid in holders(f"{state}/{LOCK}") and _lives(pid) else 0


class _Serving(msgspec.Struct, frozen=True):
    """The part of ROOT/cluster that says who serves the root."""

    agent: int


def holders(path: str) -> list[int]:
    """Returns the pids that have taken the lock, as far as the kernel tells."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return []
    return sorted(lock_holders().get((status.st_dev, status.st_ino), ()))


def _lives(pid: int) -> bool:
    """Returns whether a process runs. The kernel names who has taken a lock, when only a child of it has it still."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# --- news -------------------------------------------------------------------------------------------------------------

_LONGEST_NEWS = 4000  # bytes: less than a pipe takes at once


class Kind(Enum):
    """Kinds of news: this host is a member, and answers; the index process goes on (for its agent alone); it can't be
    a member, and its process ends; the same for good, since the root is gone or no member any more; it was removed,
    and may come back; the agent is to remove the root when it has ended."""

    READY = "ready"
    ALIVE = "alive"
    REFUSED = "refused"
    LOST = "lost"
    REMOVED = "removed"
    REMOVE = "remove"


class News(NamedTuple):
    kind: Kind
    text: str = ""


def tell(fd: int, news: News) -> None:
    """Writes a line, in one write. Nothing happens if nobody reads, or the pipe is full."""
    line = f"{news.kind.value} {news.text}".encode(errors="replace").replace(b"\n", b" ")[:_LONGEST_NEWS]
    with contextlib.suppress(OSError):
        os.write(fd, line + b"\n")


class Lines:
    """Reads what is told through a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""

    def read(self) -> list[News] | None:
        """Returns what has come, and waits for something. None: nobody will tell more."""
        received = os.read(self._fd, 1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [_parse(line.decode(errors="replace")) for line in lines] if received else None


def _parse(line: str) -> News:
    kind, _, text = line.partition(" ")
    return News(Kind(kind), text)


# --- a process that hangs ---------------------------------------------------------------------------------------------

SHORTEST_HANG = 0.5  # seconds that an index process has at least
_LOOKS = 5  # that fit into the time it has
_LONGEST_LOOK = 1.0  # seconds
_TO_BEGIN = 60.0  # seconds until its first word: imports from a disk that is cold, or far away


def look_every(hang_after: float) -> float:
    """Returns the seconds between two words of the index process, and between two looks of its agent."""
    return min(hang_after / _LOOKS, _LONGEST_LOOK)


class Watchdog:
    """Says when an agent takes its index process for hung: it was silent for too long, while the agent could hear.

    A machine that was suspended, or a container that was stopped as a whole, isn't silent: its agent was stopped too.
    So the agent counts looks, and not the clock: each counts for the time that it was meant to take, at most.

    Args:
        hang_after: seconds of silence, from the first word on.
        now: monotonic, as in all calls.
    """

    def __init__(self, hang_after: float, now: float) -> None:
        self._limit, self._every = hang_after, look_every(hang_after)
        self._patience = max(hang_after, _TO_BEGIN)
        self._silence, self._looked = 0.0, now

    @property
    def look_every(self) -> float:
        return self._every

    def hear(self, now: float) -> None:
        """Notes that the index process has said something."""
        self._patience = self._limit
        self._silence, self._looked = 0.0, now

    def is_over(self, now: float) -> bool:
        """Notes a look at which it had said nothing. Returns whether it was the last one."""
        self._silence += min(now - self._looked, self._every)
        self._looked = now
        return self._silence >= self._patience


class Pulse:
    """A thread of the index process that tells the agent, again and again, that this process lives.

    From `follow` on it does so only as long as the listener's thread comes round: whoever asks would wait in vain
    otherwise, however well the rest of the process is.

    Args:
        news: the pipe to the agent. From now on nobody waits to write into it: an agent that is stopped for days must
            not stop its index process.
        every: seconds.
    """

    def __init__(self, news: int, every: float) -> None:
        self._news, self._every = news, every
        self._listener: Listener | None = None
        self._is_over = threading.Event()
        os.set_blocking(news, False)

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def follow(self, listener: Listener) -> None:
        """Binds it to a listener that has started."""
        self._listener = listener

    def close(self) -> None:
        """Ends it: it tells nothing any more."""
        self._is_over.set()

    def _run(self) -> None:
        while True:
            listener = self._listener
            before = -1 if listener is None else listener.turns
            if listener is not None:
                listener.nudge()
            if self._is_over.wait(self._every):
                return
            if listener is None or listener.turns != before:
                tell(self._news, News(Kind.ALIVE))


# --- what both print --------------------------------------------------------------------------------------------------

_TIME = "%Y-%m-%d %H:%M:%S "


def say(text: str) -> None:
    """Prints a line in one write, so that lines of the two don't mix. systemd's journal has the time beside it."""
    now = "" if "JOURNAL_STREAM" in os.environ else time.strftime(_TIME)
    sys.stderr.write(f"{now}memstore: {text.rstrip()}\n")
    sys.stderr.flush()


def log_by_lines() -> None:
    """Prints warnings of the library's log as such lines too, unless MEMSTORE_LOG_LEVEL has said how."""
    log = logging.getLogger("memstore")
    if not log.handlers:
        log.addHandler(_Lines())


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


# --- transports -------------------------------------------------------------------------------------------------------

TRANSPORTS = ("auto", "rdma", "tcp", "monarch")
# A process of its own: an agent must not import Monarch.
_PROBE = "import sys; from memstore.distributed.transfers.rdma import has_ibverbs; sys.exit(not has_ibverbs())"
_DEVICES = "/sys/class/infiniband"
_PROBE_WITHIN = 60.0  # seconds: a cold disk


def check_transport(transport: str, version: str) -> None:
    """Checks a transport before anything is made. It doesn't import Monarch: a child process looks.

    Args:
        version: of Monarch; empty: it isn't installed.

    Raises:
        ValueError: there is no such transport.
        MissingPackageError: it takes Monarch.
        TransportUnavailableError: "rdma", and this host has no ibverbs.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}: expected one of {', '.join(TRANSPORTS)}")
    if transport in ("rdma", "monarch"):
        need_monarch(version)
    if transport == "rdma" and not has_rdma():
        raise TransportUnavailableError(
            "this host has no RDMA that Monarch could use (ibverbs): serve it with transport='tcp', or with 'auto', "
            "which takes what there is"
        )


def need_monarch(version: str, what: str = "this") -> None:
    """Raises MissingPackageError if Monarch isn't installed.

    Args:
        version: as `Hello.monarch` has it.
        what: needs it.
    """
    if not version:
        advice = "pip install 'torchmonarch>=0.7,<0.8'"
        raise MissingPackageError(f"{what} needs torchmonarch (Linux, Python 3.10 to 3.13): {advice}")


def has_rdma() -> bool:
    """Returns whether Monarch finds ibverbs on this host: where there may be some, a child process looks."""
    try:
        if not os.listdir(_DEVICES):
            return False
        done = subprocess.run([sys.executable, "-c", _PROBE], stdin=subprocess.DEVNULL, timeout=_PROBE_WITHIN)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
