"""memstore.serve: the hosts of a Monarch mesh become the hosts of one store.

1. A launcher is spawned on each host of the mesh. It makes the root, and says how it stands (`plan.py`).
2. Where there are several hosts, the others try at which address they reach the first one, the seed (`reach.py`).
3. Each launcher writes the secret to ROOT/secret, and starts the host's agent, detached: a session of its own. It
   answers once its host is a member.
4. When all have settled, the launchers are ended. The agents go on.

If one fails, or time runs out, the agents that were started here are ended, and the launchers with them. Stores that
were made are removed, unless their hosts are members by then. If this process is killed meanwhile, agents that were
started may stay: to serve the mesh again goes on with them.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any, Literal, get_args

from memstore.distributed.links import check_size, parse_address, read_secret
from memstore.distributed.meshes.far_cluster import FarCluster
from memstore.distributed.meshes.launchers import Launchers
from memstore.distributed.meshes.messages import (
    LONGEST_ROOT,
    VERSION,
    Done,
    Folder,
    Look,
    Reached,
    Receive,
    ReceiveNoMore,
    Receives,
    Seen,
    Settle,
    Settled,
    Start,
    Started,
    Try,
    Undo,
)
from memstore.distributed.meshes.plan import Plan, plan_of, reached_by_all
from memstore.distributed.serving import Cluster
from memstore.engine import absolute_path, boot_id, deadline_after
from memstore.errors import NotServedError

Transport = Literal["auto", "rdma", "tcp", "monarch"]

_SECRET = 32  # bytes
_LOOPBACK = "127.0.0.1"
_UNDO_WITHIN = 8.0  # seconds


def serve(
    host_mesh: Any, root: str, *, transport: Transport = "auto", secret: str | None = None, timeout: float = 60.0
) -> Cluster:
    """Makes one store of a Monarch mesh's hosts. Returns when all of them are members.

    On each host a detached agent is started: it outlives the mesh and its owner, until `Cluster.stop`. Then any process
    of these hosts opens the store by `memstore.open(root)`, without Monarch and without environment variables. The
    first host of the mesh is the seed. It may be called again for the same hosts, and for these and new ones.

    Args:
        host_mesh: a `HostMesh`: `this_host()`, `attach_to_workers(...)`, or one of a job's state. Hosts of it that
            share a folder, since they are processes of one machine, are one host of the store.
        root: the store's folder on each host, which is created where there is none. A relative one starts
            at this process's working directory.
        transport: how bytes are sent between hosts: "tcp"; "rdma", which is experimental, since it has not run on
            hardware yet; "monarch", which is "rdma" over Monarch's TCP fallback, for tests. "auto": "rdma" on hosts
            that have ibverbs, otherwise "tcp". Hosts that have no transport in common use TCP.
        secret: the secret that all hosts share, 32 to 4,096 bytes of UTF-8. None: the one that MEMSTORE_SECRET_FILE
            names in this environment, or the one that the hosts have already, or a new, random one. It is sent in a
            message of Monarch, and kept in ROOT/secret on each host.
        timeout: seconds. If it takes longer, or fails, the agents that it started are ended, which may take some more
            seconds.

    Returns:
        The cluster.

    Raises:
        NotServedError: a host can't be a member, or the roots belong to other hosts; or it has no ibverbs, and
            `transport` is "rdma". The message names the host.
        StoreTimeoutError: it took longer; the message names the hosts that it waited for.
        MissingPackageError: Monarch isn't installed: ``pip install 'torchmonarch>=0.7,<0.8'``.
        SecretError: the secret is too short or too long.
        NotAStoreError, PermissionDeniedError: as `memstore.open` of the folder, with the host's name. Its other errors
            are raised too.
    """
    deadline = deadline_after(timeout)
    path = absolute_path(root)
    if len(path) > LONGEST_ROOT:
        raise ValueError(f"a root of {len(path):,} characters: a path has {LONGEST_ROOT:,} at most")
    if transport not in get_args(Transport):
        raise ValueError(f"transport {transport!r} is none of {', '.join(get_args(Transport))}")
    given = _given(secret)
    launchers = Launchers(host_mesh, deadline)
    try:
        return _Serving(launchers, path, transport, given, deadline).run()
    finally:
        launchers.close()


def _given(secret: str | None) -> bytes | None:
    if secret is None:
        return read_secret()
    found = secret.encode()
    check_size(found, "that was given")
    return found


class _Serving:
    """One call of `serve`."""

    def __init__(
        self, launchers: Launchers, root: str, transport: Transport, secret: bytes | None, deadline: float
    ) -> None:
        self._launchers, self._root, self._transport, self._deadline = launchers, root, transport, deadline
        self._given = secret

    def run(self) -> Cluster:
        look = Look(VERSION, self._root)
        try:
            seen = self._launchers.ask(dict.fromkeys(range(self._launchers.count), look), Seen, self._deadline)
            for rank, one in seen.items():
                self._launchers.name(rank, one.name)
            plan = plan_of(seen)
            secret = self._secret(plan)
            is_here = _folder(self._root) in {one.folder for one in seen.values()}
            view = self._start(plan, self._ips(plan, seen, is_here), secret).view
        except BaseException:
            self._launchers.try_ask(Undo(), Done, _UNDO_WITHIN)
            raise
        return Cluster(self._root) if is_here else FarCluster(self._root, view, secret)

    def _secret(self, plan: Plan) -> bytes:
        if plan.secret and self._given not in (None, plan.secret):
            raise NotServedError(
                "the roots are served, or were, with another secret than the one that was given: end the agents "
                "(Cluster.stop), and remove ROOT/secret on each host"
            )
        return self._given or plan.secret or secrets.token_bytes(_SECRET)

    def _ips(self, plan: Plan, seen: dict[int, Seen], is_here: bool) -> dict[int, tuple[str, int]]:
        """Where hosts that have no address yet are to listen, by rank: IP and port."""
        new = plan.new
        if not new:
            return {}
        if plan.leaders == (plan.seed,) and is_here:
            return {plan.seed: (_LOOPBACK, seen[plan.seed].port)}
        ips = self._reachable_ips(plan, seen)
        return {rank: (ips[rank], seen[rank].port) for rank in new}

    def _reachable_ips(self, plan: Plan, seen: dict[int, Seen]) -> dict[int, str]:
        """Of each host that leads: one at which, or from which, it and the seed reach each other."""
        ask, seed = self._launchers.ask, seen[plan.seed]
        if plan.view is not None:
            ips, port = (_ip_of(plan.view.seed_address),), 0
        else:
            ips, port = seed.ips, seed.port
        others = [rank for rank in plan.leaders if rank != plan.seed]
        at = ask({plan.seed: Receive(ips, port)}, Receives, self._deadline)[plan.seed]
        tried: dict[int, Reached] = {}
        if others:
            order = Try(at.addresses, at.token, self._milliseconds())
            tried = ask(dict.fromkeys(others, order), Reached, self._deadline)
        ask({plan.seed: ReceiveNoMore()}, Done, self._deadline)
        best = reached_by_all(seed.name, at.addresses, {seen[rank].name: one for rank, one in tried.items()})
        found = {rank: one.froms[best] for rank, one in tried.items()}
        named = {rank: seen[rank].ips[0] for rank in others if seen[rank].is_named}
        return {**found, **named, plan.seed: _ip_of(at.addresses[best])}

    def _start(self, plan: Plan, places: dict[int, tuple[str, int]], secret: bytes) -> Settled:
        """The seed first: the others are told its address."""
        ask = self._launchers.ask

        def order(rank: int, seed: str) -> Start:
            ip, port = places.get(rank) or (_LOOPBACK, 0)
            address = plan.addresses.get(rank, "")
            return Start(ip, port, address, seed, secret, self._transport, self._milliseconds())

        seed = plan.addresses.get(plan.seed, "")
        started = ask({plan.seed: order(plan.seed, seed)}, Started, self._deadline)
        seed = started[plan.seed].address
        others = {rank: order(rank, seed) for rank in plan.leaders if rank != plan.seed}
        if others:
            started |= ask(others, Started, self._deadline)
        settle = Settle(tuple(one.address for one in started.values()), self._milliseconds())
        return ask({plan.seed: settle}, Settled, self._deadline)[plan.seed]

    def _milliseconds(self) -> int:
        return max(int((self._deadline - time.monotonic()) * 1000), 1)


def _folder(path: str) -> Folder | None:
    """Of this process; None: it has no such folder."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Folder(boot_id(), status.st_dev, status.st_ino)


def _ip_of(address: str) -> str:
    return parse_address(address).ip
