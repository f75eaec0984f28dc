"""Starts a host's agent and supervises it, for the index actor. No Monarch in it.

Reception, try_all  at which of its addresses the first host can be reached: the others try
Launching           takes orders: it looks, tries ways to other hosts, and starts the agent
Supervisor          starts an agent again that has ended otherwise than it was told to, and ends it with its mesh
settle              waits until hosts that were started are ready
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import select
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from memstore._version import __version__
from memstore.distributed.links import Address, parse_address, secret_of, write_secret
from memstore.distributed.meshes.messages import (
    LONGEST_TEXT,
    VERSION,
    Folder,
    HostFailed,
    HostSeen,
    LookAtRoot,
    Order,
    OrderDone,
    Reached,
    Receive,
    ReceiveNoMore,
    Receives,
    Report,
    Settle,
    Settled,
    StartAgent,
    Started,
    Try,
    Undo,
    decode_order,
    encode,
)
from memstore.distributed.rules import Roster
from memstore.distributed.serving import (
    ADDRESS_VARIABLE,
    LOG,
    PORT_VARIABLE,
    PROGRAM,
    Cluster,
    agent_of,
    has_ended_well,
    has_rdma,
    is_served,
    is_served_on,
    standing_at,
    standing_of,
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
    has_no_options,
    open_root,
    remove_unused,
    resource_errors,
    state_folder,
    syscalls,
)
from memstore.errors import (
    AddressUnavailableError,
    CorruptionError,
    FormatVersionError,
    MemstoreError,
    NotServedError,
    StoreTimeoutError,
)

# --- Ways between hosts ----------------------------------------------------------------------------------------------
# At which of its addresses the first host can be reached by the others: they try, before anything is started.
#
# A host may have many: of networks that others aren't on, and of bridges that every host has under the same number. So
# whoever answers has to send a token that was made a moment ago.

FIRST_PORT, PORTS = 7411, 100
_MOST = 16  # addresses of a host
_TRY = 3.0  # seconds for a connection
_GREET = 2.0  # seconds that a guest may take
_TOKEN = 16  # bytes
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s2sH4s16x")


def own_ips(first: Iterable[str] = ()) -> list[str]:
    """The IPs of this host at which others may reach it: those in `first`, those of its name, and of its network cards.

    Neither loopback nor link-local ones.
    """
    found: dict[str, None] = {}
    for text in (*first, *_of_name(), *_ip4s(), *_ip6s()):
        with contextlib.suppress(ValueError):
            ip = ipaddress.ip_address(text)
            if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast):
                found[str(ip)] = None
    return list(found)[:_MOST]


def _of_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(one[4][0]) for one in found]


def _ip4s() -> list[str]:
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, card in socket.if_nameindex():
            request = card.encode()[:15].ljust(_IFREQ.size, b"\0")
            with contextlib.suppress(OSError):  # it has no IPv4 address
                _, _, _, ip = _IFREQ.unpack(fcntl.ioctl(sock, _SIOCGIFADDR, request))
                found.append(socket.inet_ntoa(ip))
    return found


def _ip6s() -> list[str]:
    try:
        with open("/proc/net/if_inet6") as table:
            return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in table]
    except OSError:
        return []


def free_port(ip: str, port: int) -> int:
    """Where an agent may listen: `port`, or, if that is 0, the first free one from 7411.

    Raises AddressUnavailableError: there is none.
    """
    with _listen(ip, port) as sock:
        return int(sock.getsockname()[1])


def _listen(ip: str, port: int) -> socket.socket:
    trouble = ""
    for number in (port,) if port else range(FIRST_PORT, FIRST_PORT + PORTS):
        address = Address(ip, number)
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address.for_socket())
            sock.listen()
            return sock
        except OSError as error:
            sock.close()
            trouble = f"{address}: {error.strerror or error}"
    more = "" if port else f", and the ports before it from {FIRST_PORT}"
    raise AddressUnavailableError(
        f"this host can't listen at {trouble}{more}: end who listens there, or name another port by MEMSTORE_PORT, "
        "another address by MEMSTORE_ADDRESS, in the environment of the host's worker"
    )


class Reception:
    """Listens at IPs of this host, and sends whoever connects the token. From its making until `close`.

    Attributes:
        addresses: where it listens: one for each IP.
        token: random.

    Raises:
        AddressUnavailableError: it can listen at none of the IPs.
    """

    def __init__(self, ips: Sequence[str], port: int) -> None:
        self.token = os.urandom(_TOKEN)
        self._socks: list[socket.socket] = []
        trouble: AddressUnavailableError | None = None
        for ip in ips:
            try:
                self._socks.append(_listen(ip, port))
            except AddressUnavailableError as error:
                trouble = error
        if not self._socks:
            raise trouble or AddressUnavailableError(
                "this host has no address at which others could reach it: name one by MEMSTORE_ADDRESS, in the "
                "environment of its worker"
            )
        names = [sock.getsockname() for sock in self._socks]
        self.addresses = tuple(str(Address(str(name[0]), int(name[1]))) for name in names)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="memstore-reception", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for sock in self._socks:
            sock.close()

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in self._socks:
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, sock)
            while not self._is_over.is_set():
                for key, _ in selector.select(0.05):
                    with contextlib.suppress(OSError):
                        guest, _ = key.data.accept()
                        threading.Thread(target=self._greet, args=(guest,), daemon=True).start()

    def _greet(self, guest: socket.socket) -> None:
        """Waits until the guest has closed: who closes first keeps the port busy."""
        with guest, contextlib.suppress(OSError):
            guest.settimeout(_GREET)
            guest.sendall(self.token)
            guest.recv(1)


def try_all(addresses: Sequence[str], token: bytes, deadline: float) -> list[tuple[str, str]]:
    """Connects to each. Returns from which IP of this host, or an empty text, and why not.

    Args:
        token: that each sends; empty: nothing.
    """
    if not addresses:
        return []

    def one(address: str) -> tuple[str, str]:
        return _try(parse_address(address), token, deadline)

    with ThreadPoolExecutor(len(addresses)) as threads:
        return list(threads.map(one, addresses))


def _try(address: Address, token: bytes, deadline: float) -> tuple[str, str]:
    until = min(deadline, time.monotonic() + _TRY)
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(until - time.monotonic(), 0.001))
            sock.connect(address.for_socket())
            received = b""
            while len(received) < len(token):
                piece = sock.recv(len(token) - len(received))
                if not piece:
                    break
                received += piece
            if received != token:
                return "", "somebody else listens there"
            return str(sock.getsockname()[0]), ""
    except TimeoutError:
        return "", "no answer"
    except OSError as error:
        return "", error.strerror or str(error)


_OF_TCP = re.compile(r"tcp:(?://)?\[?([0-9.]+|[0-9a-fA-F:]+)\]?:\d+$")


def ips_in(actor_id: str) -> tuple[str, ...]:
    """Returns the IP at which Monarch reaches the process of an actor, if its id names one."""
    found = _OF_TCP.search(actor_id)
    return (found[1],) if found else ()


_OPEN_WITHIN = 30.0  # seconds
_TRIES = 3  # ports
_END_WITHIN = 5.0  # seconds, for an agent that was started and is to end
_AGAIN = 60_000  # milliseconds, for an agent that is started again
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds between two starts
_SUPERVISED = 1 << 40  # the byte of agent.log that all supervisors of a root lock together, behind its end
_LOOK_EVERY = 0.02  # seconds
_BY_ANOTHER = (
    "if another job serves these hosts at this moment, serve them again when that has ended, or with join= and its "
    "cluster; else end that agent, and take an empty folder"
)


class Launching:
    """An index actor's work. Orders may come from several threads.

    Args:
        ips: at which others reach this host, as far as is known already.
    """

    def __init__(self, ips: tuple[str, ...] = ()) -> None:
        self._ips = ips
        self._root = ""
        self._was_there = self._has_options = True
        self._is_founder = False
        self._is_shared = False  # it lies on storage that all hosts mount, where it was made before
        self._reception: Reception | None = None
        self._agent = HostAgent()
        self._is_undone = False
        self._supervisor: Supervisor | None = None

    def answer(self, data: bytes) -> bytes:
        """Takes an order, gives a report: `HostFailed`, whatever goes wrong."""
        try:
            return encode(self._take(decode_order(data)))
        except CorruptionError as error:
            named = FormatVersionError(f"{error}: here is memstore {__version__}, the same is needed on all hosts")
            return _failed(named)
        except Exception as error:
            return _failed(error)

    def end_agent(self) -> None:
        """Tells the agent to end, if it ends with the mesh, and no index actor of another mesh needs it."""
        if self._supervisor is not None:
            self._supervisor.end_agent()

    def close(self) -> None:
        """Waits until the agent has ended, or a few seconds."""
        if self._supervisor is not None:
            self._supervisor.close(_END_WITHIN)

    def _take(self, order: Order) -> Report:
        match order:
            case LookAtRoot():
                return self._look(order)
            case Receive():
                self._reception = Reception(order.ips, order.port)
                return Receives(self._reception.addresses, self._reception.token)
            case Try():
                tried = try_all(order.addresses, order.token, _after(order.milliseconds))
                return Reached(tuple(ip for ip, _ in tried), tuple(why for _, why in tried))
            case ReceiveNoMore():
                self._receive_no_more()
                return OrderDone()
            case StartAgent():
                return self._start(order)
            case Settle():
                return Settled(settle(self._root, order.addresses, order.milliseconds / 1000))
            case Undo():
                self._undo()
                return OrderDone()

    def _look(self, order: LookAtRoot) -> HostSeen:
        if order.version != VERSION:
            raise FormatVersionError(
                f"memstore {__version__} here, by whose index actors another version can't serve: install the same one "
                "on all hosts of the mesh"
            )
        path = absolute_path(order.root)
        self._was_there = os.path.lexists(path)
        with gone_if_new(path):
            seen = self._opened(path)
        if self._is_undone:  # by an order that has overtaken this one
            self._take_back()
        return seen

    def _opened(self, path: str) -> HostSeen:
        with resource_errors(path):
            self._is_shared = os.path.isdir(path) and state_folder(path) != path
            use = open_root(path, "a", Creation(shared="copy" if self._is_shared else None), _OPEN_WITHIN)
            try:
                member, self._has_options = use.root.member_id(), not has_no_options(use.root)
            finally:
                close_root(use)
                del use  # the traceback of a later error would keep the store open
        self._root = os.path.realpath(path)
        # On storage that hosts share, the root is the same everywhere, and pods of one node have the same kernel.
        status, standing = os.stat(state_folder(self._root)), standing_at(self._root, _OPEN_WITHIN)
        named = _named_address()
        ips, port = named or (tuple(own_ips(self._ips)), _named_port())
        return HostSeen(
            name=socket.gethostname(),
            memstore=__version__,
            folder=Folder(boot_id(), status.st_dev, status.st_ino),
            ips=ips,
            port=port,
            is_named=named is not None,
            is_networked=bool(self._ips),
            is_served=is_served_on(self._root, time.monotonic() + _OPEN_WITHIN, _OPEN_WITHIN),
            member=member,
            roster=None if standing is None else standing.roster,
            is_removed=standing is not None and standing.is_removed,
            secret=secret_of(self._root, and_environment=False) or b"",
        )

    def _receive_no_more(self) -> None:
        if self._reception is not None:
            self._reception.close()
            self._reception = None

    def _start(self, order: StartAgent) -> Started:
        timeout = order.milliseconds / 1000
        deadline = time.monotonic() + timeout
        is_ours = True
        with turn(self._root, deadline, timeout):
            if is_served_on(self._root, deadline, timeout):
                is_ours = _is_of_memstore(agent_of(self._root))
                if (secret_of(self._root) or b"") != order.secret:
                    raise NotServedError(f"{self._root} is served already, with another secret or none: {_BY_ANOTHER}")
            else:
                if order.secret and secret_of(self._root, and_environment=False) != order.secret:
                    write_secret(self._root, order.secret)
                self._is_founder = order.is_new
                self._start_agent(order, deadline, timeout)
        found = wait_until_member(self._root, deadline, timeout)
        roster, member = found.roster, found.roster.member(found.member)
        known = {one.address for one in roster.members}
        if order.named and known.isdisjoint(order.named):
            raise NotServedError(
                f"{self._root} is served already, in the cluster of the seed {roster.seed_address}, not that of "
                f"{order.named[0]}: {_BY_ANOTHER}"
            )
        address = "" if member is None else member.address
        if is_ours and not order.keeps:  # what a person or a service has started is theirs to end
            again = msgspec.structs.replace(
                order, address=address, named=tuple(known), is_new=False, milliseconds=_AGAIN
            )
            self._supervisor = Supervisor(self._root, self._agent, lambda: self._start_again(again))
        return Started(address)

    def _start_again(self, order: StartAgent) -> None:
        """Starts an agent that has ended. Raises NotServedError: it can't be a member any more."""
        timeout = order.milliseconds / 1000
        deadline = time.monotonic() + timeout
        with turn(self._root, deadline, timeout):
            if not is_served_on(self._root, deadline, timeout):
                self._start_agent(order, deadline, timeout)

    def _start_agent(self, order: StartAgent, deadline: float, timeout: float) -> None:
        """At its address; if it has none yet, at the first free port, or the next one if another agent was faster."""
        tries = 1 if order.address or order.port else _TRIES
        while True:
            tries -= 1
            if order.address:
                address = parse_address(order.address)
            else:
                address = Address(order.ip, free_port(order.ip, order.port))
            transport = order.transport if self._is_shared else _transport_here(order.transport)
            try:
                start_agent(
                    self._root,
                    address,
                    [parse_address(named) for named in order.named],
                    deadline,
                    timeout,
                    new=order.is_new,
                    transport=transport,
                    owner=order.is_owner,
                    shared=self._is_shared,
                    promote_after=order.promote_after,
                    remove_after=order.remove_after,
                    told=self._agent.note,
                )
                return
            except NotServedError:
                if not tries or self._is_undone or not _is_taken(address):
                    raise

    def _undo(self) -> None:
        """Ends the agent, if one was started here, and keeps one that is just being started from staying."""
        self._receive_no_more()
        self._is_undone = True
        if self._supervisor is not None:
            self._supervisor.forget()
        self._agent.end_child()
        self._take_back()

    def _take_back(self) -> None:
        """Removes the store that a look has made, if there was none.

        Of a cluster that was made here nothing is left, either, unless another host has joined it. Else no call could
        make one store of these hosts: of two jobs that serve a root at once, each may have made a cluster.
        """
        if self._root and not self._was_there:
            remove_unused(self._root, folder_too=True)
        if self._root and self._is_founder and not self._has_options:
            with contextlib.suppress(MemstoreError, OSError):
                if not is_served(self._root) and _is_alone(self._root):
                    remove_unused(self._root, folder_too=not self._was_there, is_alone=True)


