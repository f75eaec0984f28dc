"""memstore.join: ranks of a launcher (torchrun) make one store of their hosts. Whoever comes first starts the agent.

1. A rank makes the root, if there is none, and takes its *turn*: an exclusive lock on ROOT/agent.log.
2. If nobody serves the root, it starts the agent, detached: a session of its own, its output in ROOT/agent.log. It
   waits until the host is a member, or the agent says why it can't be. Then it gives up its turn.
3. The others find the root served, and the host a member.

A rank that is killed in its turn leaves the lock free, and an agent that goes on. The agent outlives the ranks: a
launcher that starts them anew finds it, until `Cluster.stop`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence

from memstore.distributed.links import Address, check_size, parse_address, parse_own_address, secret_of, write_secret
from memstore.distributed.rules import Standing
from memstore.distributed.serving.cluster import Cluster
from memstore.distributed.serving.questions import standing_at
from memstore.distributed.serving.supervision import (
    PROMOTE_AFTER,
    Kind,
    Lines,
    check_silence,
    is_about_to_end,
    is_served,
)
from memstore.engine import (
    Creation,
    absolute_path,
    close_root,
    deadline_after,
    gone_if_new,
    open_root,
    resource_errors,
    state_folder,
    syscalls,
    wait_for_storage,
)
from memstore.errors import HomeUnavailableError, LinkRefusedError, NotServedError, StoreTimeoutError

PORT = 7411
PORT_VARIABLE, ADDRESS_VARIABLE, TRANSPORT_VARIABLE = "MEMSTORE_PORT", "MEMSTORE_ADDRESS", "MEMSTORE_TRANSPORT"
LOG = "agent.log"
PROGRAM = "memstore.distributed.serving"
# By these a process of Monarch's knows what it is: one that is started there is none.
_OF_MONARCH_PROCS = {
    "HYPERACTOR_MESH_BOOTSTRAP_MODE",
    "HYPERACTOR_EXECUTION_ID",
    "HYPERACTOR_PROCESS_NAME",
    "MONARCH_CLIENT_TRACE_ID",
}
_LOOK_EVERY = 0.02  # seconds
_NAMED_WITHIN = 1.0  # seconds
_TAIL = 2000  # characters of the agent's log, in errors
_LATE = "see whether that host is served, and can be reached from here; or give it more time"


def join(
    root: str | os.PathLike[str],
    *,
    cluster: str | Cluster | None = None,
    secret: str | bytes | None = None,
    owner: bool = True,
    timeout: float = 60.0,
    shared: bool = False,
    promote_after: float | None = PROMOTE_AFTER,
    remove_after: float | None = None,
) -> Cluster:
    """Joins this host's store to a cluster. Returns when it is a member. Call it on every rank, or one of each host.

    The host's first rank starts an agent, which outlives it. Then `memstore.open(root)` in any process of the host sees
    the keys of all hosts. It may be called again, also in forked children.

    Args:
        root: the store's folder on this host, which is created if it doesn't exist.
        cluster: the address of a member, ``tcp://IP:PORT``, the same on all hosts of a first start: its host makes the
            cluster. None: the host that torchrun's MASTER_ADDR names, at the port MEMSTORE_PORT, or 7411. This host
            listens at the same port, at the address from which it reaches that one; MEMSTORE_ADDRESS names another one.
            MEMSTORE_TRANSPORT says how large values are sent, as ``memstore serve --transport`` does. Or the `Cluster`
            of a host, which a process there has sent, and which has the secret too.
        secret: what all hosts share, 32 to 4,096 bytes (a text is taken in UTF-8); it is kept in ROOT/secret. None:
            that of the `Cluster`; or what is there, or in the file that MEMSTORE_SECRET_FILE names.
        owner: False: what this host's processes put first is owned by another host, as on one that comes and goes.
        timeout: seconds. The named host must have called it too by then.
        shared: the folder is on storage that all hosts mount, and the same one on all of them; the named host makes
            the store there. See docs/shared-storage.md.
        promote_after: seconds, 1 or more, for which a majority of the hosts may not hear the seed: then a deputy makes
            itself the seed. None: a person does so, by ``memstore promote``.
        remove_after: seconds, 30 or more, for which a host may be silent: then the seed removes it, and what it has put
            is lost. **Hosts that don't hear a majority for so long refuse all calls with FencedError.** None: a person,
            or the launcher, removes hosts. See docs/hosts.md.

    Returns:
        The cluster.

    Raises:
        NotServedError: the host can't be a member; the message says why.
        StoreTimeoutError: it isn't a member in time, for example because the named host doesn't answer.
        ValueError: there is neither `cluster` nor MASTER_ADDR; or an address is invalid.
        SecretError: the secret is too short or too long.
        NotAStoreError, PermissionDeniedError: as `memstore.open` of the folder. Its other errors are raised too.
    """
    deadline = deadline_after(timeout)
    promote_after = check_silence(promote_after, remove_after)
    path = absolute_path(root)
    secret, others = given_secret(secret), list[Address]()
    if isinstance(cluster, Cluster):
        secret = secret or cluster.secret
        others = [parse_own_address(member.address) for member in cluster.roster().members]
        named = parse_own_address(cluster.address)
    else:
        named = _named_address(cluster)
    own = _own_address(named)
    creation = Creation(shared="copy" if shared else None)
    if shared and own != named:
        wait_for_storage(path, deadline)
    with gone_if_new(path):
        with resource_errors(path):
            close_root(open_root(path, "a", creation, timeout))
        path = os.path.realpath(path)
        with turn(path, deadline, timeout):
            if not is_served_on(path, deadline, timeout):
                if secret is not None and secret_of(path, and_environment=False) != secret:
                    write_secret(path, secret)
                start_agent(
                    path,
                    own,
                    [named, *others],
                    deadline,
                    timeout,
                    owner=owner,
                    shared=shared,
                    promote_after=promote_after,
                    remove_after=remove_after,
                )
            elif secret is not None and secret_of(path) != secret:
                raise NotServedError(f"{path} is served already, with another secret or none: end that agent first")
        standing = wait_until_member(path, deadline, timeout)
    if own != named:
        _check_cluster(path, standing, str(named), deadline)
    return Cluster(path)


def given_secret(secret: str | bytes | None) -> bytes | None:
    """Returns the bytes of a secret that a user has given. Raises SecretError: it is too short or too long."""
    if secret is None:
        return None
    found = secret.encode() if isinstance(secret, str) else secret
    check_size(found, "that was given")
    return found


def _check_cluster(path: str, standing: Standing, named: str, deadline: float) -> None:
    """Raises NotServedError if the root is a member of another cluster than the host that was named."""
    if named in (member.address for member in standing.roster.members):
        return
    try:
        other = Cluster.at(named, secret=secret_of(path), timeout=min(_NAMED_WITHIN, deadline - time.monotonic()))
    except (HomeUnavailableError, NotServedError, LinkRefusedError):
        return  # it has left, or it is lost
    if other.roster().cluster != standing.roster.cluster:
        raise NotServedError(
            f"{path} is served already, in the cluster of the seed {standing.roster.seed_address}, and not in that of "
            f"{named}: jobs that share a root name the same host; else end that agent, and take an empty folder"
        )


# --- addresses --------------------------------------------------------------------------------------------------------


def _named_address(cluster: str | None) -> Address:
    if cluster is not None:
        return parse_own_address(cluster)
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get(PORT_VARIABLE, str(PORT))
    if not master:
        raise ValueError(
            "which host is to be asked? Neither cluster= nor MASTER_ADDR (which torchrun sets) says it: give "
            "join(cluster='tcp://IP:PORT'), the same on all hosts: that one makes the cluster"
        )
    if not port.isdecimal():
        raise ValueError(f"{PORT_VARIABLE} is a port, and not {port!r}")
    try:
        found = socket.getaddrinfo(master, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotServedError(f"MASTER_ADDR {master!r} is no host that can be found: {error}") from None
    ip = str(found[0][4][0])
    address = parse_address(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
    if address.is_loopback and _has_other_hosts():
        raise NotServedError(
            f"MASTER_ADDR {master!r} is {ip} here, which other hosts can't reach: give join(cluster='tcp://IP:PORT'), "
            "the same on all hosts"
        )
    return address


def _has_other_hosts() -> bool:
    """Returns whether there are any, as torchrun, or Slurm, says."""
    return _number("WORLD_SIZE") > _number("LOCAL_WORLD_SIZE") or _number("SLURM_JOB_NUM_NODES") > 1


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 1


def _own_address(seed: Address) -> Address:
    """Returns that of this host: the named one, if it is one of this host's; else the one from which it is reached."""
    named = os.environ.get(ADDRESS_VARIABLE)
    if named:
        return parse_own_address(named)
    with socket.socket(seed.family, socket.SOCK_DGRAM) as sock:
        with contextlib.suppress(OSError):
            sock.bind(Address(seed.ip, 0, seed.scope).for_socket())
            return seed
        try:
            sock.connect(seed.for_socket())  # sends nothing
        except OSError as error:
            raise NotServedError(f"this host has no way to the seed {seed}: {error.strerror}") from None
        ip, _, scope = str(sock.getsockname()[0]).partition("%")
    return Address(ip, seed.port, scope or seed.scope)


