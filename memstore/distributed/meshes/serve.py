"""memstore.serve: the hosts of Monarch meshes become the hosts of one store.

1. An index actor is spawned in each process of the meshes; for a HostMesh, in one process of each host. It makes the
   root, and says how it stands. Of those that see one folder the first one is that host's (`plan_of`).
2. Where there are several hosts, the others try at which address they reach the first one, the seed (`Reception`,
   `try_all`); with `join`, at which of their own addresses they reach the seed that there is.
3. Each index actor writes the secret to ROOT/secret, and starts the host's agent, detached: a session of its own. It
   answers once its host is a member.
4. When all have settled, the index actors stay, and start agents again that were killed. When their mesh is stopped,
   they end the agents. With `keep` they are ended now, and the agents go on.

If one fails, or time runs out, the agents that were started here are ended, and the index actors with them. Stores that
were made are removed, unless their hosts are members by then. If this process is killed, agents go on: to serve the
mesh again goes on with them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from memstore import errors
from memstore._threads import between_forks
from memstore._wording import an_instance
from memstore.distributed.links import hello_of_this_process, parse_address, read_secret
from memstore.distributed.meshes.messages import (
    LONGEST_ROOT,
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
    decode_report,
    encode,
    last_line,
)
from memstore.distributed.rules import Roster
from memstore.distributed.serving import (
    PROMOTE_AFTER,
    Cluster,
    check_silence,
    given_secret,
    known_cluster,
    need_monarch,
    policy_of,
)
from memstore.engine import absolute_path, boot_id, deadline_after
from memstore.errors import MemstoreError, NotServedError, StoreTimeoutError

Transport = Literal["auto", "rdma", "tcp", "monarch"]

_SECRET = 32  # bytes
_LOOPBACK = "127.0.0.1"
_UNDO_WITHIN = 8.0  # seconds
_GRACE = 2.0  # seconds that an answer may be late, by an index actor that knows its time
_STOP_WITHIN = 5.0  # seconds

Answer = TypeVar("Answer", bound=Report)


def serve(
    mesh: Any,
    root: str,
    *,
    join: Cluster | None = None,
    keep: bool = False,
    owner: bool = True,
    transport: Transport = "auto",
    secret: str | None = None,
    promote_after: float | None = PROMOTE_AFTER,
    remove_after: float | None = None,
    replicas: int | Literal["async"] | None = None,
    on_missing: Literal["fail", "warn"] = "fail",
    timeout: float = 60.0,
) -> Cluster:
    """Makes one store of the hosts of Monarch meshes. Returns when all of them are members.

    On each host an agent is started. Then any process of these hosts opens the store by `memstore.open(root)`, without
    Monarch and without environment variables. The first host of the first mesh is the seed. It may be called again for
    the same hosts, and for these and new ones.

    Args:
        mesh: a `HostMesh`, a `ProcMesh`, a slice of either, or a list of these. Processes that share a folder, since
            they are on one machine, are one host of the store.
        root: the store's folder on each host, which is created where there is none. A relative one starts
            at this process's working directory.
        join: a cluster that runs already, which the hosts of this mesh join. It may come from another process: a
            `Cluster` can be pickled.
        keep: the agents go on until `Cluster.stop`. False: the agent of a host ends when its mesh is stopped, or this
            job ends, and is started again if it is killed before. If this process is killed, agents go on in any case.
        owner: whether these hosts may own keys, which they do by putting them first. False suits hosts that may go at
            any time: what they put first is owned by another host.
        transport: how bytes are sent between hosts: "tcp"; "rdma", which is experimental, since it has not run on
            hardware yet; "monarch", which is "rdma" over Monarch's TCP fallback, for tests. "auto": "rdma" on hosts
            that have ibverbs, otherwise "tcp". Hosts that have no transport in common use TCP.
        secret: the secret that all hosts share, 32 to 4,096 bytes of UTF-8. None: the one that MEMSTORE_SECRET_FILE
            names in this environment, or the one that the hosts have already, or a new, random one. It is sent in a
            message of Monarch, and kept in ROOT/secret on each host.
        promote_after: seconds, 1 or more, for which a majority of the hosts may not hear the seed: then a deputy makes
            itself the seed. None: a person does so, by ``memstore promote``.
        remove_after: seconds, 30 or more, for which a host may be silent: then the seed removes it, and what it has put
            is lost. **Hosts that don't hear a majority for so long refuse all calls with FencedError.** None: a person
            removes hosts, or this job does, by `Cluster.remove`. See docs/hosts.md.
        replicas: on how many hosts each value is to lie, from now on and for all hosts of the store, as
            `Store.set_policy` states it. None: as the store has it, which is 1 of a new one.
        on_missing: what becomes of a put that finds no second host.
        timeout: seconds. If it takes longer, or fails, the agents that it started are ended, which may take some more
            seconds.

    Returns:
        The cluster.

    Raises:
        NotServedError: a host can't be a member; or the roots belong to other hosts; or this job has served the root on
            other hosts, and `join` is None; or a host has no ibverbs, and `transport` is "rdma". The message names it.
        StoreTimeoutError: it took longer; the message names the hosts that it waited for.
        MissingPackageError: Monarch isn't installed: ``pip install 'torchmonarch>=0.7,<0.8'``.
        SecretError: the secret is too short or too long.
        NotAStoreError, PermissionDeniedError: as `memstore.open` of the folder, with the host's name. Its other errors
            are raised too.
    """
    deadline = deadline_after(timeout)
    path = absolute_path(root)
    _check_arguments(path, transport, join, owner)
    promote_after = check_silence(promote_after, remove_after)
    policy_of("", replicas, on_missing)
    given = given_secret(secret) or (read_secret() if join is None else join.secret)
    actors = IndexActors(mesh, deadline)
    call = _ServeCall(actors, path, join, transport, given, deadline, keep, owner, promote_after, remove_after)
    try:
        found = call.run()
    except BaseException:
        actors.close()
        raise
    if keep:
        actors.close()
    if replicas is not None:
        found.set_policy(replicas=replicas, on_missing=on_missing, timeout=max(deadline - time.monotonic(), 1.0))
    return found


def _check_arguments(path: str, transport: str, join: object, owner: bool) -> None:
    if len(path) > LONGEST_ROOT:
        raise ValueError(f"a root of {len(path):,} characters: a path has {LONGEST_ROOT:,} at most")
    if transport not in get_args(Transport):
        raise ValueError(f"transport {transport!r} is none of {', '.join(get_args(Transport))}")
    if join is not None and not isinstance(join, Cluster):
        raise TypeError(f"join is a Cluster, as memstore.serve returns it, and not {an_instance(join)}")
    if join is None and not owner:
        raise ValueError(
            "owner=False is for hosts that join others, which own the keys: serve those first, and give join="
        )


@dataclass(slots=True, repr=False)  # its repr would show the secret
class _ServeCall:
    """One call of `serve`."""

    actors: IndexActors
    root: str
    join: Cluster | None
    transport: Transport
    given: bytes | None
    deadline: float
    keeps: bool
    is_owner: bool
    promote_after: float | None
    remove_after: float | None

    def run(self) -> Cluster:
        look, join = LookAtRoot(VERSION, self.root), self.join
        try:
            seen = self.actors.ask(dict.fromkeys(range(self.actors.count), look), HostSeen, self.deadline)
            for rank, one in seen.items():
                self.actors.name(rank, one.name)
            plan = plan_of(seen) if join is None else plan_of(seen, join.roster(), join.secret)
            self._check_alone(plan)
            secret = self._secret(plan)
            is_here = _folder(self.root) in {one.folder for one in seen.values()}
            roster = self._start(plan, self._ips(plan, seen, is_here), secret)
            cluster = known_cluster(self.root if is_here else "", roster, secret or None)
            self.actors.note_cluster(self.root, cluster)
        except BaseException:
            self.actors.try_ask(Undo(), OrderDone, _UNDO_WITHIN)
            raise
        return cluster

    def _check_alone(self, plan: Plan) -> None:
        """Raises NotServedError where this job has served the root on other hosts, and they still run."""
        known = None if plan.roster is not None else self.actors.find_cluster(self.root)
        if known is None:
            return
        living = [host.address for host in known.status().hosts if host.alive]
        if living:
            raise NotServedError(
                f"this job has served {self.root} on other hosts, {', '.join(living)}, and a second store of that "
                "name would share nothing with it: memstore.serve(mesh, root, join=cluster) makes these hosts further "
                "ones of it, where cluster is what the first call has returned; or take another root"
            )

    def _secret(self, plan: Plan) -> bytes:
        """Returns the secret of all hosts; empty: their cluster has none. A cluster that exists gets no new one."""
        if plan.secret and self.given not in (None, plan.secret):
            raise NotServedError(
                "the roots are served, or were, with another secret than the one that was given: end the agents "
                "(Cluster.stop), and remove ROOT/secret on each host"
            )
        if plan.roster is None or self.given or plan.secret:
            return self.given or plan.secret or secrets.token_bytes(_SECRET)
        if plan.new:
            raise NotServedError(
                f"the cluster of the seed {plan.roster.seed_address} has no secret, and a host that others can reach "
                "is served without one only by `memstore serve --insecure --join`: serve these so, or give all hosts "
                "of the cluster a ROOT/secret, and serve them again"
            )
        return b""

    def _ips(self, plan: Plan, seen: dict[int, HostSeen], is_here: bool) -> dict[int, tuple[str, int]]:
        """Returns where hosts that have no address yet are to listen, by rank: IP and port."""
        if not plan.new:
            return {}
        if plan.seed is None:
            ips = self._ips_towards_seed(plan, seen)
        elif plan.leaders == (plan.seed,) and is_here and not seen[plan.seed].is_networked:
            ips = {plan.seed: _LOOPBACK}
        else:
            ips = self._reachable_ips(plan, plan.seed, seen)
        return {rank: (ips[rank], seen[rank].port) for rank in plan.new}

    def _ips_towards_seed(self, plan: Plan, seen: dict[int, HostSeen]) -> dict[int, str]:
        """Returns of each new host the address from which it reaches the seed, which is on none of these hosts."""
        assert plan.roster is not None
        order = Try((plan.roster.seed_address,), b"", self._milliseconds())
        tried = self.actors.ask(dict.fromkeys(plan.new, order), Reached, self.deadline)
        failed = [f"{seen[rank].name}: {one.whys[0]}" for rank, one in tried.items() if not one.froms[0]]
        if failed:
            raise NotServedError(
                f"the seed {plan.roster.seed_address} can't be reached ({'; '.join(failed)}): see whether its agent "
                "runs, and open its port between the hosts"
            )
        return {rank: seen[rank].ips[0] if seen[rank].is_named else one.froms[0] for rank, one in tried.items()}

    def _reachable_ips(self, plan: Plan, first: int, seen: dict[int, HostSeen]) -> dict[int, str]:
        """Returns of each host that leads: an address at which, or from which, it and the seed reach each other."""
        ask, seed = self.actors.ask, seen[first]
        if plan.roster is not None:
            ips, port = (_ip_of(plan.roster.seed_address),), 0
        else:
            ips, port = seed.ips, seed.port
        others = [rank for rank in plan.leaders if rank != first]
        at = ask({first: Receive(ips, port)}, Receives, self.deadline)[first]
        tried: dict[int, Reached] = {}
        if others:
            order = Try(at.addresses, at.token, self._milliseconds())
            tried = ask(dict.fromkeys(others, order), Reached, self.deadline)
        ask({first: ReceiveNoMore()}, OrderDone, self.deadline)
        best = reached_by_all(seed.name, at.addresses, {seen[rank].name: one for rank, one in tried.items()})
        found = {rank: one.froms[best] for rank, one in tried.items()}
        named = {rank: seen[rank].ips[0] for rank in others if seen[rank].is_named}
        return {**found, **named, first: _ip_of(at.addresses[best])}

    def _start(self, plan: Plan, places: dict[int, tuple[str, int]], secret: bytes) -> Roster:
        """Starts the agents, that of the seed first: the others are told its address."""
        ask, first = self.actors.ask, plan.leaders[0]
        named = () if plan.roster is None else tuple(member.address for member in plan.roster.members)

        def order(rank: int, *, is_new: bool = False) -> StartAgent:
            ip, port = places.get(rank) or (_LOOPBACK, 0)
            left, address, transport = self._milliseconds(), plan.addresses.get(rank, ""), self.transport
            how = (transport, self.is_owner, self.keeps, self.promote_after, self.remove_after)
            return StartAgent(ip, port, address, named, is_new, secret, *how, left)

        started: dict[int, Started] = {}
        if plan.seed is not None:
            started = ask({plan.seed: order(plan.seed, is_new=plan.roster is None)}, Started, self.deadline)
            named = named or (started[plan.seed].address,)
        others = {rank: order(rank) for rank in plan.leaders if rank != plan.seed}
        if others:
            started |= ask(others, Started, self.deadline)
        for lost in plan.replaced:  # its folder is gone, as this host sees: nobody comes back under this id
            assert plan.roster is not None
            seconds = self._milliseconds() / 1000
            known_cluster("", plan.roster, secret or None).remove(lost.hex(), force=True, timeout=seconds)
        settle = Settle(tuple(one.address for one in started.values()), self._milliseconds())
        return ask({first: settle}, Settled, self.deadline)[first].roster

    def _milliseconds(self) -> int:
        return max(int((self.deadline - time.monotonic()) * 1000), 1)


def _folder(path: str) -> Folder | None:
    """Returns the folder of this process; None: it has no such folder."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Folder(boot_id(), status.st_dev, status.st_ino)