# --- supervision ------------------------------------------------------------------------------------------------------


class HostAgent:
    """The agent of this host: a child of this process, or one that another process has started."""

    def __init__(self) -> None:
        self._child = 0  # its pid, until it was waited for
        self._is_to_end = False
        self._lock = threading.Lock()  # around these two

    def note(self, child: int) -> None:
        """Notes a child that was just started. It is ended if it has come too late."""
        with self._lock:
            self._child = child
            if self._is_to_end:
                os.kill(child, signal.SIGTERM)

    def tell_to_end(self, root: str) -> None:
        """Tells the agent of a root, and one that is being started. It returns at once."""
        with self._lock:
            self._is_to_end = True
            agent = self._child or agent_of(root)
            if agent:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGTERM)

    def end_child(self) -> None:
        """Ends a child, and one that is being started. Agents that others have started go on."""
        deadline = time.monotonic() + _END_WITHIN
        with self._lock:
            self._is_to_end, child = True, self._child
        if not child:
            return
        os.kill(child, signal.SIGTERM)
        while not self._reap():
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)  # the kernel ends its index process with it
            time.sleep(_LOOK_EVERY)

    def wait(self, root: str, until: int) -> bool:
        """Waits for the agent's end, or until a file has something to read. Returns whether the agent has ended."""
        while is_served(root):
            agent = self._child or agent_of(root)
            files = [until]
            with contextlib.suppress(ProcessLookupError):
                if agent:
                    files.append(os.pidfd_open(agent))
            try:
                ready, _, _ = select.select(files, [], [], None if len(files) > 1 else _LOOK_EVERY)
            finally:
                for file in files[1:]:
                    os.close(file)
            self._reap()
            if until in ready:
                return False
        return True

    def _reap(self) -> bool:
        """Returns whether there is no child any more."""
        with self._lock:
            if self._child:
                try:
                    if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                        return False
                except ChildProcessError:  # who has started it has waited for it
                    pass
                self._child = 0
            return True


