"""Cluster: the hosts that serve one store, seen from one of them. And how a dead one is removed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec

from memstore._info import ClusterStatus, HostStatus
from memstore._parsing import UNDECODABLE
from memstore._wording import shown, table_html
from memstore.distributed.actors import FindActor, FoundActor
from memstore.distributed.links import secret_of
from memstore.distributed.rules import IsView, Member, Refused, Remove, Standing, View
from memstore.distributed.serving.agent_lock import is_served
from memstore.distributed.serving.asking import Asker, served_standing, standing_at
from memstore.distributed.serving.messages import Halt, Report, Reported
from memstore.engine import absolute_path, deadline_after, destroy_root
from memstore.errors import (
    FormatVersionError,
    HomeUnavailableError,
    MemstoreError,
    NotAStoreError,
    NotServedError,
    PermissionDeniedError,
    StoreTimeoutError,
)

_OPEN_WITHIN = 10.0  # seconds
_REPORT_WITHIN = 3.0  # seconds: who doesn't answer in this time is told as not alive
_BACK_WITHIN = 1.0  # seconds: an index process that was killed is
_LOOK_EVERY = 0.02  # seconds


class ClusterReference(msgspec.Struct, frozen=True):
    """What a process on another host needs to know of a cluster.

    Attributes:
        root: the store's folder on the hosts that know it by this path.
        view: the members when this was made.
        secret: that they share; None: they have none.
    """

    root: str
    view: View
    secret: bytes | None


class Cluster:
    """The hosts that serve the store in a folder. It holds no connection, and may be used in forked children.

    It may be pickled, and **has the hosts' secret in it then**: send it to processes that you trust, as by an actor's
    endpoint. A process on another host sees the members of the moment when it was pickled, until that host joins:
    `memstore.join(root, cluster=cluster)`, or `memstore.serve(mesh, root, join=cluster)`.

    Attributes:
        root: the store's folder on this host, as an absolute path.

    Raises:
        NotServedError: the root was never served.
    """

    def __init__(self, root: str) -> None:
        self.root = absolute_path(root)
        self._known: ClusterReference | None = None
        served_standing(self.root, _OPEN_WITHIN)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of the members, as this host knows them now."""
        return tuple(member.address for member in self._view().members)

    def status(self) -> ClusterStatus:
        """Asks all hosts for their state; a host that doesn't answer within 3 s is not alive."""
        return status_of(self._view(), self._secret())

    def stop(self, *, remove: bool = False, timeout: float = 30.0) -> None:
        """Ends the agents of all hosts, that of this host last; a host without an agent is skipped.

        The hosts keep their values: each is a member again when it is served again. Call it once, when all hosts are
        done: afterwards keys of other hosts can't be reached.

        Args:
            remove: each agent removes its host's store, with all values in it, and its folder. Values that processes
                got stay valid. A folder on storage that hosts share stays.
            timeout: seconds, for all of it.

        Raises:
            HomeUnavailableError: some hosts did not answer, and may still serve; it names them. The others are ended.
            StoreTimeoutError: this host's agent still runs.
        """
        deadline = deadline_after(timeout)
        order, standing = Halt(remove), self._standing()
        view, own = self._view(), None if standing is None else standing.view.member(standing.member)
        others = [member for member in view.members if own is None or member.id != own.id]
        with Asker(self._secret()) as asker:
            silent = _halt(asker, others, order, time.monotonic() + timeout / 2)
            while own is not None and is_served(self.root):
                asker.ask(own, order, min(deadline, time.monotonic() + 1.0))
                if time.monotonic() > deadline:
                    raise StoreTimeoutError(f"{self.root}: its agent still runs after {timeout:g} s")
                time.sleep(_LOOK_EVERY)
        if own is not None and remove:
            # Its agent removes it, or did not run. Of storage that hosts share, no host removes anything.
            with contextlib.suppress(NotAStoreError, NotServedError):
                destroy_root(self.root, max(deadline - time.monotonic(), 0.1))
        if silent:
            raise HomeUnavailableError(f"not ended, as far as can be seen: {', '.join(silent)}")

    def _standing(self) -> Standing | None:
        """Returns what this host's root knows; None: this host is no member."""
        if self._known is None:
            return served_standing(self.root, _OPEN_WITHIN)
        with contextlib.suppress(NotAStoreError, PermissionDeniedError):
            found = standing_at(self.root, _OPEN_WITHIN)
            if found is not None and found.view.cluster == self._known.view.cluster:
                return found
        return None

    def _view(self) -> View:
        standing = self._standing()
        if standing is not None:
            return standing.view
        assert self._known is not None
        return self._known.view

    def _secret(self) -> bytes | None:
        return secret_of(self.root) if self._known is None else self._known.secret

    def __reduce__(self) -> tuple[object, ...]:
        return _decode_cluster, (msgspec.msgpack.encode(self._reference()),)

    def _reference(self) -> ClusterReference:
        standing = self._standing()
        if standing is None:
            assert self._known is not None
            return self._known
        return ClusterReference(self.root, standing.view, secret_of(self.root))

    def _learn(self, view: View) -> None:
        if self._known is not None and view.epoch > self._known.view.epoch:
            self._known = msgspec.structs.replace(self._known, view=view)

    @classmethod
    def _of(cls, reference: ClusterReference) -> Cluster:
        made = cls.__new__(cls)
        made.root, made._known = reference.root, reference
        return made

    def __repr__(self) -> str:
        return f"memstore.Cluster({self.root!r})"

    def _repr_html_(self) -> str:
        """What this host knows: a cell waits for no other one."""
        try:
            rows = [(member.address, member.name) for member in self._view().members]
        except MemstoreError as error:
            return table_html((), (), f"{self!r}: {error}")
        title = f"{self!r}: {shown(len(rows), 'host', 'hosts')}; status() asks them how they are"
        return table_html(("address", "name"), rows, title)


