"""The index process as a state machine: what it answers, and what it does by itself.

All that must outlive it stands in the tables. What it has in memory may be lost at any moment: waits, whose clients ask
again; pins; what a seed has heard of the members.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from memstore.distributed.rules import (
    directory,
    draining,
    fence,
    owning,
    promotion,
    recovery,
    remembering,
    replicas,
    returning,
    roster,
    sharded,
)
from memstore.distributed.rules.client import failed_of
from memstore.distributed.rules.messages import (
    LONGEST_WAIT,
    Announce,
    Answer,
    Ask,
    AskSilence,
    BringGroups,
    Brought,
    CameBack,
    ClaimGroups,
    Close,
    Commit,
    Committed,
    Done,
    Drain,
    Dropped,
    Ended,
    FindBackups,
    FindOwners,
    FindVersions,
    Finish,
    Give,
    GiveUp,
    HandOver,
    Heartbeat,
    Inherit,
    IsAt,
    IsRoster,
    Keep,
    KeepAll,
    Later,
    List,
    Look,
    Lookup,
    Lost,
    Meet,
    Met,
    Mirror,
    Named,
    Note,
    Obey,
    Offer,
    Open,
    Opened,
    Place,
    Prepare,
    Promise,
    Publish,
    Recovered,
    Refused,
    Release,
    Remove,
    Renew,
    Replicate,
    Request,
    Resolve,
    Return,
    RosterChange,
    Serve,
    SetPolicy,
    SetQuota,
    Silence,
    Stale,
    Stay,
    TakeOver,
    Wait,
    WaitAny,
    WatchGroup,
)
from memstore.distributed.rules.nouns import Member, Policy, Returns, Roster, Standing, group_of
from memstore.distributed.rules.steps import Steps, Tables, own_standing, pause, send, transact, view
from memstore.engine import attempts
from memstore.errors import CorruptionError

PIN = 10_000_000_000  # nanoseconds that the bytes of a version are kept for a get that was unlucky
ALONE = 3_000_000_000  # nanoseconds that a root without a cluster waits for members of one to find it
_MOST_NAMED = 64  # hosts, of a first boot
_KEPT_FOR_SEED = 2_000_000_000  # nanoseconds that a seed keeps what it can't tell yet
_OfOwner = (
    Lookup | FindVersions | Wait | List | WaitAny | Commit | Named | Resolve | Prepare | Look | Renew | Publish | GiveUp
)  # what a host that is fenced doesn't answer: somebody else may be the owner by now
_ToSeed = ClaimGroups | FindOwners | WatchGroup | HandOver | Dropped | Inherit


_CHANGES_ROSTER = Remove | Drain | Finish | SetPolicy | SetQuota | Recovered


class Unnoted(Later, frozen=True, array_like=True, tag=75):
    """A change is made, and hosts that keep what it has replaced are to be told first."""


class Index:
    """The rules of one index process: its answers, and its duties.

    Args:
        member: this host.
        addresses: that a root without a cluster was told of; none: it makes a cluster.
        clock: nanoseconds of this host's clock since boot.
        cluster: the id of a cluster that it makes.
        is_new: it makes one at once.
        moved: this root was served at another address before.
        promote_after: nanoseconds that a majority may not hear the seed, after which this host takes over, if it is a
            deputy; 0: it never does by itself.
        remove_after: nanoseconds of the leases that members hold, while this host is the seed; 0: they hold none.
        host_lease: this host's; None: one that nobody else reads.
        left: reads what removed members have left on storage that hosts share; None: there is none.

    Attributes:
        refusal: the seed's last answer, if it was one: this root can't be a member.
        was_member: the seed has said so since this process was started.
        leaver: this host, as one that is drained.
        returns: what it brings back, of each removed root that was served here before.
    """

    def __init__(
        self,
        member: Member,
        addresses: Sequence[str],
        clock: Callable[[], int],
        *,
        cluster: bytes,
        is_new: bool = False,
        moved: bool = False,
        promote_after: int = 0,
        remove_after: int = 0,
        host_lease: fence.HostLease | None = None,
        left: recovery.Left | None = None,
    ) -> None:
        self.member, self._clock, self._moved = member, clock, moved
        self._addresses = list(addresses)
        self._is_founding = False
        self._brought = 0  # the number under which the seed has noted the groups of this root; 0: it hasn't
        self._cluster, self._is_new = cluster, is_new
        self._began = clock()
        self._hint: Roster | None = None
        self.seed = directory.Directory(clock)
        self._audit = owning.Audit(clock)
        self._sessions = owning.Sessions(clock)
        self.refusal: Refused | None = None
        self.was_member = False
        self._watch = fence.SeedWatch(clock, promote_after)
        self._lease = host_lease or fence.HostLease(clock, [0])
        self._leases = fence.HostLeases(clock, remove_after)
        self.leaver = draining.Leaver(clock)
        self._takeovers = draining.Takeovers()
        self.notes = recovery.Notes(clock)
        self.recovery = recovery.Recovery(left)
        self.returns: list[returning.Returns] = []
        self._swept: tuple[int, Returns] | None = None  # `losses` when it last looked for records whose bytes are gone
        self._stale: tuple[int, int] | None = None  # `losses`, and the epoch, when it last looked for stale backups
        self.replicas = replicas.Replicas(clock)
        self._untold: set[bytes] = set()  # keepers that gave no answer when they were to be told of a put
        self._refused: dict[bytes, int] = {}
        self._pins: dict[Place, int] = {}
        self._waits: dict[int, tuple[Request, int, int | None]] = {}

    @property
    def asked(self) -> str:
        """The address of the seed that a root without a cluster asks to be admitted; empty: it knows of none."""
        return "" if self._hint is None else self._hint.seed_address

    # --- what it answers ----------------------------------------------------------------------------------------------

    def answer(self, tables: Tables, request: Request, question: int | None = None) -> Answer:
        """Answers in the transaction that makes the change. `may_keep` says whether there is time for it.

        Args:
            question: of what is kept at a seed: see `Directory.new_question`.
        """
        standing = tables.standing()
        if standing is None and isinstance(request, Meet):
            return self._met(None, request)
        if standing is None and isinstance(request, Promise):
            return promotion.take_promise(tables, None, request)
        if standing is None and isinstance(request, AskSilence):
            return Silence(fence.NEVER)
        if standing is None or (self._lease.is_over and isinstance(request, _OfOwner)):
            return Later()
        answer = self._answer(tables, standing, request, question)
        if isinstance(request, Ask | _CHANGES_ROSTER) and own_standing(tables).roster is not standing.roster:
            self._propose_together(tables, list(self._waits), standing.roster.position)
        if isinstance(request, Ask) and request.milliseconds and standing.is_seed and isinstance(answer, IsRoster):
            return self.seed.shortened(request, answer)  # others may not know any more what they knew
        return answer

    def _answer(self, tables: Tables, standing: Standing, request: Request, question: int | None) -> Answer:
        match request:
            case Meet():
                return self._met(standing, request)
            case Lookup():
                if request.pin:
                    self._pin(tables, request)
                return owning.look_up(tables, standing, request)
            case FindVersions():
                return owning.find_versions(tables, standing, request)
            case Wait():
                return owning.version_of(tables, standing, request)
            case WaitAny():
                return owning.news(tables, standing, request)
            case List():
                return owning.list_page(tables, standing, request)
            case Commit():
                keys = [change.key for change in request.changes]
                return self._once_noted(tables, keys, owning.commit(tables, standing, request), request.keeper)
            case Note():
                if not recovery.is_known(standing, request.owner):
                    return Later()
                for key, upto in request.rows:
                    backup = tables.backup(key)
                    if backup is not None and backup.version <= upto:
                        self._audit.look_again(backup.places)  # of its bytes nobody else may say that they can go
                return recovery.take_note(tables, request)
            case Keep():
                refused = owning.admit(tables, standing, [group_of(request.key)], [request.grant], changes=True)
                return refused or recovery.keep_current(tables, request)
            case KeepAll():
                grant_of = {group_of(key): grant for key, grant in request.rows}
                refused = owning.admit(tables, standing, grant_of, grant_of.values(), changes=True)
                return refused or replicas.keep_all(tables, request)
            case Lost():
                recovery.note_lost(tables, request.who, request.names)
                return Done()
            case CameBack():
                returning.take_word(tables, request)
                return Done()
            case Offer():
                return returning.answer_offer(tables, standing, request)
            case FindBackups():
                return recovery.find_backups(tables, standing, request)
            case Named():
                return owning.are_named(tables, standing, request)
            case Resolve():
                return owning.resolve(tables, request)
            case Open():
                return Opened(tables.new_session())
            case Close():
                tables.end_session(request.session)
                return Done()
            case Release():
                return owning.release(tables, standing, request)
            case Prepare() | Look() | Renew() | Publish() | GiveUp():
                answer = sharded.answer(tables, standing, request)
                key = getattr(request, "key", None)
                return self._once_noted(tables, [key], answer) if key else answer
            case ClaimGroups() | FindOwners() | WatchGroup() | HandOver() | Dropped() | Inherit():
                answer = self.seed.answer(tables, standing, request, question)
                if roster.let_own(tables, self.seed):
                    answer = self.seed.answer(tables, tables.standing() or standing, request, question)
                return answer
            case BringGroups():
                return roster.note_groups(tables, standing, self.seed, request)
            case Give():
                return directory.take(tables, standing, request)
            case Serve():
                return directory.serve(tables, standing, request)
            case Stay():
                return draining.stay(tables, standing, request)
            case TakeOver():
                return self._takeovers.answer(standing, request)
            case Heartbeat():
                return self._leases.answer(standing, self.seed, request)
            case AskSilence():
                return self._watch.answer(standing, request)
            case Replicate():
                return Later()  # it takes steps: see `replicate`
            case _:
                return self._answer_of_roster(tables, standing, request)

    def _answer_of_roster(
        self,
        tables: Tables,
        standing: Standing,
        request: Ask
        | Remove
        | Drain
        | Finish
        | Mirror
        | Promise
        | Obey
        | Announce
        | Recovered
        | Return
        | SetPolicy
        | SetQuota,
    ) -> Answer:
        match request:
            case SetPolicy():
                return roster.set_policy(tables, standing, self.seed, request)
            case SetQuota():
                return roster.set_quota(tables, standing, self.seed, request)
            case Ask():
                return roster.answer_ask(tables, standing, self.seed, request)
            case Remove():
                return roster.remove(tables, standing, self.seed, request)
            case Drain():
                return roster.drain(tables, standing, self.seed, request)
            case Finish():
                return roster.finish(tables, standing, self.seed, request)
            case Recovered():
                return roster.recovered(tables, standing, self.seed, request)
            case Return():
                return returning.answer_return(tables, standing, self.seed, request)
            case Mirror():
                return directory.take_mirror(tables, standing, request)
            case Promise():
                return promotion.take_promise(tables, standing, request)
            case Obey():
                return promotion.take_obey(tables, standing, request)
            case Announce():
                return promotion.announce(tables, standing, request)

    def _met(self, standing: Standing | None, request: Meet) -> Met:
        """Says who this is. A root without a cluster goes where a member of one has found it."""
        if standing is None and request.roster is not None and not self._is_new:
            self._hint = request.roster
            self._addresses = [one.address for one in request.roster.members if one.address != self.member.address]
        return Met(self.member, None if standing is None else standing.roster, tuple(self._addresses))

    def _once_noted(self, tables: Tables, keys: Sequence[bytes], answer: Answer, asker: bytes | None = None) -> Answer:
        """Returns the answer of a change once those are told who keep what it has replaced. It tells `asker` itself."""
        is_made = isinstance(answer, Committed) or (isinstance(answer, Ended) and answer.outcome.version)
        return Unnoted() if is_made and self.notes.are_due(tables, keys, asker) else answer

    def _pin(self, tables: Tables, request: Lookup) -> None:
        now = self._clock()
        for place in [place for place, until in list(self._pins.items()) if until <= now]:
            self._pins.pop(place, None)  # most are of bytes that were never replaced
        until = now + PIN
        for key in request.keys:
            entry = tables.record(key)
            self._pins.update((place, until) for place in (entry.places if entry else ()))

    def is_pinned(self, place: Place) -> bool:
        until = self._pins.get(place)
        if until is not None and until <= self._clock():
            self._pins.pop(place, None)
        return place in self._pins

    # --- waits --------------------------------------------------------------------------------------------------------

    def may_keep(self, request: Request, answer: Answer) -> bool:
        """Whether the request is for what isn't there yet, and may wait for it."""
        match request:
            case Wait() | WaitAny():
                return answer == IsAt(0) and request.milliseconds > 0
            case Look():
                return request.milliseconds > 0 and not sharded.is_news(request, answer)
            case Ask():
                return isinstance(answer, Done | Later) and request.milliseconds > 0
            case WatchGroup():
                return isinstance(answer, Later) and request.milliseconds > 0
            case ClaimGroups() | FindOwners() | HandOver() | Dropped():
                return isinstance(answer, Later) and not isinstance(answer, recovery.NotRecovered)
            case Remove() | Drain() | Finish() | BringGroups() | SetPolicy() | SetQuota():
                return isinstance(answer, Later)
            case Inherit() | Recovered() | Return():
                return isinstance(answer, Later)
            case Commit() | Publish():
                return isinstance(answer, Unnoted)
            case _:
                return False

    def keep(self, ticket: int, request: Request) -> None:
        """Keeps a request until there is an answer. `ticket` says whom to answer."""
        milliseconds: int | None = getattr(request, "milliseconds", None)
        lasts = _KEPT_FOR_SEED if milliseconds is None else milliseconds * 1_000_000
        question = self.seed.new_question() if isinstance(request, _ToSeed) else None
        self._waits[ticket] = (request, self._clock() + lasts, question)

    def forget(self, ticket: int) -> None:
        """Forgets a request that is answered, or whose connection has closed."""
        self._waits.pop(ticket, None)

    def ended_waits(self, tables: Tables, tickets: Collection[int] | None = None) -> list[tuple[int, Answer]]:
        """Looks at what is kept: after each change of the tables, after each mirror, and now and then.

        Who answers those that have ended forgets them then: a transaction may be begun twice.

        Args:
            tickets: whose requests are looked at: those that the change may have answered, and those whose time is
                over. None: all.
        """
        ended: list[tuple[int, Answer]] = []
        tickets = list(self._waits) if tickets is None else tickets
        standing = tables.standing()
        if standing is not None and standing.is_seed:
            self._propose_together(tables, tickets, standing.roster.position)
        for ticket in tickets:
            kept = self._waits.get(ticket)
            if kept is None:  # its connection has closed meanwhile
                continue
            request, until, question = kept
            try:
                answer = self.answer(tables, request, question)
            except CorruptionError as error:  # of this key: the others wait for theirs
                answer = failed_of(error)
            if until <= self._clock() or not self.may_keep(request, answer):
                ended.append((ticket, answer))
        return ended

    def _propose_together(self, tables: Tables, tickets: Collection[int], before: tuple[int, int]) -> None:
        """Makes one roster of all changes that are waited for, before anybody is told of it.

        Each roster goes to every member: 500 hosts that came at once were 500 rosters for each of them.

        Args:
            before: the position of the roster when this transaction began.
        """
        try:
            for request, _, question in [kept for one in tickets if (kept := self._waits.get(one)) is not None]:
                standing = own_standing(tables)
                after = standing.roster.position
                self.seed.draft = (before, after) if after != before else None
                if isinstance(request, _CHANGES_ROSTER) or (isinstance(request, Ask) and request.cluster is None):
                    self._answer(tables, standing, request, question)
        finally:
            self.seed.draft = None

    # --- what it does by itself, again and again ----------------------------------------------------------------------

    def ask(self) -> Steps[None]:
        """Asks the seed for the roster, until there is another one; as a root without a cluster, to be admitted."""
        standing = yield from view(lambda tables: tables.standing())
        if self._is_founding if standing is None else standing.is_removed or standing.is_seed:
            return
        known = self._hint if standing is None else standing.roster
        seed = None if known is None else known.member(known.seed)
        if standing is None and seed is not None and not (yield from self._bring_groups(seed)):
            return
        of = b"" if known is None else known.cluster
        versions, early = yield from view(lambda tables: (tables.version, roster.early_term(tables, of)))
        term, epoch = (0, 0) if known is None else known.position
        cluster = None if standing is None else standing.roster.cluster
        promised = early if standing is None else standing.promised
        brings = self._brought if standing is None else 0
        request = Ask(self.member, cluster, term, epoch, versions, promised, brings, self._moved, LONGEST_WAIT)
        if seed is None and not self._addresses:
            return
        answer = yield from send(seed or self._addresses[0], request)
        if isinstance(answer, RosterChange):
            answer = None if known is None else answer.whole(known)
            if answer is None:  # of another cluster than it asked before
                self._hint = None
                return
        if standing is not None and answer is not None:
            self._watch.hear(standing)
            says_so = isinstance(answer, IsRoster) and standing.member in answer.roster.ids
            self.was_member = self.was_member or says_so or isinstance(answer, Done)
        if answer is None and standing is not None and seed is not None:
            # Whoever answers at its address now is told where it belongs: a root that came back empty, perhaps.
            yield from send(seed.address, Meet(self.member, standing.roster))
            yield from self._ask_elsewhere(standing, request)
        elif answer is None:
            self._ask_another()
        elif isinstance(answer, Stale):
            self._brought = 0
        elif isinstance(answer, Refused):
            self.refusal = answer
            if answer.is_removed:
                yield from transact(roster.leave)
        elif isinstance(answer, IsRoster):
            self.refusal = None
            if standing is not None:
                yield from transact(lambda tables: roster.adopt(tables, answer.roster))
            elif answer.admits:
                owns = brings > 0 and answer.brought == brings
                if not owns:  # the grants here may be of a try that came to nothing: all groups are claimed then
                    yield from roster.forget_grants()
                yield from transact(lambda tables: roster.begin(tables, self.member.id, answer.roster, owns=owns))
            else:
                self._hint = answer.roster

    def _bring_groups(self, seed: Member) -> Steps[bool]:
        """Has the seed note the groups of this root. Returns whether it has: the admission is to be asked for then."""
        groups, _ = yield from view(lambda tables: tables.groups(b"", 1))
        if self._brought or not groups:
            return True
        answer = yield from roster.bring_groups(self.member, seed)
        match answer:
            case Brought():
                self._brought = answer.number
                return True
            case IsRoster() if answer.roster.member(self.member.id) is not None:
                return True  # it is admitted, and hasn't heard of it
            case IsRoster():
                self._hint = answer.roster
            case Refused():
                self.refusal = answer
            case None:
                self._ask_another()
            case _:
                pass  # it begins anew
        return False

    def _ask_another(self) -> None:
        """Asks, as a root without a cluster, another one of the hosts that it was told of, from now on."""
        if self._addresses:
            self._hint = None
            self._addresses.append(self._addresses.pop(0))

    def _ask_elsewhere(self, standing: Standing, request: Ask) -> Steps[None]:
        """Asks, as a member that can't reach the seed, one of the hosts that it was told of. All may have moved."""
        if not self._addresses:
            return
        address = self._addresses[0]
        self._addresses = [*self._addresses[1:], address]
        met = yield from send(address, Meet(self.member, None))
        if not isinstance(met, Met) or met.roster is None or met.roster.cluster != standing.roster.cluster:
            return
        answer: Answer | None = IsRoster(met.roster)
        if met.roster.position == standing.roster.position and met.member.id == standing.roster.seed:
            answer = yield from send(met.member, msgspec.structs.replace(request, milliseconds=0))
        if isinstance(answer, IsRoster):
            yield from transact(lambda tables: roster.adopt(tables, answer.roster))

    def found(self) -> Steps[None]:
        """Makes a cluster, if this root has none and was told of none."""
        if self._hint is None and (yield from view(lambda tables: tables.standing())) is None:
            if self._addresses and not self._is_new:
                is_first = yield from self._is_first()
            else:
                is_first = self._is_new or self._clock() - self._began >= ALONE
            if is_first and self._hint is None:
                yield from self._make_cluster()

    def _make_cluster(self) -> Steps[None]:
        """Makes a cluster, unless this root has heard of one. While it does, it asks nobody to admit it."""
        self._is_founding = True
        try:
            if self._hint is None:
                yield from roster.make_cluster(self.member, self._cluster)
        finally:
            self._is_founding = False

    def _is_first(self) -> Steps[bool]:
        """Whether this host makes the cluster of hosts that were told of each other, at their first boot.

        All of them must answer, know of no cluster, and have been told, one by the other, of this host: so each of them
        meets the same hosts. The lowest id makes the cluster.
        """
        told_of: dict[bytes, set[bytes]] = {self.member.id: set()}
        met: dict[str, Met] = {}
        left = [(self.member.id, address) for address in self._addresses]
        while left and len(told_of) <= _MOST_NAMED:
            teller, address = left.pop()
            if address not in met:
                answer = yield from send(address, Meet(self.member, None))
                if not isinstance(answer, Met):
                    return False
                if answer.roster is not None:
                    self._hint = answer.roster
                    return False
                if not answer.names:
                    return False  # it makes a cluster itself
                met[address] = answer
            host = met[address].member.id
            told_of[teller].add(host)
            if host not in told_of:
                told_of[host] = set()
                left += [(host, name) for name in met[address].names]
        if self.member.id != min(told_of):
            return False
        tellers = {self.member.id}  # of this host, or of one that was told of it
        while more := {host for host, told in told_of.items() if told & tellers} - tellers:
            tellers |= more
        return tellers == set(told_of)

    def settle(self) -> Steps[bool]:
        """Ends what a change of members has begun: joining, and what lay on hosts that are gone.

        Returns whether there was more to do than to look: then it is to be called again soon.
        """
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.is_removed:
            return False
        is_heir = yield from self.recovery.run()
        if standing.is_joining:
            yield from roster.finish_joining(standing)
        elif self._swept != (standing.losses, standing.roster.returns):
            yield from roster.drop_lost(self.seed)
            yield from draining.forget_gone()
            self._swept = standing.losses, standing.roster.returns
        elif (
            self._stale != _stale_at(standing)
            and not standing.roster.departed
            and (yield from recovery.drop_stale(self._audit.look_again))
        ):
            self._stale = _stale_at(standing)
        yield from remembering.forget_all()
        has_kept = yield from directory.settle_kept(standing, self._refused)
        return standing.is_joining or has_kept or is_heir

    def bring_back(self, root: returning.FormerRoot, take: returning.Take) -> None:
        """Has `return_all` bring back what a removed root had that was served here before."""
        self.returns.append(returning.Returns(root, take))

    def return_all(self) -> Steps[bool]:
        """Brings back what may come back. Returns whether there is more to do."""
        for one in self.returns:
            if not one.is_over and not (yield from one.run()):
                return True
        return False

    # --- replicas -----------------------------------------------------------------------------------------------------

    def is_copied_first(self, tables: Tables, request: Request) -> bool:
        """Returns whether a request is answered by `commit_copied`."""
        return isinstance(request, Commit) and replicas.is_copied_first(tables.standing(), request)

    def commit_copied(self, request: Commit, fetch: replicas.Fetch) -> Steps[Answer]:
        answer = yield from replicas.commit_copied(request, fetch)
        keys = [change.key for change in request.changes]
        return (yield from view(lambda tables: self._once_noted(tables, keys, answer)))

    def replicate(self, request: Replicate, fetch: replicas.Fetch) -> Steps[Answer]:
        """Answers a host that wants this one to have replicas, or has some of what this one owns."""
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or self._lease.is_over:
            return Later()
        if request.owner == standing.member:
            return (yield from replicas.hold(request, fetch, self.replicas.silent, self._untold))
        return (yield from replicas.keep_replicas(request, fetch))

    def fill_up(self, fetch: replicas.Fetch) -> Steps[bool]:
        """Has other hosts keep what lacks a replica. Returns whether some is left."""
        return (yield from self.replicas.run(fetch))

    def state_policy(self, policy: Policy, *, drops: bool = False) -> Steps[Answer | None]:
        standing = yield from view(lambda tables: tables.standing())
        if standing is None:
            return None
        request = SetPolicy(policy, drops)
        if standing.is_seed:
            return (
                yield from transact(lambda tables: roster.set_policy(tables, own_standing(tables), self.seed, request))
            )
        return (yield from send(standing.seed, request))

    def note(self) -> Steps[bool]:
        return (yield from self.notes.run())

    def hand_over(self) -> Steps[bool]:
        return (yield from directory.go_on(self.leaver.refused))

    def drain(self) -> Steps[bool]:
        self.leaver.brings_back = not all(one.is_over for one in self.returns)
        return (yield from self.leaver.run())

    def take_over(self, take: draining.Take) -> Steps[bool]:
        return (yield from self._takeovers.run(take))

    def clear(self, former: bytes) -> Steps[bool]:
        """Returns whether what a removed member has left on storage that hosts share is named nowhere any more."""
        return (yield from self._takeovers.clear(former, self._clock()))

    def mirror(self, slot: int) -> Steps[None]:
        while (yield from self.seed.mirror(slot)):
            yield from pause(directory.BETWEEN)

    def appoint(self) -> Steps[None]:
        """Does what a seed does by itself, but for mirrors."""
        yield from promotion.tell_members(self.seed)
        if (yield from view(self._is_another)):
            yield from transact(lambda tables: roster.change_oneself(tables, self.seed, self.member, moved=self._moved))
        yield from promotion.rebuild(self.seed)
        yield from promotion.appoint(self.seed)
        yield from returning.give_up(self.seed)

    def beat(self) -> Steps[None]:
        """Asks the seed whether it is there, and renews this host's lease."""
        return (yield from fence.beat(self._watch, self._lease, self._leases, self.seed))

    def stand_in(self) -> Steps[bool]:
        """Makes this member the seed, if it is a deputy, and a majority hasn't heard the seed for too long."""
        return (yield from fence.stand_in(self.seed, self._watch))

    def remove_silent(self) -> Steps[list[bytes]]:
        """Removes members that are silent, as the seed. Returns their ids."""
        return (yield from fence.remove_silent(self.seed, self._leases))

    @property
    def is_fenced(self) -> bool:
        """Returns whether this host's lease is over: nothing that it owns may be told or changed."""
        return self._lease.is_over

    def look_for(self) -> Steps[None]:
        """Looks for a member that is silent, as the seed."""
        kept = list(self._waits.values())
        asking = {request.member.id for request, _, _ in kept if isinstance(request, Ask)}
        yield from roster.look_for(self.seed, asking)

    def _is_another(self, tables: Tables) -> bool:
        standing = tables.standing()
        return standing is not None and standing.is_seed and standing.roster.member(self.member.id) != self.member

    def promote(self, *, forced: bool = False) -> Steps[None]:
        """Makes this member the seed, because a person says so: see `promotion.promote`."""
        return (yield from promotion.promote(self.seed, forced=forced))

    def pay(self) -> Steps[None]:
        """Ends the sharded puts whose time is over, and tells other hosts what they are owed."""
        if (yield from view(attempts.expired)):
            yield from transact(attempts.expire)
        yield from recovery.drop_voids()
        yield from owning.pay(self.is_pinned)

    def audit(self) -> Steps[None]:
        return (yield from self._audit.run())

    def end_sessions(self, connected: Callable[[], Collection[int]]) -> Steps[None]:
        """Ends those of clients that have had no connection for an hour.

        Args:
            connected: sessions that have a connection, or had one since this was last called.
        """
        return (yield from self._sessions.run(connected))


def _stale_at(standing: Standing) -> tuple[int, int]:
    """Returns when backups are to be looked through: after a loss; with replicas also after a hand-over, an epoch."""
    return standing.losses, standing.roster.epoch if standing.roster.policies else 0
