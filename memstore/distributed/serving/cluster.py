"""Cluster: the hosts that serve one store, as any process sees them. How they are, and how a person changes them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence

from memstore._info import ClusterStatus, HostStatus
from memstore._wording import shown, table_html
from memstore.distributed.links import parse_own_address, read_secret, secret_of
from memstore.distributed.rules import Done, IsRoster, Meet, Member, Met, Refused, Remove, Roster, Standing
from memstore.distributed.serving.asking import Asker, Halt, Promote, Report, Reported, served_standing, standing_at
from memstore.distributed.serving.supervision import is_served
from memstore.engine import absolute_path, deadline_after
from memstore.errors import HomeUnavailableError, LinkRefusedError, MemstoreError, NotServedError, StoreTimeoutError

_OPEN_WITHIN = 10.0  # seconds
_REPORT_WITHIN = 3.0  # seconds: who doesn't answer in this time is told as not alive
_BACK_WITHIN = 1.0  # seconds: an index process that was killed is
_LOOK_EVERY = 0.02  # seconds
_NOBODY = Member(bytes(16), "")  # who asks, and is no member


class Cluster:
    """The hosts that serve one store. It holds no connection, and may be used in forked children, and pickled.

    What is pickled has the cluster's secret in it, so that a process on any host can ask the members, or join them.

    Attributes:
        root: the store's folder on this host, as an absolute path; empty: this process is on none of the hosts.

    Raises:
        NotServedError: the root was never served.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = absolute_path(root)
        self._known = served_standing(self.root, _OPEN_WITHIN).roster
        self._secret = secret_of(self.root)

    @classmethod
    def at(cls, address: str, *, secret: bytes | None = None, timeout: float = _OPEN_WITHIN) -> Cluster:
        """Returns the cluster of the host that answers at an address, for a process on none of its hosts.

        Args:
            address: of any member, ``tcp://IP:PORT``, or without ``tcp://``.
            secret: of the cluster; None: that of the file which MEMSTORE_SECRET_FILE names, if there is one.
            timeout: seconds.

        Raises:
            HomeUnavailableError: nobody answers there.
            NotServedError: who answers is no member of a cluster.
            LinkRefusedError: it has another secret.
        """
        known = cls.__new__(cls)
        known.root, known._secret = "", read_secret() if secret is None else secret
        where = str(parse_own_address(_with_scheme(address)))
        with Asker(known._secret) as asker:
            met = asker.ask(where, Meet(_NOBODY, None), deadline_after(timeout))
            if met is None:
                raise HomeUnavailableError(f"{where} can't be asked: {asker.trouble_of(where)}")
        if not isinstance(met, Met) or met.roster is None:
            raise NotServedError(f"{where} is no member of a cluster yet")
        known._known = met.roster
        return known

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of the members, as this host knows them now; or, on none of them, as one of them knows them."""
        return tuple(member.address for member in self.roster().members)

    @property
    def address(self) -> str:
        """The address of the seed, which new hosts join."""
        return self.roster().seed_address

    @property
    def secret(self) -> bytes | None:
        """The secret that the hosts share, or None."""
        return self._secret

    def roster(self) -> Roster:
        """Returns the newest roster that can be had here: of this host's folder, or of a member that answers."""
        standing = self._standing()
        if standing is not None:
            self._known = max(standing.roster, self._known, key=lambda roster: roster.position)
            return self._known
        seed = self._known.member(self._known.seed)
        with Asker(self._secret) as asker:
            for member in sorted(self._known.members, key=lambda one: one is not seed):
                try:
                    met = asker.ask(member, Meet(_NOBODY, None), time.monotonic() + _REPORT_WITHIN, patience=0.0)
                except LinkRefusedError:  # another host is there by now
                    continue
                if isinstance(met, Met) and met.roster is not None:
                    self._known = max(met.roster, self._known, key=lambda roster: roster.position)
                    break
        return self._known

    def status(self) -> ClusterStatus:
        """Asks all hosts for their state; a host that doesn't answer within 3 s is not alive."""
        roster, answers = self._reports()
        hosts = tuple(_host_status(member, answers[member.id]) for member in roster.members)
        deputies = tuple(member.address for member in roster.members if member.id in roster.deputies)
        return ClusterStatus(roster.seed_address, roster.epoch, hosts, deputies)

    def settled(self, addresses: Iterable[str]) -> list[str]:
        """Returns those of these addresses that are no members yet, or have not finished joining."""
        roster, answers = self._reports()
        settled = {
            member.address
            for member in roster.members
            if isinstance(report := answers[member.id], Reported) and report.is_settled and report.epoch >= roster.epoch
        }
        return [address for address in addresses if address not in settled]

    def _reports(self) -> tuple[Roster, dict[bytes, object]]:
        """Asks all members how they are. Returns by member the answer, or the error by which there was none."""
        roster, deadline = self.roster(), time.monotonic() + _REPORT_WITHIN
        with Asker(self._secret) as asker:
            return roster, asker.ask_all(roster.members, Report(), deadline, patience=_BACK_WITHIN)

    def remove(self, host: str, *, force: bool = False, timeout: float = 30.0) -> str:
        """Tells the seed that a host is dead, and won't come back. What it has put is gone. Returns its address.

        Args:
            host: its address, name or id; the IP alone where no other member has it. Of two that have the same, since
                the second one came when the first was lost, it is the one that doesn't answer.
            force: remove it though it answers: its processes go on with what they own until it hears of it.
            timeout: seconds.

        Raises:
            NotServedError: there is no such host, it lives, or the seed refuses.
            HomeUnavailableError: the seed doesn't answer.
        """
        return remove_member(self, host, force=force, timeout=timeout).address

    def promote(self, host: str = "", *, force: bool = False, timeout: float = 60.0) -> str:
        """Makes another host the seed, because the present one is lost, or will be. Returns its address.

        Args:
            host: its address, name or id; empty: the first deputy that answers, or with `root` and `force` this host.
            force: without a majority of the hosts, or at a host that has no copy of the directory. **What the old seed
                has said since is lost**: it must not come back, and hosts that don't answer must be removed before
                anybody can put under new names.
            timeout: seconds.

        Raises:
            NotServedError: there is no such host, or it can't be the seed; the message says why.
            HomeUnavailableError: it doesn't answer.
        """
        deadline = deadline_after(timeout)
        roster = self.roster()
        chosen = [_only(roster, _named(roster, host), host)] if host else self._candidates(roster, force=force)
        trouble = "there is no deputy: say which host, and --force"
        with Asker(self._secret) as asker:
            for member in chosen:
                patience = timeout if len(chosen) == 1 else _BACK_WITHIN
                answer = asker.ask(member, Promote(force), deadline, patience=patience)
                if isinstance(answer, Done):
                    return member.address
                if isinstance(answer, Refused):
                    hint = "" if force else "; --force does without, and loses what the old seed has said last"
                    raise NotServedError(f"{member.address} can't be the seed: {answer.why}{hint}")
                trouble = f"{member.address} does not answer ({asker.trouble_of(member.address)})"
        raise HomeUnavailableError(trouble)

    def _candidates(self, roster: Roster, *, force: bool) -> list[Member]:
        found = [member for member in roster.members if member.id in roster.deputies]
        if not found and force and self.root:
            own = served_standing(self.root, _OPEN_WITHIN).member
            found = [member for member in roster.members if member.id == own]
        return found

    def stop(self, *, remove: bool = False, timeout: float = 30.0) -> None:
        """Ends the agents of all hosts, that of this host last; a host without an agent is skipped.

        The hosts keep their values: each is a member again when it is served again. Call it once, when all hosts are
        done: afterwards keys of other hosts can't be reached.

        Args:
            remove: the agents remove their hosts' folders, with all values, when they have ended.
            timeout: seconds, for all of it.

        Raises:
            HomeUnavailableError: some hosts did not answer, and may still serve; it names them. The others are ended.
            StoreTimeoutError: this host's agent still runs.
        """
        deadline = deadline_after(timeout)
        roster = self.roster()
        here = self._standing()
        own = None if here is None else roster.member(here.member)
        others = [member for member in roster.members if member != own]
        with Asker(self._secret) as asker:
            answers = asker.ask_all(others, Halt(remove), time.monotonic() + timeout / 2)
            silent = [f"{one.address} ({answers[one.id]})" for one in others if isinstance(answers[one.id], Exception)]
            while own is not None and is_served(self.root):
                asker.ask(own, Halt(remove), min(deadline, time.monotonic() + 1.0), patience=0.0)
                if time.monotonic() > deadline:
                    raise StoreTimeoutError(f"{self.root}: its agent still runs after {timeout:g} s")
                time.sleep(_LOOK_EVERY)
        if silent:
            raise HomeUnavailableError(f"not ended, as far as can be seen: {', '.join(silent)}")

    def _standing(self) -> Standing | None:
        """Returns what this host's root knows; None: this host is no member of this cluster."""
        if self.root:
            with contextlib.suppress(MemstoreError):  # a process of another host has the root, perhaps
                found = standing_at(self.root, _OPEN_WITHIN)
                if found is not None and found.roster.cluster == self._known.cluster:
                    return found
        return None

    def __repr__(self) -> str:
        return f"memstore.Cluster({self.root!r})" if self.root else f"memstore.Cluster.at({self._known.seed_address!r})"

    def _repr_html_(self) -> str:
        """Shows what this host knows: a cell waits for no other one."""
        try:
            standing = standing_at(self.root, _OPEN_WITHIN) if self.root else None
        except MemstoreError as error:
            return table_html((), (), f"{self!r}: {error}")
        members = (self._known if standing is None else standing.roster).members
        rows = [(member.address, member.name) for member in members]
        title = f"{self!r}: {shown(len(rows), 'host', 'hosts')}; status() asks them how they are"
        return table_html(("address", "name"), rows, title)