def cluster_of(reference: ClusterReference) -> Cluster:
    """Returns the cluster that another process has described. Nothing is asked, or looked at."""
    return Cluster._of(reference)  # pyright: ignore[reportPrivateUsage]


def reference_to(cluster: Cluster) -> ClusterReference:
    """Describes a cluster for a process on another host."""
    return cluster._reference()  # pyright: ignore[reportPrivateUsage]


def learn(cluster: Cluster, view: View) -> None:
    """Tells a cluster that is on other hosts of newer members."""
    cluster._learn(view)  # pyright: ignore[reportPrivateUsage]


def _decode_cluster(data: bytes) -> Cluster:
    """Raises FormatVersionError: another version of memstore has pickled it."""
    try:
        return cluster_of(_decode_reference(data))
    except UNDECODABLE as error:
        raise FormatVersionError(f"a Cluster of another version of memstore ({error})") from None


_decode_reference = msgspec.msgpack.Decoder(ClusterReference).decode


def settled_in(view: View, secret: bytes | None) -> set[str]:
    """Returns the addresses of the members that say that they have settled in this view's epoch."""
    with Asker(secret) as asker:
        answers = asker.ask_all(view.members, Report(), time.monotonic() + _REPORT_WITHIN, patience=_BACK_WITHIN)
    return {
        member.address
        for member in view.members
        if isinstance(report := answers[member.id], Reported) and report.is_settled and report.epoch == view.epoch
    }


def _halt(asker: Asker, members: Sequence[Member], order: Halt, deadline: float) -> list[str]:
    """Ends the agents of members. Returns whose end nobody knows of, with why."""
    answers = asker.ask_all(members, order, deadline)
    return [f"{one.address} ({answers[one.id]})" for one in members if isinstance(answers[one.id], Exception)]


def status_at(root: str) -> ClusterStatus | None:
    """The state of the cluster that a root belongs to; None: it was never served."""
    standing = standing_at(root, _OPEN_WITHIN)
    return None if standing is None else status_of(standing.view, secret_of(absolute_path(root)))


def status_of(view: View, secret: bytes | None) -> ClusterStatus:
    """Asks the members of a view how they are."""
    with Asker(secret) as asker:
        answers = asker.ask_all(view.members, Report(), time.monotonic() + _REPORT_WITHIN, patience=_BACK_WITHIN)
    hosts = tuple(_host_status(member, answers[member.id]) for member in view.members)
    return ClusterStatus(view.seed_address, view.epoch, hosts)