# --- whoever comes first ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def turn(path: str, deadline: float, timeout: float) -> Generator[None]:
    """Lets one process of the host in at a time."""
    name = f"{state_folder(path)}/{LOG}"
    gone = NotServedError(f"{path} was removed just now, by another process of this host that could not join")
    try:
        fd = syscalls.open_file(name, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        raise gone from None
    try:
        while not syscalls.lock_exclusive(fd):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"{path}: another process of this host has not joined within {timeout:g} s")
            time.sleep(_LOOK_EVERY)
        try:
            if not os.path.lexists(name):
                raise gone
            yield
        finally:
            syscalls.unlock(fd)  # a child that was forked meanwhile has the file open too
    finally:
        syscalls.close(fd)


def start_agent(
    path: str,
    own: Address,
    named: Sequence[Address],
    deadline: float,
    timeout: float,
    *,
    new: bool = False,
    moved: bool = False,
    owner: bool = True,
    transport: str | None = None,
    shared: bool = False,
    promote_after: float | None = None,
    remove_after: float | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> None:
    """Starts an agent. Returns when it says that the host is a member. It is ended if that takes too long.

    Args:
        named: hosts of the cluster; this one may be among them.
        new, moved, owner: as of `serve`.
        transport: as of `serve`; None: as MEMSTORE_TRANSPORT says, or "auto".
        shared: the store is on storage that all hosts mount.
        promote_after, remove_after: as of `serve`.
        told: gets its pid, as soon as there is one.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_MONARCH_PROCS}
    reader, writer = os.pipe()
    flags = {"--new": new, "--moved": moved, "--no-owner": not owner, "--shared": shared}
    words = [
        *(flag for flag, is_set in flags.items() if is_set),
        *(f"--join={address}" for address in named),
        f"--transport={transport or os.environ.get(TRANSPORT_VARIABLE) or 'auto'}",
        *([] if promote_after is None else [f"--promote-after={promote_after}"]),
        *([] if remove_after is None else [f"--remove-after={remove_after}"]),
        f"--ready-fd={writer}",
    ]
    try:
        with open(f"{state_folder(path)}/{LOG}", "ab") as output:
            said_before = os.fstat(output.fileno()).st_size
            agent = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, path, str(own), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
                start_new_session=True,
                env=environment,
            )
        told(agent.pid)
        os.close(writer)
        writer = -1
        refusal = _refusal(reader, deadline)
        if refusal is None:
            said = _tail(path, said_before)
            agent.terminate()
            agent.wait()
            of = f" of the cluster of {', '.join(map(str, named))}" if named else ""
            raise StoreTimeoutError(f"{own} is no member{of} after {timeout:g} s: {_LATE}{said}")
        if refusal:
            agent.wait()
            raise NotServedError(refusal)
        agent.returncode = 0  # it is nobody's child to wait for, and outlives this process
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _refusal(reader: int, deadline: float) -> str | None:
    """Waits for news of an agent. Returns why it ends; empty: the host is a member; None: it isn't yet."""
    lines = Lines(reader)
    while True:
        ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            return None
        told = lines.read()
        if told is None:
            return "the agent ended, and did not say why"
        for news in told:
            return "" if news.kind is Kind.READY else news.text


def is_served_on(path: str, deadline: float, timeout: float) -> bool:
    """Returns whether an agent serves the root, and goes on to. Waits for one that was told to end."""
    while is_served(path):
        if not is_about_to_end(path):
            return True
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{path}: its agent was told to end, and still runs after {timeout:g} s")
        time.sleep(_LOOK_EVERY)
    return False


def wait_until_member(path: str, deadline: float, timeout: float) -> Standing:
    """Waits until a root that is served is a member. Returns what it knows of its cluster then."""
    while True:
        standing = standing_at(path, timeout)
        if standing is not None:
            return standing
        if not is_served(path):
            raise NotServedError(f"{path}: its agent has ended{_tail(path)}")
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{path}: this host is no member after {timeout:g} s: {_LATE}{_tail(path)}")
        time.sleep(_LOOK_EVERY)


def _tail(path: str, since: int = 0) -> str:
    """Returns what the agent has said, from this byte of its log on: before are the lines of former ones."""
    try:
        with open(f"{state_folder(path)}/{LOG}", "rb") as log:
            log.seek(since)
            text = log.read().decode(errors="replace")[-_TAIL:].strip()
    except OSError:
        text = ""
    return f"; its agent said: {text}" if text else ""