def known_cluster(root: str, roster: Roster, secret: bytes | None) -> Cluster:
    """Returns the cluster of a roster. Nothing is asked, or looked at."""
    made = Cluster.__new__(Cluster)
    made.root, made._known, made._secret = root, roster, secret  # pyright: ignore[reportPrivateUsage]
    return made


def cluster_of(root_or_address: str) -> Cluster:
    """Returns the cluster of a root on this host; or of the member at an address, ``tcp://IP:PORT`` or ``IP:PORT``."""
    if root_or_address.startswith("tcp://"):
        return Cluster.at(root_or_address)
    if not os.path.lexists(root_or_address):
        with contextlib.suppress(MemstoreError, ValueError):
            parse_own_address(_with_scheme(root_or_address))
            return Cluster.at(root_or_address)
    return Cluster(root_or_address)


def _with_scheme(address: str) -> str:
    return address if address.startswith("tcp://") else f"tcp://{address}"


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


def _lives(asker: Asker, member: Member, deadline: float) -> bool:
    within = min(deadline, time.monotonic() + _REPORT_WITHIN)
    with contextlib.suppress(LinkRefusedError):  # another host is there by now
        return isinstance(asker.ask(member, Report(), within, patience=_BACK_WITHIN), Reported)
    return False


def remove_member(cluster: Cluster, host: str, *, force: bool = False, timeout: float = 30.0) -> Member:
    """Removes a host as `Cluster.remove` does. Returns the member that was removed."""
    deadline = deadline_after(timeout)
    roster = cluster.roster()
    seed = roster.member(roster.seed)
    with Asker(cluster.secret) as asker:
        found = _named(roster, host)
        # One after the other: of two that have the same address, a link speaks with one at a time.
        dead = [one for one in found if force and len(found) == 1 or not _lives(asker, one, deadline)]
        member = dead[0] if len(dead) == 1 else _only(roster, found, host)
        if seed is None or member == seed:
            raise NotServedError(
                f"{host} is the seed, which can't be removed: if it is lost, make another host the seed first "
                "(memstore promote)"
            )
        if not force and member not in dead:
            raise NotServedError(
                f"{member.address} lives, and would go on with its keys. To let it go, end its agent first; or "
                "remove it now with --force"
            )
        while True:
            answer = asker.ask(seed, Remove(member.id), deadline)
            if isinstance(answer, Refused):
                raise NotServedError(f"{member.address} was not removed: {answer.why}")
            if isinstance(answer, IsRoster) and answer.roster.member(member.id) is None:
                return member
            if time.monotonic() + _LOOK_EVERY > deadline:
                break
            time.sleep(_LOOK_EVERY)
    what = "did not answer" if answer is None else "has not been heard by a majority of the hosts"
    raise HomeUnavailableError(f"the seed {seed.address} {what} within {timeout:g} s, and alone may remove")


def _named(roster: Roster, host: str) -> list[Member]:
    """Finds members by address, name or id; or by the address without ``tcp://``, or without the port too."""
    found = [one for one in roster.members if host in (one.address, one.name, one.id.hex())]
    for one in roster.members if not found else ():
        place = one.address.removeprefix("tcp://")
        if host in (place, place.rpartition(":")[0], place.rpartition(":")[0].strip("[]")):
            found.append(one)
    return found


def _only(roster: Roster, found: Sequence[Member], host: str) -> Member:
    """Returns the one that was found. Raises NotServedError if there is none, or several."""
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{one.address} ({one.name}, {one.id.hex()})" for one in roster.members)
    what = "is the address or the name of several hosts: give the id" if found else "is no host of the cluster"
    raise NotServedError(f"{host!r} {what}; it has {known}")