def actors_at(root: str) -> dict[str, bytes]:
    """References to the index actors of a cluster, for `use_actors`: by address, of the hosts that have one by now.

    Args:
        root: the store's folder on this host.

    Raises:
        NotServedError: the root was never served.
    """
    standing = served_standing(root, _OPEN_WITHIN)
    with Asker(secret_of(absolute_path(root))) as asker:
        members = standing.view.members
        answers = asker.ask_all(members, FindActor(), time.monotonic() + _REPORT_WITHIN, patience=_BACK_WITHIN)
    found: dict[str, bytes] = {}
    for member in members:
        answer = answers[member.id]
        if isinstance(answer, FoundActor) and answer.reference:
            found[member.address] = answer.reference
    return found


def _host_status(member: Member, answer: object) -> HostStatus:
    if not isinstance(answer, Reported):
        trouble = str(answer) if isinstance(answer, Exception) else "it answered what this version doesn't know"
        return HostStatus(member.address, member.name, alive=False, trouble=trouble)
    return HostStatus(
        address=member.address,
        name=answer.name,
        epoch=answer.epoch,
        incarnation=answer.incarnation,
        alive=True,
        keys=answer.keys,
        live_bytes=answer.live_bytes,
        transport=answer.transport,
        sent=answer.sent,
        received=answer.received,
        memstore=answer.memstore,
        torch=answer.torch,
        monarch=answer.monarch,
    )


def remove_host(root: str, host: str, *, force: bool = False, timeout: float = 30.0) -> Member:
    """Tells the seed that a host is dead, and won't come back. Keys that had their home there are gone.

    Args:
        root: of any other member.
        host: its address, name or id; the IP alone where no other member has it.
        force: remove it though it answers and has keys: its processes go on with them until it hears of it.

    Returns: the member that was removed.

    Raises:
        NotServedError: there is no such host, it lives, or the seed refuses.
        HomeUnavailableError: the seed doesn't answer.
    """
    deadline = deadline_after(timeout)
    standing = served_standing(root, timeout)
    member = _named(standing.view, host)
    seed = standing.view.member(standing.view.seed)
    if seed is None or member == seed:
        raise NotServedError(
            f"{host} is the seed, which can't be removed: without it the cluster can't change. If its agent has ended, "
            f"serve its folder at {standing.view.seed_address} again"
        )
    with Asker(secret_of(absolute_path(root))) as asker:
        if not force:
            within = min(deadline, time.monotonic() + _REPORT_WITHIN)
            report = asker.ask(member, Report(), within, patience=_BACK_WITHIN)
            if isinstance(report, Reported) and not _has_left(member, report, standing.view):
                raise NotServedError(
                    f"{member.address} lives, and would go on with its keys. To let it leave, end its agent, serve it "
                    "with --no-homes, and remove it when it has given its keys away; or remove it now with --force"
                )
        answer = asker.ask(seed, Remove(member.id), deadline)
    if isinstance(answer, Refused):
        raise NotServedError(f"{member.address} was not removed: {answer.why}")
    if not isinstance(answer, IsView):
        raise HomeUnavailableError(f"the seed {seed.address} did not answer within {timeout:g} s, and alone may remove")
    return member


def _has_left(member: Member, report: Reported, view: View) -> bool:
    return not member.is_home and report.is_settled and report.epoch == view.epoch


def _parts_of_address(address: str) -> tuple[str, str]:
    """ "10.0.0.2:7411" and "10.0.0.2" of "tcp://10.0.0.2:7411"; of IPv6 with its brackets."""
    place = address.removeprefix("tcp://")
    return place, place.rpartition(":")[0]


def _named(view: View, host: str) -> Member:
    found = [one for one in view.members if host in (one.address, one.name, one.id.hex())]
    found = found or [one for one in view.members if host in _parts_of_address(one.address)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{one.address} ({one.name}, {one.id.hex()})" for one in view.members)
    what = "is the name or the IP of several hosts: give a whole address" if found else "is no host of the cluster"
    raise NotServedError(f"{host!r} {what}; it has {known}")
