"""Cluster: the hosts that serve one store, as any process sees them, asks them and changes them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from memstore._arguments import encode_key, encode_prefix
from memstore._info import ClusterStatus, HostStatus
from memstore._wording import shown, size, table_html
from memstore.distributed.links import parse_own_address, read_secret, secret_of
from memstore.distributed.rules import (
    Done,
    Drain,
    IsRoster,
    Meet,
    Member,
    Met,
    Policy,
    Refused,
    Remove,
    Roster,
    SetPolicy,
    SetQuota,
    Standing,
    Stay,
)
from memstore.distributed.serving.questions import (
    Asker,
    Halt,
    Leaving,
    Promote,
    Report,
    Reported,
    served_standing,
    standing_at,
)
from memstore.distributed.serving.supervision import is_served
from memstore.engine import absolute_path, deadline_after
from memstore.errors import (
    CorruptionError,
    CrossHostError,
    HomeUnavailableError,
    LinkRefusedError,
    MemstoreError,
    MutableEntryError,
    NotServedError,
    StoreFullError,
    StoreTimeoutError,
)

LOST_NAMED = 100  # keys and groups that a status names
_OPEN_WITHIN = 10.0  # seconds
_REPORT_WITHIN = 3.0  # seconds: who doesn't answer in this time is told as not alive
_BACK_WITHIN = 1.0  # seconds: an index process that was killed is
_LOOK_EVERY = 0.02  # seconds
_DRAIN_EVERY = 0.2  # seconds
_STUCK_FOR = 4.0  # seconds: what was in the way before this call may be gone by now
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
        reports = [answer for answer in answers.values() if isinstance(answer, Reported)]
        lost = {name: who for report in reports for name, who in report.lost}
        return ClusterStatus(
            roster.seed_address,
            roster.epoch,
            hosts,
            deputies,
            tuple(report.recovering for report in reports if report.recovering),
            dict(sorted(lost.items())[:LOST_NAMED]),
        )

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

    def drain(
        self, host: str, *, to: str = "", timeout: float = 600.0, progress: Callable[[int, int], None] | None = None
    ) -> str:
        """Moves all that a host has to others, and lets it leave the cluster then. Returns its address.

        Keys stay readable and writable, and versions stay. At the end its agent removes the host's folder, and ends. If
        it is the seed, another host is made the seed first. **When this call ends by an error, a timeout or an
        interrupt, the drain goes on**; the next call waits for it, and `cancel_drain` ends it.

        Args:
            host: its address, name or id.
            to: the host that is to own its groups, as such; empty: those that stay share them.
            timeout: seconds.
            progress: called now and then, with the number of groups that it still owns, and of bytes that lie there.

        Raises:
            NotServedError: there is no such host, it is the last owner, or its store is on storage that hosts share.
            StoreFullError: a host has no room for what it is to take; `host` names it.
            MutableEntryError, CrossHostError: a dataset, a replay buffer or an attached file can't be moved.
            CorruptionError: a value there is damaged.
            StoreTimeoutError: it isn't over. The message says what it waits for.
            HomeUnavailableError: the host, or the seed, doesn't answer.
        """
        return _Drain(self, host, to, timeout, progress).run()

    def cancel_drain(self, host: str, *, timeout: float = 60.0) -> str:
        """Lets a host stay that is being drained. Returns its address.

        What it has given away stays where it is. The host goes on as before the drain: it may own new groups, too.
        Nothing happens if it isn't being drained.

        Args:
            host: its address, name or id.
            timeout: seconds.

        Raises:
            NotServedError: there is no such host; or it has given away all that it had, and leaves.
            HomeUnavailableError: the host, or the seed, doesn't answer.
        """
        deadline = deadline_after(timeout)
        known = self.roster()
        member = _only(known, _named(known, host), host)
        with Asker(self._secret) as asker:
            while True:
                seed = self.roster().member(self.roster().seed)
                until = min(deadline, time.monotonic() + _REPORT_WITHIN)
                met = None if seed is None else asker.ask(seed, Meet(_NOBODY, None), until, patience=0.0)
                what = "the seed" if seed is None else f"the seed {seed.address}"
                if isinstance(met, Met) and met.roster is not None:
                    if met.roster.member(member.id) is None:
                        raise NotServedError(f"{member.address} has left")
                    what = member.address
                    answer = asker.ask(member, Stay(*met.roster.position), until, patience=0.0)
                    if isinstance(answer, Done):
                        return member.address
                    if isinstance(answer, Refused):
                        raise NotServedError(f"{member.address} can't stay: {answer.why}")
                if time.monotonic() + _DRAIN_EVERY > deadline:
                    break
                time.sleep(_DRAIN_EVERY)
        raise HomeUnavailableError(f"{what} has not confirmed within {timeout:g} s that {member.address} stays")

    def set_policy(
        self,
        prefix: str = "",
        *,
        replicas: int | Literal["async"] | None = None,
        on_missing: Literal["fail", "warn"] = "fail",
        timeout: float = 30.0,
    ) -> None:
        """States on how many hosts values are to lie: see `Store.set_policy`."""
        policy, drops = policy_of(prefix, replicas, on_missing)
        self._tell_seed(SetPolicy(policy, drops), "the policy", deadline_after(timeout), timeout)

    def set_quota(self, prefix: str, quota: int | None, *, timeout: float = 30.0) -> None:
        """Bounds the bytes that the keys with a prefix may take: see `Store.set_quota`. Returns when all hosts know it.

        A host that doesn't answer hears of it later.
        """
        deadline = deadline_after(timeout)
        told = self._tell_seed(SetQuota(encode_prefix(prefix), quota), "the quota", deadline, timeout)
        while time.monotonic() < deadline:
            reports = [one for one in self._reports()[1].values() if isinstance(one, Reported)]
            if all(report.epoch >= told.epoch for report in reports):
                return
            time.sleep(_LOOK_EVERY)

    def _tell_seed(self, request: SetPolicy | SetQuota, what: str, deadline: float, timeout: float) -> Roster:
        """Has the seed note something in the roster. Returns that. Raises NotServedError, HomeUnavailableError."""
        with Asker(self._secret) as asker:
            while time.monotonic() < deadline:
                seed = self.roster().member(self.roster().seed)
                until = min(deadline, time.monotonic() + _REPORT_WITHIN)
                answer = None if seed is None else asker.ask(seed, request, until, patience=0.0)
                if isinstance(answer, IsRoster):
                    return answer.roster
                if isinstance(answer, Refused):
                    raise NotServedError(f"{what} is not stated: {answer.why}")
                time.sleep(_LOOK_EVERY)
        raise HomeUnavailableError(
            f"the seed {self.roster().seed_address} has not noted {what} within {timeout:g} s: memstore status "
            "says which hosts answer"
        )

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
        with Asker(self._secret) as asker:
            return _promote_one(asker, chosen, deadline, force=force).address

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


def policy_of(prefix: str, replicas: object, on_missing: object) -> tuple[Policy, bool]:
    """Returns what a person states, as the seed is told, and whether a group is to have no policy of its own.

    Raises:
        ValueError: it is none.
        InvalidKeyError: the prefix can't begin a key.
    """
    if replicas not in (None, 1, 2, "async") or replicas is True:
        raise ValueError(
            f"replicas is {replicas!r}: expected 2 (a put returns when two hosts have its value), 'async' (the second "
            "one gets it afterwards), 1 (the host that puts it), or None, which drops the policy. More aren't supported"
        )
    if on_missing not in ("fail", "warn"):
        raise ValueError(f"on_missing is {on_missing!r}: expected 'fail' or 'warn'")
    group = prefix.removesuffix("/")
    if "/" in group:
        raise ValueError(
            f"prefix is {prefix!r}: a policy is of a whole group, the text of keys before their first '/'; expected "
            f"{group.partition('/')[0]!r}, or '' for the whole store"
        )
    if group:
        encode_key(group)
    is_async = replicas == "async"
    number = 2 if is_async else int(str(replicas or 1))
    policy = Policy(group.encode() if group else None, number, is_async, on_missing == "fail")
    return policy, replicas is None


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
        draining="" if answer.leaving is None else _left(answer.leaving),
        lacking=answer.lacking,
        spilled_bytes=answer.spilled_bytes,
    )


def _left(leaving: Leaving) -> str:
    trouble = f"; {leaving.text}" if leaving.text else ""
    return f"{shown(leaving.groups, 'group', 'groups')} and {size(leaving.live_bytes)} are there{trouble}"


def _lives(asker: Asker, member: Member, deadline: float) -> bool:
    within = min(deadline, time.monotonic() + _REPORT_WITHIN)
    with contextlib.suppress(LinkRefusedError):  # another host is there by now
        return isinstance(asker.ask(member, Report(), within, patience=_BACK_WITHIN), Reported)
    return False


def _promote_one(asker: Asker, members: Sequence[Member], deadline: float, *, force: bool = False) -> Member:
    """Makes the first of these members the seed that answers, and can be it."""
    error: MemstoreError = HomeUnavailableError("there is no deputy: say which host, and --force")
    for member in members:
        if len(members) > 1 and not _lives(asker, member, deadline):  # a host that is stopped would take all the time
            error = HomeUnavailableError(f"{member.address} does not answer ({asker.trouble_of(member.address)})")
            continue
        answer = asker.ask(member, Promote(force), deadline)
        if isinstance(answer, Done):
            return member
        if isinstance(answer, Refused):
            hint = "" if force else "; --force does without, and loses what the old seed has said last"
            error = NotServedError(f"{member.address} can't be the seed: {answer.why}{hint}")
        else:
            error = HomeUnavailableError(f"{member.address} does not answer ({asker.trouble_of(member.address)})")
    raise error


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


class _Drain:
    """One call of `Cluster.drain`: it says what is to be done, and waits for it. The host does it by itself."""

    def __init__(
        self, cluster: Cluster, host: str, to: str, timeout: float, progress: Callable[[int, int], None] | None
    ) -> None:
        self._cluster, self._timeout, self._progress = cluster, timeout, progress
        self._deadline = deadline_after(timeout)
        roster = cluster.roster()
        self._member = _only(roster, _named(roster, host), host)
        self._to = _only(roster, _named(roster, to), to).id if to else None
        self._what, self._stuck_since = "it has just begun", 0.0

    def run(self) -> str:
        member = self._member
        with Asker(self._cluster.secret) as asker:
            self._check_storage(asker)
            while True:
                answer = self._ask_seed(asker)
                if answer is not None and answer.roster.member(member.id) is None:
                    return member.address
                if answer is not None:
                    self._look(asker)
                if time.monotonic() + _DRAIN_EVERY > self._deadline:
                    break
                time.sleep(_DRAIN_EVERY)
        raise StoreTimeoutError(
            f"{member.address} is not drained within {self._timeout:g} s, and goes on: {self._what}: wait for it by "
            "the same call"
        )

    def _check_storage(self, asker: Asker) -> None:
        report = asker.ask(self._member, Report(), self._deadline, patience=_REPORT_WITHIN)
        if report is None:
            raise HomeUnavailableError(
                f"{self._member.address} can't be drained: {asker.trouble_of(self._member.address)}: if it is lost, "
                "remove it (memstore remove)"
            )
        if isinstance(report, Reported) and report.transport == "shared":
            raise NotServedError(
                f"{self._member.address} has its files on storage that hosts share, and they stay there: it can't be "
                "drained. Put the values once more that are still needed, end its agent, and remove it"
            )

    def _ask_seed(self, asker: Asker) -> IsRoster | None:
        """Says to the seed that the host is to leave. Returns what it knows then; None: it gave no answer."""
        roster = self._cluster.roster()
        seed = roster.member(roster.seed)
        if seed is None:
            return None
        if seed.id == self._member.id:
            others = [one for one in roster.members if one.id in roster.deputies and not roster.is_leaver(one.id)]
            if not others:
                raise NotServedError(f"{seed.address} is the seed, and no other host has a copy of the directory yet")
            _promote_one(asker, others, self._deadline)
            return None
        until = min(self._deadline, time.monotonic() + _REPORT_WITHIN)
        answer = asker.ask(seed, Drain(self._member.id, self._to), until, patience=_BACK_WITHIN)
        if isinstance(answer, Refused):
            raise NotServedError(f"{self._member.address} can't be drained: {answer.why}")
        if not isinstance(answer, IsRoster):
            self._what = f"the seed {seed.address} does not answer"
            return None
        return answer

    def _look(self, asker: Asker) -> None:
        """Looks how far the host is. Raises what keeps it from going on, if that lasts."""
        until = min(self._deadline, time.monotonic() + _REPORT_WITHIN)
        report: object = None
        with contextlib.suppress(LinkRefusedError):  # another root is there by now
            report = asker.ask(self._member, Report(), until, patience=0.0)
        leaving = report.leaving if isinstance(report, Reported) else None
        if leaving is None:
            self._what = f"{self._member.address} says nothing"
            return
        if self._progress is not None:
            self._progress(leaving.groups, leaving.live_bytes)
        self._what = _left(leaving)
        if not leaving.error:
            self._stuck_since = 0.0
            return
        now = time.monotonic()
        self._stuck_since = self._stuck_since or now
        if leaving.error in _STUCK and now - self._stuck_since > _STUCK_FOR:
            where = f" to {leaving.at}" if leaving.at else ""
            text = f"{self._member.address} is not drained{where}, and goes on when it can: {leaving.text}"
            raise _STUCK[leaving.error](leaving.at, text, leaving.key)


def _full(at: str, text: str, key: str) -> MemstoreError:
    error = StoreFullError(text, key=key or None)
    error.host = at or None
    return error


_STUCK: dict[str, Callable[[str, str, str], MemstoreError]] = {
    "StoreFullError": _full,
    "MutableEntryError": lambda at, text, key: MutableEntryError(text, key=key or None),
    "CrossHostError": lambda at, text, key: CrossHostError(text, key=key or None),
    "CorruptionError": lambda at, text, key: CorruptionError(text, key=key or None),
}


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