class Supervisor:
    """Starts the agent of a root again when it has ended otherwise than it was told to.

    It goes on with an agent that another process has started. If this process is killed, the agent goes on. Several
    processes of a host may supervise one root, as for two meshes: the last one that is told to ends the agent.

    Args:
        start: starts the agent. It raises NotServedError where none can be started any more.
    """

    def __init__(self, root: str, agent: HostAgent, start: Callable[[], None]) -> None:
        self._root, self._agent, self._start = root, agent, start
        self._log = syscalls.open_file(f"{state_folder(root)}/{LOG}", os.O_RDWR)
        syscalls.share_byte(self._log, _SUPERVISED)
        self._is_over = False
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._supervise, name="memstore-supervisor", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Starts no agent any more."""
        if not self._is_over:
            self._is_over = True
            syscalls.unlock_byte(self._log, _SUPERVISED)
            os.write(self._writer, b"\n")

    def end_agent(self) -> None:
        """Tells the agent to end, unless another process supervises it too. It returns at once."""
        self.forget()  # first: of two that do this at one moment, one at least finds the byte free
        if syscalls.lock_byte(self._log, _SUPERVISED):
            self._agent.tell_to_end(self._root)

    def close(self, seconds: float) -> None:
        """Ends the agent, unless another process supervises it too, and waits for that, so many seconds."""
        self.end_agent()
        deadline = time.monotonic() + seconds
        while syscalls.lock_byte(self._log, _SUPERVISED) and is_served(self._root) and time.monotonic() < deadline:
            self._agent.tell_to_end(self._root)
            time.sleep(_LOOK_EVERY)

    def _supervise(self) -> None:
        delay = 0.0
        try:
            while True:
                began = time.monotonic()
                if not self._agent.wait(self._root, self._reader) or has_ended_well(self._root):
                    return
                has_lasted = time.monotonic() - began > _LONGEST_DELAY
                delay = 0.0 if has_lasted else min(max(delay * 2, _FIRST_DELAY), _LONGEST_DELAY)
                if self._is_over or select.select([self._reader], [], [], delay)[0]:
                    return
                with contextlib.suppress(StoreTimeoutError):  # the seed doesn't answer: another try may do better
                    self._start()
        except (MemstoreError, OSError) as error:
            with contextlib.suppress(OSError), open(f"{state_folder(self._root)}/{LOG}", "a") as log:
                log.write(f"memstore: {self._root} is not served again: {error}\n")


def settle(root: str, addresses: Sequence[str], seconds: float) -> Roster:
    """Waits until hosts are members, and have finished joining. Returns the roster then.

    Args:
        root: of one of them.
        addresses: of all.

    Raises StoreTimeoutError: not in that time; it names those that haven't.
    """
    deadline, cluster = time.monotonic() + seconds, Cluster(root)
    while late := cluster.settled(addresses):
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{', '.join(late)}: not settled yet, after {seconds:.3g} s")
        time.sleep(_LOOK_EVERY)
    return cluster.roster()


# --- what a launching needs -------------------------------------------------------------------------------------------


def _is_of_memstore(agent: int) -> bool:
    """Returns whether `memstore.serve` or `memstore.join` has started an agent, rather than `memstore serve`."""
    try:
        with open(f"/proc/{agent}/cmdline", "rb") as file:
            return PROGRAM.encode() in file.read().split(b"\0")
    except OSError:
        return False


def _is_alone(root: str) -> bool:
    """Returns whether a root is the one host of its cluster, and has no key."""
    use = open_root(root, "r", Creation(), _END_WITHIN)
    try:
        standing = standing_of(use.root)
        has_keys = use.root.catalog.view(lambda transaction: transaction.count("entries"))
        return standing is not None and len(standing.roster.members) == 1 and not has_keys
    finally:
        close_root(use)


def _is_taken(address: Address) -> bool:
    try:
        free_port(address.ip, address.port)
        return False
    except AddressUnavailableError:
        return True


def _transport_here(transport: str) -> str:
    """Returns the transport of this host. A mesh has Monarch between its hosts, so RDMA is the default where it is."""
    return "rdma" if transport == "auto" and has_rdma() else transport


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
    return encode(HostFailed(socket.gethostname(), type(error).__name__, text[:LONGEST_TEXT]))
