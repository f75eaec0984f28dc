"""What a launcher does on its host: it looks, tries ways to others, and starts the host's agent. No Monarch in it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

from memstore._version import __version__
from memstore.distributed.links import Address, parse_address, secret_of, write_secret
from memstore.distributed.meshes.messages import (
    LONGEST_TEXT,
    VERSION,
    Done,
    Failed,
    Folder,
    Look,
    Order,
    Reached,
    Receive,
    ReceiveNoMore,
    Receives,
    Report,
    Seen,
    Settle,
    Settled,
    Start,
    Started,
    Try,
    Undo,
    decode_order,
    encode,
)
from memstore.distributed.meshes.reach import Reception, free_port, own_ips, try_all
from memstore.distributed.meshes.settling import settle
from memstore.distributed.serving import (
    ADDRESS_VARIABLE,
    PORT_VARIABLE,
    has_rdma,
    is_served_on,
    standing_at,
    start_agent,
    turn,
    wait_until_member,
)
from memstore.engine import (
    Creation,
    absolute_path,
    boot_id,
    close_root,
    gone_if_new,
    open_root,
    remove_unused,
    resource_errors,
    state_folder,
)
from memstore.errors import AddressUnavailableError, CorruptionError, FormatVersionError, NotServedError

_OPEN_WITHIN = 30.0  # seconds
_TRIES = 3  # ports
_END_WITHIN = 5.0  # seconds, for an agent that was started and is to end


class Launching:
    """A launcher's work. Orders may come from several threads.

    Args:
        ips: at which others reach this host, as far as is known already.
    """

    def __init__(self, ips: tuple[str, ...] = ()) -> None:
        self._ips = ips
        self._root = ""
        self._was_there = True
        self._is_shared = False  # it lies on storage that all hosts mount, where it was made before
        self._reception: Reception | None = None
        self._agent = 0  # the pid of the one that was started here
        self._lock = threading.Lock()  # around that pid, and whether all is undone
        self._is_undone = False

    def answer(self, data: bytes) -> bytes:
        """Takes an order, gives a report: `Failed`, whatever goes wrong."""
        try:
            return encode(self._take(decode_order(data)))
        except CorruptionError as error:
            named = FormatVersionError(f"{error}: here is memstore {__version__}, the same is needed on all hosts")
            return _failed(named)
        except Exception as error:
            return _failed(error)

    def _take(self, order: Order) -> Report:
        match order:
            case Look():
                return self._look(order)
            case Receive():
                self._reception = Reception(order.ips, order.port)
                return Receives(self._reception.addresses, self._reception.token)
            case Try():
                tried = try_all(order.addresses, order.token, _after(order.milliseconds))
                return Reached(tuple(ip for ip, _ in tried), tuple(why for _, why in tried))
            case ReceiveNoMore():
                self._receive_no_more()
                return Done()
            case Start():
                return self._start(order)
            case Settle():
                return Settled(settle(self._root, order.addresses, order.milliseconds / 1000))
            case Undo():
                self._undo()
                return Done()

    def _look(self, order: Look) -> Seen:
        if order.version != VERSION:
            raise FormatVersionError(
                f"memstore {__version__} here, by whose launchers another version can't serve: install the same one on "
                "all hosts of the mesh"
            )
        path = absolute_path(order.root)
        self._was_there = os.path.lexists(path)
        with gone_if_new(path):
            seen = self._opened(path)
        if self._is_undone:  # by an order that has overtaken this one
            self._take_back()
        return seen

    def _opened(self, path: str) -> Seen:
        with resource_errors(path):
            self._is_shared = os.path.isdir(path) and state_folder(path) != path
            use = open_root(path, "a", Creation(shared="copy" if self._is_shared else None), _OPEN_WITHIN)
            try:
                member = use.root.member_id()
            finally:
                close_root(use)
                del use  # the traceback of a later error would keep the store open
        self._root = os.path.realpath(path)
        # On storage that hosts share, the root is the same everywhere, and pods of one node have the same kernel.
        status, standing = os.stat(state_folder(self._root)), standing_at(self._root, _OPEN_WITHIN)
        named = _named_address()
        ips, port = named or (tuple(own_ips(self._ips)), _named_port())
        return Seen(
            name=socket.gethostname(),
            memstore=__version__,
            folder=Folder(boot_id(), status.st_dev, status.st_ino),
            ips=ips,
            port=port,
            is_named=named is not None,
            is_served=is_served_on(self._root, time.monotonic() + _OPEN_WITHIN, _OPEN_WITHIN),
            member=member,
            view=None if standing is None else standing.view,
            is_removed=standing is not None and standing.is_removed,
            secret=secret_of(self._root, and_environment=False) or b"",
        )

    def _receive_no_more(self) -> None:
        if self._reception is not None:
            self._reception.close()
            self._reception = None

    def _start(self, order: Start) -> Started:
        timeout = order.milliseconds / 1000
        deadline = time.monotonic() + timeout
        with turn(self._root, deadline, timeout):
            if is_served_on(self._root, deadline, timeout):
                if secret_of(self._root) != order.secret:
                    raise NotServedError(f"{self._root} is served already, with another secret or none: end that agent")
            else:
                write_secret(self._root, order.secret)
                self._start_agent(order, deadline, timeout)
        found = wait_until_member(self._root, deadline, timeout)
        member = found.view.member(found.member)
        if order.seed and found.view.seed_address != order.seed:
            raise NotServedError(
                f"{self._root} is served already, in the cluster of the seed {found.view.seed_address}, not "
                f"{order.seed}: end that agent, and take an empty folder"
            )
        return Started("" if member is None else member.address)

    def _start_agent(self, order: Start, deadline: float, timeout: float) -> None:
        """At its address; if it has none yet, at the first free port, or the next one if another agent was faster."""
        tries = 1 if order.address or order.port else _TRIES
        while True:
            tries -= 1
            if order.address:
                address = parse_address(order.address)
            else:
                address = Address(order.ip, free_port(order.ip, order.port))
            seed = parse_address(order.seed) if order.seed else address
            transport = order.transport if self._is_shared else _transport_here(order.transport)
            try:
                start_agent(
                    self._root,
                    address,
                    seed,
                    deadline,
                    timeout,
                    transport=transport,
                    shared=self._is_shared,
                    told=self._note,
                )
                return
            except NotServedError:
                if not tries or self._is_undone or not _is_taken(address):
                    raise

    def _note(self, agent: int) -> None:
        with self._lock:
            self._agent = agent
            if self._is_undone:
                os.kill(agent, signal.SIGTERM)

    def _undo(self) -> None:
        """Ends the agent, if one was started here, and keeps one that is just being started from staying."""
        self._receive_no_more()
        with self._lock:
            self._is_undone, agent = True, self._agent
            self._agent = 0
        if agent:
            _end(agent)
        self._take_back()

    def _take_back(self) -> None:
        """Removes the store that a look has made, if there was none."""
        if self._root and not self._was_there:
            remove_unused(self._root, folder_too=True)


def _is_taken(address: Address) -> bool:
    try:
        free_port(address.ip, address.port)
        return False
    except AddressUnavailableError:
        return True


def _transport_here(transport: str) -> str:
    """Who serves a mesh runs Monarch between its hosts anyway: RDMA is the default where there is some."""
    return "rdma" if transport == "auto" and has_rdma() else transport


def _end(agent: int) -> None:
    deadline = time.monotonic() + _END_WITHIN
    try:
        os.kill(agent, signal.SIGTERM)
        while os.waitpid(agent, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(agent, signal.SIGKILL)  # the kernel ends its index process with it
            time.sleep(0.02)
    except (ProcessLookupError, ChildProcessError):
        return  # whoever started it has waited for its end


def _after(milliseconds: int) -> float:
    return time.monotonic() + milliseconds / 1000


def _named_address() -> tuple[tuple[str, ...], int] | None:
    named = os.environ.get(ADDRESS_VARIABLE)
    if not named:
        return None
    address = parse_address(named)
    return (address.ip,), address.port


def _named_port() -> int:
    """0: none."""
    text = os.environ.get(PORT_VARIABLE, "")
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise ValueError(f"{PORT_VARIABLE} is a port, and not {text!r}")
    return int(text or "0")


def _failed(error: Exception) -> bytes:
    text = str(error) or type(error).__name__
    return encode(Failed(socket.gethostname(), type(error).__name__, text[:LONGEST_TEXT]))