def _ip_of(address: str) -> str:
    return parse_address(address).ip


# --- index actors -----------------------------------------------------------------------------------------------------


class IndexActors:
    """The index actors of meshes, as `serve` gives them orders, by rank through all meshes.

    They live until `close`, or until their mesh is stopped, or this process ends.

    Attributes:
        count: how many.

    Raises:
        MissingPackageError: Monarch isn't installed.
        TypeError: it is no mesh of hosts or processes.
        StoreTimeoutError: Monarch has not reached all of the hosts.
        NotServedError: Monarch can't start processes there: the mesh was shut down, for instance.
    """

    def __init__(self, mesh: Any, deadline: float) -> None:
        need_monarch(hello_of_this_process().monarch, "memstore.serve")
        with between_forks():
            from monarch.actor import HostMesh, ProcMesh, this_proc

            from memstore.distributed.meshes.index_actor import Overseer
        meshes = cast("Sequence[Any]", mesh) if isinstance(mesh, list | tuple) else [mesh]
        for one in meshes:
            if not isinstance(one, HostMesh | ProcMesh):
                raise TypeError(
                    f"memstore.serve takes a HostMesh or a ProcMesh of Monarch, such as this_host() or "
                    f"attach_to_workers(...), or a list of these, and not {an_instance(one)}; without Monarch, each "
                    "host runs `memstore serve`"
                )
        if not meshes:
            raise ValueError("memstore.serve takes one mesh at least")
        for one in meshes:
            try:
                one.initialized.get(max(deadline - time.monotonic(), 0.1))
            except TimeoutError:
                raise StoreTimeoutError(
                    "Monarch has not reached all hosts of the mesh in time, and doesn't say which one is missing: see "
                    "whether the worker of each runs, at the address that the mesh was given"
                ) from None
            except Exception as error:  # of any class: Monarch's are many, and its own affair
                raise NotServedError(f"Monarch could not attach to the mesh: {last_line(error)}") from error
        self._overseer: Any = this_proc().spawn("memstore_overseer", Overseer)
        self._deadline = deadline
        self._names: dict[int, str] = {}
        self._dead: set[int] = set()
        try:
            self.count: int = self._get(self._overseer.spawn.call_one(list(meshes)), deadline - time.monotonic())
        except BaseException:
            self.close()
            raise

    def name(self, rank: int, name: str) -> None:
        """Names the host in errors from now on."""
        self._names[rank] = name

    def ask(self, orders: Mapping[int, Order], kind: type[Answer], deadline: float) -> dict[int, Answer]:
        """Gives orders, by rank. Returns when all have answered.

        Raises:
            NotServedError, or another one of memstore.errors: an index actor could not do it, or is dead. It names it.
            StoreTimeoutError: an index actor did not answer in time.
        """
        seconds = max(deadline - time.monotonic(), 0.0) + _GRACE
        sent = {rank: encode(order) for rank, order in orders.items()}
        heard = self._get(self._overseer.ask.call_one(sent, seconds), seconds + _GRACE)
        found: dict[int, Answer] = {}
        failures: list[MemstoreError] = []
        for one in heard:
            if not one.report:
                self._dead.add(one.rank)
            report = decode_report(one.report) if one.report else HostFailed("", NotServedError.__name__, one.why)
            if isinstance(report, kind):
                found[one.rank] = report
            elif isinstance(report, HostFailed):
                failures.append(_error(report.host or self._name(one.rank), report))
        if failures:
            raise failures[0]
        silent = [self._name(rank) for rank in orders if rank not in found]
        if silent:
            raise StoreTimeoutError(f"{', '.join(silent)}: no answer of the index actor there in time")
        return found

    def try_ask(self, order: Order, kind: type[Answer], seconds: float) -> None:
        """Gives an order to all that live. Monarch ends this process for a message to one that doesn't."""
        living = [rank for rank in range(self.count) if rank not in self._dead]
        try:
            self.ask(dict.fromkeys(living, order), kind, time.monotonic() + seconds)
        except (MemstoreError, TimeoutError):
            return

    def find_cluster(self, root: str) -> Cluster | None:
        """Returns what this job has served under a root, as `note_cluster` was given it; None: nothing."""
        return self._get(self._overseer.find.call_one(root), self._deadline - time.monotonic())

    def note_cluster(self, root: str, cluster: Cluster) -> None:
        self._get(self._overseer.note.call_one(root, cluster), self._deadline - time.monotonic())

    def close(self) -> None:
        """Ends them, the processes that were made for them, and what they have open; no agents."""
        try:
            self._overseer.end.call_one().get(_STOP_WITHIN)
            self._overseer.stop().get(_STOP_WITHIN)
        except Exception:
            return

    def _name(self, rank: int) -> str:
        return self._names.get(rank) or f"host {rank} of the mesh"

    def _get(self, future: Any, seconds: float) -> Any:
        try:
            return future.get(max(seconds, 0.1))
        except TimeoutError:
            raise StoreTimeoutError("Monarch's index actors did not come up in time") from None
        except Exception as error:  # as above
            raise NotServedError(f"Monarch could not start index actors on the mesh: {last_line(error)}") from error


