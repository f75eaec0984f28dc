"""Rules left out on purpose. Schedules must find what each of them prevents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memstore.distributed.rules import (
    client,
    directory,
    draining,
    history,
    owning,
    promotion,
    reading,
    recovery,
    roster,
    sharded,
)
from memstore.distributed.rules.directory import Directory
from memstore.distributed.rules.messages import (
    BackedUp,
    Done,
    Drain,
    Failed,
    FindBackups,
    FindOwners,
    IsNamed,
    IsRoster,
    Later,
    Listed,
    NoSession,
    NotOwner,
)
from memstore.distributed.rules.nouns import Roster, Standing
from memstore.distributed.rules.owning import Sessions
from memstore.distributed.rules.steps import NotSent, send, view
from memstore.engine import attempts
from memstore.errors import HomeUnavailableError
from tests.distributed.rules import world
from tests.distributed.rules.tables import SimTables
from tests.distributed.rules.world import World

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {}  # what is left out -> a scene that finds it, and how
ANSWER_AGAIN, KEEP_ANSWER = owning.answer_again, owning.keep_answer


def mutation(name: str, scene: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[name] = (scene, patch)
        return patch

    return add


# --- calls ------------------------------------------------------------------------------------------------------------


@mutation("a repeated call is made again", "cuts")
def _(patch: Patch) -> None:
    patch.setattr(owning, "answer_again", lambda tables, call: None)  # pyright: ignore


@mutation("an old duplicate is made again", "late duplicates")
def _(patch: Patch) -> None:
    def answer_again(tables: Any, call: Any) -> Any:
        answer = ANSWER_AGAIN(tables, call)
        last = tables.last_call(call.session, call.lane)
        return None if isinstance(answer, NoSession) and last is not None and last.number > call.number else answer

    patch.setattr(owning, "answer_again", answer_again)


@mutation("outcomes are in memory only", "kills")
def _(patch: Patch) -> None:
    kill_index = World.kill_index

    def forget(world: World, host: Any) -> None:
        host.tables.calls.clear()
        kill_index(world, host)

    patch.setattr(World, "kill_index", forget)


@mutation("a failure is no outcome", "late duplicates")
def _(patch: Patch) -> None:
    def keep_answer(tables: Any, call: Any, answer: Any) -> Any:
        return answer if isinstance(answer, Failed) else KEEP_ANSWER(tables, call, answer)

    patch.setattr(owning, "keep_answer", keep_answer)


@mutation("a call that was interrupted leaves its number to the next one", "interrupts")
def _(patch: Patch) -> None:
    commit = client.Client.commit

    def interrupted(one: Any, *arguments: Any) -> Any:
        before = copy.copy(one._numbers)
        try:
            return (yield from commit(one, *arguments))
        except GeneratorExit:
            one._numbers = before
            raise

    patch.setattr(client.Client, "commit", interrupted)


@mutation("a session that has ended is a new one", "sessions")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "has_session", lambda tables, session: True)  # pyright: ignore


@mutation("a call that wasn't answered is made anew", "cuts")
def _(patch: Patch) -> None:
    def once(owner: Any, request: Any, attempt: Any) -> Any:
        attempt.is_sent = True
        answer = yield from client.send(owner, request)
        return NotOwner() if answer is None else answer

    patch.setattr(client, "repeated", once)


@mutation("no answer means that nothing happened", "cuts")
def _(patch: Patch) -> None:
    patch.setattr(client, "UnknownOutcomeError", HomeUnavailableError)


@mutation("a message without an answer was not sent", "cuts")
def _(patch: Patch) -> None:
    patch.setattr(client, "NotSent", NotSent | None)  # pyright: ignore


@mutation("a batch is several commits", "storm")
def _(patch: Patch) -> None:
    commit = client.Client.commit

    def one_by_one(one: Any, changes: Any, until: int) -> Any:
        for change in changes:
            versions = yield from commit(one, [change], until)
        return versions  # pyright: ignore

    patch.setattr(client.Client, "commit", one_by_one)


@mutation("the sessions of clients that are gone stay", "sessions")
def _(patch: Patch) -> None:
    def nothing(self: Any, connected: Any) -> Any:
        return
        yield

    patch.setattr(Sessions, "run", nothing)


@mutation("sessions end though their clients are there", "sessions of the unlucky")
def _(patch: Patch) -> None:
    run = Sessions.run
    patch.setattr(Sessions, "run", lambda self, connected: run(self, lambda: ()))  # pyright: ignore


@mutation("a call of a session that has ended was never made", "sessions")
def _(patch: Patch) -> None:
    repeated = client.repeated  # pyright: ignore[reportPrivateUsage]

    def never(owner: Any, request: Any, attempt: Any) -> Any:
        answer = yield from repeated(owner, request, attempt)
        attempt.is_sent = attempt.is_sent and not isinstance(answer, NoSession)
        return answer

    patch.setattr(client, "repeated", never)


# --- who is the owner ------------------------------------------------------------------------------------------------


@mutation("a grant is good whatever its number", "hand-overs")
def _(patch: Patch) -> None:
    admit = owning.admit

    def anyway(tables: Any, standing: Any, groups: Any, grants: Any, *, changes: bool) -> Any:
        answer = admit(tables, standing, groups, grants, changes=changes)
        return None if isinstance(answer, NotOwner) else answer

    for module in (owning, sharded, directory):
        patch.setattr(module, "admit", anyway)


@mutation("a hand-over doesn't raise the floor", "a commit that comes after a hand-over")
def _(patch: Patch) -> None:
    put = SimTables.put_standing

    def keep_floor(tables: SimTables, standing: Any) -> None:
        old = tables.standing()
        put(tables, msgspec.structs.replace(standing, floor=0 if old is None else old.floor))

    patch.setattr(SimTables, "put_standing", keep_floor)


@mutation(
    "a local commit doesn't look whether the group has left this host", "a process that is stopped during a hand-over"
)
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "membership", lambda tables: int(tables.own_standing is not None))  # pyright: ignore


@mutation("a change doesn't record the grant", "kills")
def _(patch: Patch) -> None:
    patch.setattr(owning, "record_grant", lambda tables, group, grant: None)  # pyright: ignore


@mutation("versions go on from where the new owner was", "losses")
def _(patch: Patch) -> None:
    patch.setattr(owning, "record_grant", lambda tables, group, grant: tables.put_owned(group, grant))  # pyright: ignore


@mutation("what a claim was told is told again whoever owns it", "hand-overs")
def _(patch: Patch) -> None:
    patch.setattr(client.Client, "refuse", lambda one, owner: None)  # pyright: ignore


@mutation("absence is remembered", "quiet")
def _(patch: Patch) -> None:
    locate = client.Client._ask_directory  # pyright: ignore[reportPrivateUsage]

    def remembering(one: Any, standing: Any, groups: Any, owners: Any, *, claims: bool) -> Any:
        known = one.__dict__.setdefault("nobodys", {})
        if not claims and groups in known:
            return known[groups]
        found = yield from locate(one, standing, groups, owners, claims=claims)
        if found is not None and not any(found.rows):
            known[groups] = found
        return found

    patch.setattr(client.Client, "_ask_directory", remembering)


@mutation("half of a batch may have no owner yet", "a batch of two groups, one of them new")
def _(patch: Patch) -> None:
    def still(one: Any, groups: Any) -> Any:
        return True
        yield

    patch.setattr(reading, "_are_still_nobodys", still)


@mutation("bytes of any host are put", "bytes of a host that was removed")
def _(patch: Patch) -> None:
    patch.setattr(owning, "are_strange", lambda standing, call, places, key: None)  # pyright: ignore


@mutation("who waits for a new group isn't told", "quiet")
def _(patch: Patch) -> None:
    def watch(one: Any, standing: Any, group: bytes) -> Any:
        yield from reading.pause(60)

    patch.setattr(reading, "_watch", watch)


@mutation("who waits for any key is told of those that were there", "quiet")
def _(patch: Patch) -> None:
    def news(one: Any, prefix: bytes, listing: Any) -> Any:
        yield from reading.pause(60)

    patch.setattr(reading, "_news", news)


# --- the directory ----------------------------------------------------------------------------------------------------


@mutation("a claim is answered before the deputies have it", "promotions in a storm")
def _(patch: Patch) -> None:
    patch.setattr(Directory, "tell", lambda one, tables, standing, rows: directory.Owners(tuple(rows)))  # pyright: ignore


@mutation("a denial asks no deputy", "an old seed denies")
def _(patch: Patch) -> None:
    patch.setattr(Directory, "_is_confirmed", lambda one, roster, question: True)  # pyright: ignore


@mutation("who lists all keys asks owners, and not the seed", "an old seed is asked for all keys")
def _(patch: Patch) -> None:
    def believes(to: Any, request: Any) -> Any:
        return directory.Owners(()) if request == FindOwners((), ()) else (yield from send(to, request))

    patch.setattr(reading, "send", believes)


@mutation("a host that is to own nothing more isn't asked for what it has", "owners no more")
def _(patch: Patch) -> None:
    def forgets(tables: Any, cluster: Any, member: Any, *, has_groups: bool = False) -> Any:
        return cluster.holders

    patch.setattr(roster, "_holders_with", forgets)


@mutation("a seed without a directory knows who owns nothing", "owners no more while seeds change")
def _(patch: Patch) -> None:
    begin = promotion._begin_term  # pyright: ignore[reportPrivateUsage]

    def knows(tables: Any, member: Any, newest: Any, term: int, is_whole: bool) -> bool:
        with patch.context() as inner:
            inner.setattr(promotion, "Roster", lambda *fields: Roster(*fields[:7]))  # pyright: ignore
            return begin(tables, member, newest, term, is_whole)

    patch.setattr(promotion, "_begin_term", knows)


@mutation("whoever is named gets a group", "visitors")
def _(patch: Patch) -> None:
    patch.setattr(directory, "_may_own", lambda cluster, member: True)  # pyright: ignore


@mutation("a row of the old seed's stays at a deputy", "a row that one deputy knows")
def _(patch: Patch) -> None:
    take = directory.take_mirror

    def keep(tables: Any, standing: Any, request: Any) -> Any:
        rows = tuple(
            row
            for row in request.rows
            if (old := tables.ownership(row.group)) is None or old.grant.number < row.grant.number
        )
        return take(tables, standing, msgspec.structs.replace(request, rows=rows))

    patch.setattr(directory, "take_mirror", keep)


@mutation("a deputy counts before it has the whole directory", "lost while hosts join")
def _(patch: Patch) -> None:
    patch.setattr(Directory, "has_all", lambda one, tables, member: True)  # pyright: ignore


@mutation("who owns nothing has the directory as others do", "members that own nothing are cut off")
def _(patch: Patch) -> None:
    patch.setattr(promotion, "_steady", lambda cluster: cluster.ids - {cluster.seed})  # pyright: ignore


@mutation("numbers of grants begin anew when the seed is killed", "kills")
def _(patch: Patch) -> None:
    kill_index = World.kill_index

    def forget(world: World, host: Any) -> None:
        host.tables.granted = 0
        kill_index(world, host)

    patch.setattr(World, "kill_index", forget)


@mutation("a host that is to stay is sealed all the same", "a drain is cancelled when all has gone")
def _(patch: Patch) -> None:
    seal = draining._seal  # pyright: ignore[reportPrivateUsage]

    def forget(tables: Any) -> bool:
        tables.put_standing(msgspec.structs.replace(tables.standing(), stays=False))
        return seal(tables)

    def stay(leaver: Any, standing: Standing) -> Any:
        yield from send(standing.seed, Drain(standing.member, cancels=True))
        yield from leaver._give_bytes(standing, [])

    patch.setattr(draining, "_seal", forget)
    patch.setattr(draining.Leaver, "_stay", stay)


@mutation("what is on its way goes on though the host stays", "a drain is cancelled")
def _(patch: Patch) -> None:
    patch.setattr(directory, "cancel", lambda tables, group: None)  # pyright: ignore


@mutation("a sealed host that the seed has stay is none that leaves", "a drain is cancelled too late")
def _(patch: Patch) -> None:
    run = draining.Leaver.run

    def leaves(leaver: Any) -> Any:
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or standing.stays or standing.roster.is_leaver(standing.member):
            return (yield from run(leaver))
        return False

    patch.setattr(draining.Leaver, "run", leaves)


# --- a drain ----------------------------------------------------------------------------------------------------------


@mutation(
    "what a hand-over that was cancelled has brought stays good", "a hand-over that is begun again to the same host"
)
def _(patch: Patch) -> None:
    hand_over = Directory._hand_over  # pyright: ignore[reportPrivateUsage]

    def keep(one: Directory, tables: Any, cluster: Any, request: Any) -> Any:
        row = directory.owner_row(tables, cluster, request.group)
        if row is not None and row.owner == request.giver == request.taker:
            return [row]
        return hand_over(one, tables, cluster, request)

    patch.setattr(Directory, "_hand_over", keep)


@mutation(
    "bytes are taken over while the group is handed over", "a group that is handed over while its bytes are taken over"
)
def _(patch: Patch) -> None:
    replace = draining.replace_places

    def blindly(tables: Any, key: bytes, before: Any, after: Any) -> bool:
        with Patch.context() as inner:
            inner.setattr(SimTables, "leaving", lambda tables, group: None)  # pyright: ignore
            return replace(tables, key, before, after)

    patch.setattr(world, "replace_places", blindly)


@mutation(
    "bytes are taken over into whatever the record is by now",
    "a put while the bytes of the version before are taken over",
)
def _(patch: Patch) -> None:
    replace = draining.replace_places

    def blindly(tables: Any, key: bytes, before: Any, after: Any) -> bool:
        now = tables.record(key)
        if now is not None and tables.owned(owning.group_of(key)) is not None:
            before = msgspec.structs.replace(before, version=now.version, places=now.places)
        return replace(tables, key, before, after)

    patch.setattr(world, "replace_places", blindly)


@mutation("a host that leaves goes on until it is removed", "a put when its host is about to be removed")
def _(patch: Patch) -> None:
    patch.setattr(Standing, "may_change", property(lambda standing: not standing.is_removed))


@mutation("a host leaves whatever it has lent", "a commit that is on its way when its host is to leave")
def _(patch: Patch) -> None:
    all_lent = SimTables.all_lent
    patch.setattr(
        SimTables, "all_lent", lambda tables, after, limit: [] if limit == 1 else all_lent(tables, after, limit)
    )


@mutation("a host leaves while groups come to it", "a grant that is used when its host is to own nothing more")
def _(patch: Patch) -> None:
    def seal(tables: Any) -> bool:
        tables.put_standing(msgspec.structs.replace(tables.standing(), is_sealed=True))
        return True

    patch.setattr(draining, "_seal", seal)


@mutation(
    "a host that leaves owns what it had before it was handed over",
    "a host that took a group of one that leaves, and is lost",
)
def _(patch: Patch) -> None:
    patch.setattr(owning, "_has_nothing", lambda standing, row: False)  # pyright: ignore


@mutation("who has looked once takes files of others in", "files of others on a host that leaves")
def _(patch: Patch) -> None:
    strange = owning.are_strange

    def forget(standing: Any, call: Any, places: Any, key: bytes) -> Any:
        known = msgspec.structs.replace(standing.roster, leavers=())
        return strange(msgspec.structs.replace(standing, roster=known), call, places, key)

    patch.setattr(owning, "are_strange", forget)


@mutation("nobody looks for files of others", "files of others on a host that leaves")
def _(patch: Patch) -> None:
    patch.setattr(draining.Takeovers, "answer", lambda one, standing, request: Done())  # pyright: ignore


@mutation("what nobody takes stays marked", "a host that takes nothing")
def _(patch: Patch) -> None:
    patch.setattr(directory, "cancel", lambda tables, group: None)  # pyright: ignore


# --- the roster -------------------------------------------------------------------------------------------------------


@mutation("a roster counts at once", "a seed that is cut off adds and removes")
def _(patch: Patch) -> None:
    patch.setattr(Directory, "is_settled", lambda one, standing: standing.is_seed)  # pyright: ignore


@mutation("a member obeys whom it has promised not to", "a promise that was given in between")
def _(patch: Patch) -> None:
    patch.setattr(promotion, "take_promise", lambda tables, standing, request: promotion.Promised(standing.roster))  # pyright: ignore


@mutation("who has promised waits until a person comes", "promotions")
def _(patch: Patch) -> None:
    patch.setattr(Directory, "hear_of", lambda one, term: None)  # pyright: ignore


@mutation("two terms may have one number", "forced promotions in a storm")
def _(patch: Patch) -> None:
    patch.setattr(promotion, "SEED_BITS", 0)


@mutation("anybody may be the seed", "promotions in a storm")
def _(patch: Patch) -> None:
    def promote(seed: Any, *, forced: bool = False) -> Any:
        standing = yield from promotion.transact(promotion._promise_oneself)  # pyright: ignore[reportPrivateUsage]
        assert standing is not None
        newest = standing.roster
        yield from promotion.transact(
            lambda tables: promotion._begin_term(tables, standing.member, newest, standing.promised, True)  # pyright: ignore
        )

    patch.setattr(promotion, "promote", promote)


@mutation("a stranger is heard whatever epoch it names", "lost while hosts join")
def _(patch: Patch) -> None:
    answer_ask = roster.answer_ask

    def heard(tables: Any, standing: Any, seed: Any, ask: Any) -> Any:
        if standing.roster.member(ask.member.id) is None and ask.cluster is None:
            term, epoch = standing.roster.position
            ask = msgspec.structs.replace(ask, term=term, epoch=epoch)
        return answer_ask(tables, standing, seed, ask)

    patch.setattr(roster, "answer_ask", heard)


@mutation("what lies on no member stays in the catalog", "losses")
def _(patch: Patch) -> None:
    def nothing(seed: Any) -> Any:
        return
        yield

    patch.setattr(roster, "drop_lost", nothing)


@mutation("a root is admitted whoever has claimed one of its groups", "a group of a root that joins is claimed")
def _(patch: Patch) -> None:
    patch.setattr(Directory, "lose", lambda one, row: None)  # pyright: ignore


@mutation(
    "rows of a root that is to be admitted are of the present epoch",
    "a deputy looks for rows of removed members while a root joins",
)
def _(patch: Patch) -> None:
    give_new = Directory.give_new

    def of_now(one: Directory, tables: Any, cluster: Any, groups: Any, member: bytes, epoch: Any = None) -> Any:
        return give_new(one, tables, cluster, groups, member)

    patch.setattr(Directory, "give_new", of_now)


@mutation("what a try has written stays for the next one", "a root that joins at the second try")
def _(patch: Patch) -> None:
    def nothing() -> Any:
        return
        yield

    patch.setattr(roster, "forget_grants", nothing)


@mutation("a root owns what it has noted whoever admits it", "a root that is admitted by a question that comes late")
def _(patch: Patch) -> None:
    answer_ask = roster.answer_ask

    def believes(tables: Any, standing: Any, seed: Any, ask: Any) -> Any:
        answer = answer_ask(tables, standing, seed, ask)
        is_admitted = isinstance(answer, IsRoster) and answer.admits
        return msgspec.structs.replace(answer, brought=ask.brings) if is_admitted else answer

    patch.setattr(roster, "answer_ask", believes)


@mutation("a root that joins serves groups that it hasn't claimed", "a root that puts while it joins")
def _(patch: Patch) -> None:
    patch.setattr(owning, "is_unclaimed", lambda tables, standing, group: False)  # pyright: ignore


@mutation("records of a root that joins keep their versions", "a root with keys of a host that was removed")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "raise_version", lambda tables, key, version: None)  # pyright: ignore


@mutation("a new seed that has no directory waits for nobody", "a directory that is lost")
def _(patch: Patch) -> None:
    begin = promotion._begin_term  # pyright: ignore[reportPrivateUsage]

    def hasty(tables: Any, *arguments: Any) -> Any:
        done = begin(tables, *arguments)
        tables.put_standing(msgspec.structs.replace(tables.standing(), unheard=()))
        return done

    patch.setattr(promotion, "_begin_term", hasty)


@mutation("a forced seed knows better who is a member", "a host that joins while another seed is forced")
def _(patch: Patch) -> None:
    for module in (roster, promotion):
        patch.setattr(module, "left_out", lambda older, forced: [])  # pyright: ignore[reportUnknownLambdaType]


@mutation("a new term leaves the floor as it was", "a grant of the old term")
def _(patch: Patch) -> None:
    put = SimTables.put_standing
    admit = owning.admit

    def keep_floor(tables: SimTables, standing: Any) -> None:
        old = tables.standing()
        put(tables, msgspec.structs.replace(standing, floor=0 if old is None else old.floor))

    def of_any_term(tables: Any, standing: Any, groups: Any, grants: Any, *, changes: bool) -> Any:
        terms = [grant.term for grant in grants]
        if any(term < standing.roster.term for term in terms):
            earlier = msgspec.structs.replace(standing.roster, term=min(terms))
            standing = msgspec.structs.replace(standing, roster=earlier)
        return admit(tables, standing, groups, grants, changes=changes)

    patch.setattr(SimTables, "put_standing", keep_floor)
    patch.setattr(owning, "admit", of_any_term)


@mutation("a host that is removed has no vote", "a drained host leaves, and another one is lost")
def _(patch: Patch) -> None:
    answer_ask = roster.answer_ask

    def deaf(tables: Any, standing: Standing, seed: Directory, ask: Any) -> Any:
        with Patch.context() as inner:
            if ask.member.id not in standing.roster.ids:
                inner.setattr(Directory, "hear", lambda *_: None)
            return answer_ask(tables, standing, seed, ask)

    patch.setattr(roster, "answer_ask", deaf)


@mutation("what names the own host is lost once another roster is heard of", "a host that is removed, and isn't")
def _(patch: Patch) -> None:
    patch.setattr(
        roster,
        "are_there",
        lambda tables, standing, places: all(place.host in standing.roster.ids for place in places),  # pyright: ignore
    )


@mutation("a group is its giver's for ever", "an owner that dies after it was handed a group")
def _(patch: Patch) -> None:
    def locate(seed: Any, tables: Any, roster: Any, request: Any) -> Any:
        return [directory.owner_row(tables, roster, group) for group, _ in request.rows]

    patch.setattr(directory.Directory, "_forget_giver", locate)


@mutation("a seed that was replaced is believed", "a group that is handed to a seed that was replaced")
def _(patch: Patch) -> None:
    patch.setattr(directory, "is_outdated", lambda row, number: False)  # pyright: ignore


@mutation("who can't be the seed asks for promises", "a host that can't be the seed is promoted again and again")
def _(patch: Patch) -> None:
    patch.setattr(promotion, "_is_seed_already", _never)


@mutation("the seed begins a new term whenever it is promoted", "the seed is promoted again and again")
def _(patch: Patch) -> None:
    patch.setattr(promotion, "_is_seed_already", _never)


def _never(seed: Directory) -> Any:
    return False
    yield


# --- histories --------------------------------------------------------------------------------------------------------


def _no_steps(*_: Any) -> Any:
    return
    yield


@mutation("an audit doesn't look for replaced versions", "histories")
def _(patch: Patch) -> None:
    patch.setattr(history, "names", lambda tables, key, place: False)  # pyright: ignore


@mutation("bytes of replaced versions that go stay", "histories")
def _(patch: Patch) -> None:
    def forget(tables: Any, standing: Any, key: bytes, version: int) -> None:
        tables.drop_replaced(key, version)

    patch.setattr(history, "_let_go", forget)


@mutation("replaced versions stay whatever the history says", "histories")
def _(patch: Patch) -> None:
    patch.setattr(history, "count_within", lambda versions, most, nbytes: len(versions))  # pyright: ignore


@mutation("a history ends with the next put", "a history goes on with puts of other hosts")
def _(patch: Patch) -> None:
    put = SimTables.put_record

    def once(tables: SimTables, key: bytes, entry: Any) -> None:
        put(tables, key, entry if key not in tables.records else msgspec.structs.replace(entry, history=None))

    patch.setattr(SimTables, "put_record", once)


@mutation("any version of a key is the present one", "histories")
def _(patch: Patch) -> None:
    patch.setattr(history, "find", lambda tables, key, version: tables.record(key))  # pyright: ignore


@mutation("a group is handed over, and its replaced versions stay", "histories")
def _(patch: Patch) -> None:
    patch.setattr(directory, "hand_on", lambda *_: 0)  # pyright: ignore[reportUnknownLambdaType]


@mutation("a hand-over brings no replaced versions", "replaced versions of a host that is drained")
def _(patch: Patch) -> None:
    patch.setattr(directory, "with_replaced", lambda tables, key, entry: entry)  # pyright: ignore


@mutation("what a hand-over brings of replaced versions isn't kept", "replaced versions of a host that is drained")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "put_replaced", lambda tables, key, entry: None)  # pyright: ignore


@mutation("replaced versions of a removed host stay", "histories and losses")
def _(patch: Patch) -> None:
    patch.setattr(roster, "let_lost_go", _no_steps)


@mutation("a host that is drained waits for what replaced versions name", "histories and drains")
def _(patch: Patch) -> None:
    def nothing(*_: Any) -> Any:
        return True
        yield

    patch.setattr(history, "take_over", nothing)


@mutation("replaced versions are looked through first", "a version is replaced while its host is looked for")
def _(patch: Patch) -> None:
    drop_lost, let_lost_go = roster.drop_lost, roster.let_lost_go

    def first(seed: Any) -> Any:
        yield from let_lost_go()
        yield from drop_lost(seed)

    patch.setattr(roster, "drop_lost", first)
    patch.setattr(roster, "let_lost_go", _no_steps)


@mutation("who keeps a version forgets its history", "an heir goes on with a history")
def _(patch: Patch) -> None:
    backup = client.Backup
    patch.setattr(client, "Backup", lambda *said: backup(*said[:6]))  # pyright: ignore


# --- a death ----------------------------------------------------------------------------------------------------------


@mutation("a change is acknowledged before keepers are told", "an owner that dies right after a delete")
def _(patch: Patch) -> None:
    def nobody(keys: Any, silent: Any) -> Any:
        return
        yield

    patch.setattr(client, "tell_keepers", nobody)
    patch.setattr(recovery.Notes, "are_due", lambda one, *asked: False)  # pyright: ignore


@mutation("keepers aren't told", "deaths")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "put_unnoted", lambda tables, key, unnoted: None)  # pyright: ignore


@mutation("a put returns before its host keeps it", "deaths")
def _(patch: Patch) -> None:
    def nothing(owner: Any, rows: Any, began: int, replaced: Any) -> Any:
        return True
        yield

    patch.setattr(client, "keep", nothing)


@mutation("a host keeps what it has deleted itself", "an owner that dies right after another host's delete")
def _(patch: Patch) -> None:
    keep = client.keep
    patch.setattr(client, "keep", lambda owner, rows, began, replaced: keep(owner, rows, began))  # pyright: ignore


@mutation("a host that deletes says that all are told", "an owner that dies right after another host's delete")
def _(patch: Patch) -> None:
    def told(one: Any, tables: Any, keys: Any, asker: Any = None) -> bool:
        return asker is None and are_due(one, tables, keys)

    are_due = recovery.Notes.are_due
    patch.setattr(recovery.Notes, "are_due", told)


@mutation("a host that deletes leaves no void", "a put of another process whose row is late")
def _(patch: Patch) -> None:
    def drop(tables: Any, rows: Any) -> None:
        for key, upto in rows:
            backup = tables.backup(key)
            if backup is not None and backup.version <= upto:
                tables.drop_backup(key)

    patch.setattr(recovery, "_drop_replaced", drop)


@mutation("a rank returns before its host keeps the version", "deaths and shards")
def _(patch: Patch) -> None:
    def nothing(one: Any, own: Any, outcome: Any) -> Any:
        return
        yield

    patch.setattr(sharded, "keep_published", nothing)


@mutation("an heir waits for nobody", "a member that says late what it keeps")
def _(patch: Patch) -> None:
    send_all = recovery.send_all

    def hasty(requests: Any, *meanwhile: Any) -> Any:
        answers = yield from send_all(requests, *meanwhile)
        asked = [request for _, request in requests]
        return [
            BackedUp(()) if isinstance(request, FindBackups) and not isinstance(answer, BackedUp) else answer
            for request, answer in zip(asked, answers, strict=True)
        ]

    patch.setattr(recovery, "send_all", hasty)


@mutation("a group of a dead owner is nobody's until its heir has it", "a member that says late what it keeps")
def _(patch: Patch) -> None:
    for module in (directory, roster):
        patch.setattr(module, "is_pending", lambda tables, cluster, groups: False)  # pyright: ignore


@mutation("a row is written for an owner that was removed", "a put that is heard of after a recovery")
def _(patch: Patch) -> None:
    write = recovery._write_backups  # pyright: ignore[reportPrivateUsage]

    def anyway(tables: Any, owner: Any, *written: Any) -> Any:
        with Patch.context() as inner:
            inner.setattr(Roster, "ids", property(lambda cluster: {owner.id}))
            return write(tables, owner, *written)

    patch.setattr(recovery, "_write_backups", anyway)


@mutation("a member says what it keeps before it knows of the removal", "a member that hears of a removal late")
def _(patch: Patch) -> None:
    find = recovery.find_backups

    def at_once(tables: Any, standing: Any, request: Any) -> Any:
        return find(tables, standing, msgspec.structs.replace(request, member=bytes(16)))

    patch.setattr(recovery, "find_backups", at_once)


@mutation("a note leaves no mark", "a put that is heard of after it was replaced")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "void", lambda tables, key: (0, 0))  # pyright: ignore


@mutation("a row is written after its mark is gone", "a put that is heard of long after it was replaced")
def _(patch: Patch) -> None:
    patch.setattr(recovery, "WINDOW", 1 << 62)


@mutation("rows of before a hand-over count", "a group that comes back to an owner which dies")
def _(patch: Patch) -> None:
    patch.setattr(directory.Ownership, "first", property(lambda row: 0))


@mutation("an heir doesn't know who keeps what it has got", "deaths")
def _(patch: Patch) -> None:
    merge = recovery._merge  # pyright: ignore[reportPrivateUsage]

    def forget(tables: Any, *arguments: Any) -> None:
        with Patch.context() as inner:
            inner.setattr(SimTables, "put_keepers_of", lambda tables, rows: None)  # pyright: ignore
            merge(tables, *arguments)

    patch.setattr(recovery, "_merge", forget)


@mutation(
    "what hosts keep stays when bytes are taken over", "bytes that are taken over, of which another host has a record"
)
def _(patch: Patch) -> None:
    patch.setattr(draining, "forget_keepers", lambda tables, key: None)  # pyright: ignore


@mutation("a delete leaves what is to be replaced anyway", "a key that is deleted when its bytes were taken over")
def _(patch: Patch) -> None:
    patch.setattr(recovery, "_is_due", lambda at, version: at != version)  # pyright: ignore


@mutation("a second death leaves the heir as it was", "an heir that dies")
def _(patch: Patch) -> None:
    heirs = recovery.heirs

    def stays(cluster: Any, members: Any, departed: Any) -> Any:
        known = {one.member.id: one for one in departed}
        return tuple(known.get(one.member.id, one) for one in heirs(cluster, members, departed))

    patch.setattr(roster, "heirs", stays)


# --- hand-overs -------------------------------------------------------------------------------------------------------


@mutation("a group that leaves can be changed", "hand-overs")
def _(patch: Patch) -> None:
    look_at = client.look_at

    def blind(tables: Any, keys: Any, groups: Any = None) -> Any:
        view = look_at(tables, keys, groups)
        view.leaving = frozenset()
        return view

    patch.setattr(client, "look_at", blind)


@mutation("the new owner serves before the old one has dropped its records", "a taker that is asked early")
def _(patch: Patch) -> None:
    put_kept = SimTables.put_kept
    patch.setattr(
        SimTables,
        "put_kept",
        lambda tables, group, kept: put_kept(tables, group, msgspec.structs.replace(kept, is_free=True)),  # pyright: ignore
    )


@mutation("records are sent once", "hand-overs in a storm")
def _(patch: Patch) -> None:
    send = directory.send

    def once(to: Any, request: Any) -> Any:
        answer = yield from send(to, request)
        return Done() if isinstance(request, directory.Give) else answer

    patch.setattr(directory, "send", once)


@mutation("what was kept is served to whoever is given the group", "a giver that is lost")
def _(patch: Patch) -> None:
    is_open = owning._is_open  # pyright: ignore[reportPrivateUsage]

    def whatever(tables: Any, standing: Any, group: bytes, grant: Any) -> bool:
        kept = tables.kept(group)
        if kept is not None:
            tables.put_kept(group, msgspec.structs.replace(kept, of=grant.after, version=kept.version or 0))
        return is_open(tables, standing, group, grant)

    patch.setattr(owning, "_is_open", whatever)


@mutation("a hand-over is asked for again whoever owns the group by now", "a hand-over that is asked for late")
def _(patch: Patch) -> None:
    hand_over = Directory._hand_over  # pyright: ignore[reportPrivateUsage]
    latest = (1 << 63) - 1

    def again(one: Any, tables: Any, roster: Any, request: Any) -> Any:
        row = directory.owner_row(tables, roster, request.group)
        if row is not None and row.owner == request.giver:
            request = msgspec.structs.replace(request, of=latest)
        return hand_over(one, tables, roster, request)

    patch.setattr(Directory, "_hand_over", again)


@mutation("an old owner takes part in listings at once", "a listing of a hand-over")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "all_leaving", _without_granted)


def _without_granted(tables: SimTables) -> Any:
    import inspect

    rows = list(tables.leaving_groups.items())
    is_listing = inspect.currentframe().f_back.f_code.co_name == "_admit_listing"  # type: ignore[union-attr]
    return [] if is_listing else rows


@mutation("a page of keys may be of another epoch", "a listing of a hand-over")
def _(patch: Patch) -> None:
    def list_page(tables: Any, standing: Any, request: Any) -> Any:
        page = tables.page(request.after, request.limit, request.prefix)
        return Listed(tuple((key, entry and entry.version) for key, entry in page))

    patch.setattr(owning, "list_page", list_page)


@mutation("a giver drops its records in whatever term", "a directory that is lost in a hand-over")
def _(patch: Patch) -> None:
    drop = directory._drop  # pyright: ignore[reportPrivateUsage]

    def anyway(tables: Any, before: Any, leaving: Any, row: Any) -> None:
        drop(tables, tables.standing().roster, leaving, row)

    patch.setattr(directory, "_drop", anyway)


@mutation("a giver whose taker is gone goes on by itself", "a taker whose removal doesn't count")
def _(patch: Patch) -> None:
    give = directory._give  # pyright: ignore[reportPrivateUsage]

    def by_itself(standing: Any, group: bytes, leaving: Any, taker: Any) -> Any:
        if taker is None:
            yield from directory.transact(lambda tables: tables.drop_leaving(group))
            return
        yield from give(standing, group, leaving, taker)

    patch.setattr(directory, "_give", by_itself)


@mutation("a group whose taker is removed is nobody's", "a taker that is lost")
def _(patch: Patch) -> None:
    put = SimTables.put_ownerships
    patch.setattr(
        SimTables,
        "put_ownerships",
        lambda tables, rows: put(tables, [msgspec.structs.replace(row, giver=None) for row in rows]),  # pyright: ignore
    )


@mutation("what was kept names bytes of hosts that are gone", "hand-overs to lost hosts")
def _(patch: Patch) -> None:
    is_open = owning._is_open  # pyright: ignore[reportPrivateUsage]

    def blindly(tables: Any, standing: Any, group: bytes, grant: Any) -> bool:
        places = [place for entry in tables.kept_records.values() for place in (entry.places if entry else ())]
        strange = [roster.Member(place.host, "") for place in places if place.host not in standing.roster.ids]
        members = (*standing.roster.members, *strange) if tables.kept(group) else standing.roster.members
        giver = tables.kept(group) and tables.kept(group).giver
        members = tuple(one for one in members if one.address or one.id != giver)
        wider = msgspec.structs.replace(standing, roster=msgspec.structs.replace(standing.roster, members=members))
        return is_open(tables, wider, group, grant)

    patch.setattr(owning, "_is_open", blindly)


@mutation("a root that was admitted is told so only when all has settled", "roots with keys")
def _(patch: Patch) -> None:
    answer_ask = roster.answer_ask

    def late(tables: Any, standing: Any, seed: Any, ask: Any) -> Any:
        answer = answer_ask(tables, standing, seed, ask)
        is_hasty = isinstance(answer, IsRoster) and answer.admits and not seed.is_settled(standing)
        return Later() if is_hasty else answer

    patch.setattr(roster, "answer_ask", late)


@mutation("the version counter is not handed over", "a hand-over of many versions")
def _(patch: Patch) -> None:
    put_kept = SimTables.put_kept

    def without(tables: SimTables, group: bytes, kept: Any) -> None:
        put_kept(tables, group, msgspec.structs.replace(kept, version=None if kept.version is None else 0))

    patch.setattr(SimTables, "put_kept", without)


# --- bytes ------------------------------------------------------------------------------------------------------------


@mutation("nobody audits what was lent", "kills")
def _(patch: Patch) -> None:
    def nothing(audit: Any) -> Any:
        return
        yield

    patch.setattr(owning.Audit, "run", nothing)


@mutation("an audit doesn't resolve the call", "stalls")
def _(patch: Patch) -> None:
    def resolved(audit: Any, standing: Any, lent: Any) -> Any:
        return True
        yield

    patch.setattr(owning.Audit, "_resolved", resolved)


@mutation("an audit gives back what was lent anew", "hand-overs under audits")
def _(patch: Patch) -> None:
    patch.setattr(owning.Audit, "_retire", lambda audit, tables, place, lent: tables.retire(place))  # pyright: ignore


@mutation("an audit doesn't say that a grant was refused", "bytes that are lent by a grant that is dead")
def _(patch: Patch) -> None:
    class Unheard(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return False

        def __call__(cls) -> NotOwner:
            return NotOwner()

    class Never(metaclass=Unheard):
        """Made as a NotOwner, and never recognised as one."""

    patch.setattr(owning, "NotOwner", Never)


@mutation("an audit doesn't wait until a call's time is over", "slow")
def _(patch: Patch) -> None:
    lend = SimTables.lend
    patch.setattr(
        SimTables,
        "lend",
        lambda tables, place, lent: lend(tables, place, msgspec.structs.replace(lent, until=0)),  # pyright: ignore
    )


@mutation("lent bytes are not looked for before they are used", "a process that is stopped between two owners")
def _(patch: Patch) -> None:
    patch.setattr(owning, "bytes_gone", lambda tables, places: None)  # pyright: ignore


@mutation("a host isn't told what nothing names any more", "quiet")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "owe", lambda tables, place: None)  # pyright: ignore


@mutation("a host is told once", "a release that is lost")
def _(patch: Patch) -> None:
    send = owning.send

    def once(member: Any, request: Any) -> Any:
        return (yield from send(member, request)) or Done()

    patch.setattr(owning, "send", once)


@mutation("bytes that were given away are nobody's", "hand-overs")
def _(patch: Patch) -> None:
    lend = SimTables.lend
    patch.setattr(
        SimTables,
        "lend",
        lambda tables, place, lent: lend(tables, place, lent) if lent.session else None,  # pyright: ignore
    )


@mutation("an audit looks once, whatever becomes of the members", "losses")
def _(patch: Patch) -> None:
    run = owning.Audit.run

    def of_one_epoch(audit: Any) -> Any:
        standing = yield from owning.view(lambda tables: tables.standing())
        audit._losses = 0 if standing is None else standing.losses
        return (yield from run(audit))

    patch.setattr(owning.Audit, "run", of_one_epoch)


# --- sharded puts -----------------------------------------------------------------------------------------------------


@mutation("a part is taken in though its attempt is over", "shards of stopped ranks")
def _(patch: Patch) -> None:
    prepare = sharded.prepare

    def forgets(tables: Any, standing: Any, part: Any, content: Any) -> Any:
        with Patch.context() as inner:
            inner.setattr(SimTables, "outcome", lambda tables, key, attempt: None)  # pyright: ignore
            return prepare(tables, standing, part, content)

    patch.setattr(sharded, "prepare", forgets)


@mutation("a publication doesn't look whether the parts are those that were merged", "shards put again")
def _(patch: Patch) -> None:
    publish = sharded.publish

    def blindly(tables: Any, standing: Any, request: Any) -> Any:
        _, parts = attempts.find(tables, request.key, request.attempt, request.number)
        request = msgspec.structs.replace(request, parts=tuple(part.place for part in parts))
        return publish(tables, standing, request)

    patch.setattr(sharded, "publish", blindly)


@mutation("the bytes of parts that are given up are nobody's", "shards")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "drop_bytes", lambda tables, part: None)  # pyright: ignore


@mutation("an attempt goes on when its group leaves", "shards that are handed over")
def _(patch: Patch) -> None:
    patch.setattr(directory, "end_attempts_of", lambda tables, group: None)  # pyright: ignore


@mutation("outcomes stay where the owner was", "shards that are handed over")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "outcomes", lambda tables: [])  # pyright: ignore


@mutation("an audit knows records only", "shards of stopped ranks")
def _(patch: Patch) -> None:
    def are_named(tables: Any, standing: Any, request: Any) -> Any:
        groups = [owning.group_of(request.key)]
        refused = owning.admit(tables, standing, groups, [request.grant], changes=False)
        entry = tables.record(request.key)
        return refused or IsNamed(entry is not None and request.place in entry.places)

    patch.setattr(owning, "are_named", are_named)


@mutation("an attempt whose time is over stays", "shards in a storm")
def _(patch: Patch) -> None:
    patch.setattr(attempts, "expired", lambda rows: [])  # pyright: ignore


@mutation("older attempts go on after a publication", "shards of stopped ranks")
def _(patch: Patch) -> None:
    def settle(rows: Any, parts: Any, version: int) -> Any:
        with Patch.context() as inner:
            inner.setattr(attempts, "by_attempt", lambda older: [])  # pyright: ignore
            return settled(rows, parts, version)

    settled = attempts.settle
    patch.setattr(attempts, "settle", settle)


@mutation("a part is taken in again whenever it comes", "shards twice")
def _(patch: Patch) -> None:
    patch.setattr(sharded, "answer_again", lambda tables, call: None)  # pyright: ignore


@mutation("a part is taken in whoever the owner is", "shards that are handed over")
def _(patch: Patch) -> None:
    patch.setattr(sharded, "admit", lambda tables, standing, groups, grants, changes: None)  # pyright: ignore


@mutation("a part is not lent before the owner hears of it", "shards")
def _(patch: Patch) -> None:
    lend = sharded.lend

    def forget(tables: Any, membership: int, lent: Any) -> Any:
        answer = lend(tables, membership, lent)
        for place, _ in lent:
            if tables.lent(place) is not None:
                tables.lendings.pop(place)
        return answer

    patch.setattr(sharded, "lend", forget)


@mutation("who gives up without a part leaves no outcome", "shards twice")
def _(patch: Patch) -> None:
    put_outcome = SimTables.put_outcome
    patch.setattr(
        SimTables,
        "put_outcome",
        lambda tables, outcome: put_outcome(tables, outcome) if outcome.number else None,  # pyright: ignore
    )


@mutation("who gives up believes an owner that has heard nothing", "shards of lost hosts")
def _(patch: Patch) -> None:
    by_name = sharded._give_up_by_name  # pyright: ignore[reportPrivateUsage]

    def believes(client: Any, own: Any, request: Any) -> Any:
        own.owner = None
        return (yield from by_name(client, own, request))

    patch.setattr(sharded, "_give_up_by_name", believes)


@mutation("a part's lease isn't renewed while its rank waits", "shards of stragglers")
def _(patch: Patch) -> None:
    def nothing(own: Any, found: Any) -> Any:
        return
        yield

    patch.setattr(sharded, "_renew", nothing)