def _error(name: str, failed: HostFailed) -> MemstoreError:
    """As it was raised on the host, with its name."""
    found = getattr(errors, failed.error, None)
    make: Callable[[str], MemstoreError] = NotServedError
    if isinstance(found, type) and issubclass(found, MemstoreError):
        make = found
        text = failed.text
    else:
        text = failed.text if failed.error == NotServedError.__name__ else f"{failed.error}: {failed.text}"
    return make(f"{name}: {text}")


# --- Who is who ------------------------------------------------------------------------------------------------------
# Finds the hosts of a mesh: one for each folder, the cluster that these belong to already, and its secret.
#
# Decided from what the index actors have seen, before anything is started.

_ANOTHER = "take another root, or end the agents, and remove the old folders"


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranks are those of the meshes.

    Attributes:
        leaders: of the hosts of the store, in the meshes' order: of ranks that see one folder, the first.
        seed: the rank whose host is the seed; None: the seed is on none of these hosts, which join it.
        roster: of the cluster that exists already; None: none does.
        addresses: of ranks whose hosts have one already, or take a lost one's.
        secret: that the cluster has; empty: it has none yet.
        replaced: ids of members whose folders are lost, and whose places hosts with empty ones take.
    """

    leaders: tuple[int, ...]
    seed: int | None
    roster: Roster | None
    addresses: Mapping[int, str]
    secret: bytes
    replaced: tuple[bytes, ...] = ()

    @property
    def new(self) -> tuple[int, ...]:
        """Ranks whose hosts have no address yet."""
        return tuple(rank for rank in self.leaders if rank not in self.addresses)


def plan_of(seen: Mapping[int, HostSeen], join: Roster | None = None, secret: bytes | None = None) -> Plan:
    """Decides who is who.

    Args:
        seen: by rank.
        join: the cluster that these hosts are to belong to; None: that of their roots, or a new one of them alone.
        secret: of `join`.

    Raises NotServedError: roots are of several clusters, or of one with other hosts than these; or were removed.
    """
    leaders = _leaders(seen)
    old = {rank: seen[rank].roster for rank in leaders}
    rosters = {rank: roster for rank, roster in old.items() if roster is not None}
    for rank in rosters:
        if seen[rank].is_removed:
            raise NotServedError(f"{seen[rank].name}: its root was removed from its cluster: {_ANOTHER}")
    if not rosters and join is None:
        return Plan(leaders, leaders[0], None, {}, b"")
    known = [*rosters.values(), *(() if join is None else (join,))]
    if len({roster.cluster for roster in known}) > 1:
        names = [f"{seen[rank].name} to that of {roster.seed_address}" for rank, roster in rosters.items()]
        names += [] if join is None else [f"and join= is that of {join.seed_address}"]
        raise NotServedError(f"the roots belong to several clusters, {', '.join(names)}: {_ANOTHER}")
    roster = max(known, key=lambda one: one.position)
    addresses, lost = _addresses(seen, rosters, roster)
    seed = next((rank for rank, one in addresses.items() if one == roster.seed_address and rank in rosters), None)
    if join is None and lost:
        raise NotServedError(
            f"the cluster of the seed {roster.seed_address} has other hosts than the mesh: {', '.join(lost)} too. "
            "Serve these as further hosts of it, serve(mesh, root, join=cluster); or a mesh of all; or remove those "
            f"that are dead (memstore remove); or {_ANOTHER}"
        )
    if seed is None and join is None:
        raise NotServedError(
            f"the roots belong to the cluster of the seed {roster.seed_address}, whose own root is not on these "
            f"hosts, or is lost: {_ANOTHER}"
        )
    new = [seen[rank].name for rank in leaders if rank not in addresses]
    if new and parse_address(roster.seed_address).is_loopback:
        raise NotServedError(
            f"{', '.join(new)} can't join the host that was served for itself alone, at {roster.seed_address}: "
            f"{_ANOTHER}"
        )
    secrets = {*(seen[rank].secret for rank in rosters), *(() if join is None else (secret or b"",))}
    if len(secrets) > 1:
        raise NotServedError("the hosts of the cluster have several secrets: end the agents, and copy one ROOT/secret")
    taken = {addresses[rank] for rank in addresses if rank not in rosters}
    replaced = tuple(member.id for member in roster.members if member.address in taken)
    return Plan(leaders, seed, roster, addresses, secrets.pop(), replaced)


def _leaders(seen: Mapping[int, HostSeen]) -> tuple[int, ...]:
    first: dict[object, int] = {}
    for rank in sorted(seen):
        first.setdefault(seen[rank].folder, rank)
    return tuple(first.values())


def _addresses(
    seen: Mapping[int, HostSeen], rosters: Mapping[int, Roster], roster: Roster
) -> tuple[dict[int, str], list[str]]:
    """Returns the addresses of members, and those of members that aren't among these hosts.

    A host that came back with an empty folder takes the place that was its own.
    """
    found: dict[int, str] = {}
    for rank in rosters:
        member = roster.member(seen[rank].member)
        if member is None:
            raise NotServedError(f"{seen[rank].name}: its root was removed from its cluster: {_ANOTHER}")
        found[rank] = member.address
    lost = [member.address for member in roster.members if member.address not in found.values()]
    for rank in _leaders(seen):
        if rank not in found:
            place = next((one for one in lost if parse_address(one).ip in seen[rank].ips), None)
            if place is not None:
                found[rank] = place
                lost.remove(place)
    return found, lost


def reached_by_all(seed: str, addresses: Sequence[str], tried: Mapping[str, Reached]) -> int:
    """Which of the seed's addresses all others have reached: the first such one.

    Args:
        seed: its name.
        tried: by host's name, in the order of the addresses.

    Raises NotServedError: there is none; it names the hosts, and what they met.
    """
    for number in range(len(addresses)):
        if all(one.froms[number] for one in tried.values()):
            return number
    met = "; ".join(
        f"{name}: "
        + ", ".join(f"{address} {why or 'reached'}" for address, why in zip(addresses, one.whys, strict=True))
        for name, one in tried.items()
        if not all(one.froms)
    )
    raise NotServedError(
        f"the first host of the mesh, {seed}, has no address at which all others reach it ({met}): open the port "
        "between the hosts; or name its address by MEMSTORE_ADDRESS, in the environment of its worker"
    )
