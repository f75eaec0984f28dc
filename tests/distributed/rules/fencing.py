"""Scripts, and rules left out, of what hosts do by themselves when another one is silent."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from memstore.distributed.rules import Change, directory, fence, index, promotion, roster
from memstore.distributed.rules.messages import (
    Alive,
    Ask,
    Heartbeat,
    IsRoster,
    Later,
    List,
    Lookup,
    Promise,
    Resolve,
    Silence,
)
from memstore.errors import FencedError, MemstoreError, UnknownOutcomeError
from tests.distributed.rules.mutations import MUTATIONS, Patch, mutation
from tests.distributed.rules.scripts import SCRIPTS, Play, deputies, others_than_deputies, promote, script
from tests.distributed.rules.test_membership import put
from tests.distributed.rules.world import SECOND, World

__all__ = ["MUTATIONS", "SCRIPTS"]  # with those of this file

AFTER = 2.0  # seconds


def seeds(play: Play) -> list[int]:
    """The hosts that take themselves for the seed."""
    standings = [host.tables.standing() for host in play.hosts]
    return [at for at, one in enumerate(standings) if one is not None and one.is_seed and not one.is_removed]


# --- a deputy takes over ----------------------------------------------------------------------------------------------


@script("a seed that is lost, and nobody is there to promote another one")
def _() -> None:
    play = Play(4, promote_after=AFTER)
    play.put(1, b"g/k")
    play.world.lose(play.hosts[0])
    play.world.run(8 * AFTER)
    play.must(seeds(play) in ([1], [2], [3]), f"the seeds are {seeds(play)}")
    play.put(3, b"new/k")  # a group that nobody owns yet: the seed grants it


@mutation("a deputy waits for a person", "a seed that is lost, and nobody is there to promote another one")
def _(patch: Patch) -> None:
    def nothing(seed: Any, watch: Any) -> Any:
        return False
        yield

    patch.setattr(fence, "stand_in", nothing)


@script("a deputy whose way to the seed alone is cut")
def _() -> None:
    play = Play(5, promote_after=AFTER)
    for deputy in range(1, 5):
        play.world.cut("h0", f"h{deputy}")
        play.world.run(8 * AFTER)
        promised = [standing.promised for host in play.hosts if (standing := host.tables.standing()) is not None]
        play.must(promised == [1] * 5, f"a seed that a majority hears is to be replaced: {promised}")
        play.world.heal()
        play.world.run(AFTER)


@mutation("a deputy asks nobody whether the seed is silent", "a deputy whose way to the seed alone is cut")
def _(patch: Patch) -> None:
    patch.setattr(fence.SeedWatch, "answer", lambda watch, standing, request: Silence(fence.NEVER))  # pyright: ignore


@script("of two hosts that don't hear each other neither takes over")
def _() -> None:
    play = Play(2, promote_after=AFTER)
    play.world.cut("h0", "h1")
    play.world.run(20 * AFTER)
    play.must(seeds(play) == [0], f"the seeds are {seeds(play)}")


@mutation("a half takes over", "of two hosts that don't hear each other neither takes over")
def _(patch: Patch) -> None:
    patch.setattr(fence, "is_majority", lambda count, roster: 2 * count >= len(roster.members))  # pyright: ignore
    patch.setattr(fence, "promote", lambda seed: fence_promote(seed, forced=True))  # pyright: ignore


fence_promote = fence.promote


@script("a member that has never heard the seed that is lost")
def _() -> None:
    """It is the seed of the term before, and could not be told that there is a new one."""
    play = Play(4, promote_after=10 * AFTER)
    play.world.cut("h0", "h1")
    play.world.promote(play.hosts[1])
    play.world.run(AFTER)
    play.must(seeds(play) == [0, 1], f"the seeds are {seeds(play)}")
    play.world.lose(play.hosts[1])
    play.world.heal()
    play.world.run(60 * AFTER)
    known = {standing.roster.seed for host in play.hosts if (standing := host.tables.standing()) is not None}
    play.must(len(known) == 1, f"the members obey {known}")
    play.put(3, b"new/k")


@mutation("who has not heard of a new seed hears it", "a member that has never heard the seed that is lost")
def _(patch: Patch) -> None:
    answer = fence.SeedWatch.answer

    def hears(watch: Any, standing: Any, request: Any) -> Any:
        return Silence(0) if request.term > standing.roster.term else answer(watch, standing, request)

    patch.setattr(fence.SeedWatch, "answer", hears)


# --- the seed removes a silent member ---------------------------------------------------------------------------------

LEASE = 3.0  # seconds


def are_members(play: Play, *numbers: int) -> bool:
    """Whether the host 0 knows these members, and no other ones."""
    standing = play.hosts[0].tables.standing()
    return standing is not None and standing.roster.ids == {play.hosts[at].id for at in numbers}


@script("a host that is cut off is removed, and has stopped before")
def _() -> None:
    play = Play(4, remove_after=LEASE)
    play.put(1, b"g/k", b"old")
    play.cut_off(1)
    play.world.run(0.9 * LEASE - 1)
    play.put(1, b"g/k", b"cut off")  # it takes 4 s of the script, after which the lease is over
    for call in (play.put, play.get):
        try:
            call(1, b"g/k")
        except FencedError:
            continue
        play.must(False, "a host goes on though its lease is over")
    play.world.run(2 * LEASE)
    play.must(are_members(play, 0, 2, 3), "it is not removed")
    play.put(2, b"g/k", b"new")
    found = play.get(3, b"g/k")
    play.must(found is not None and found.body == b"new", f"{found}")


@mutation("processes don't look at the lease", "a host that is cut off is removed, and has stopped before")
def _(patch: Patch) -> None:
    patch.setattr(World, "is_fenced", lambda world, host: False)  # pyright: ignore


@mutation("the clock removes nobody", "a host that is cut off is removed, and has stopped before")
def _(patch: Patch) -> None:
    patch.setattr(fence.HostLeases, "silent", lambda leases, standing, seed: [])  # pyright: ignore


@script("a put that is stopped between its look at the lease and its commit")
def _() -> None:
    play = Play(4, remove_after=LEASE)
    play.put(1, b"g/k")
    play.cut_off(1)
    play.world.weather.stalls, play.world.random.uniform = 1, lambda low, high: 10 if high == 20 else high
    ends, process = list[Any](), play.processes[1]
    steps = process.client.commit([Change(b"g/k", b"late")], 1 << 62)
    play.world.call(process, steps, 60, lambda result, error: ends.append(error or result), changes=True)
    play.world.weather.stalls = 0
    play.world.run(40)
    play.must(not are_members(play, 0, 1, 2, 3), "it is removed meanwhile")
    play.must(ends and isinstance(ends[0], UnknownOutcomeError), f"a put that nobody will see is acknowledged: {ends}")


@mutation("the lease isn't read after a commit", "a put that is stopped between its look at the lease and its commit")
def _(patch: Patch) -> None:
    patch.setattr(World, "is_unsure", lambda world, host: False)  # pyright: ignore


@script("a host that is cut off for less than its lease goes on")
def _() -> None:
    play = Play(4, remove_after=LEASE)
    for _ in range(4):
        play.cut_off(1)
        play.world.run(LEASE / 4)  # a message that was lost may take LEASE / 2 more
        play.world.heal()
        play.world.run(LEASE)
    play.put(1, b"g/k")
    play.must(are_members(play, 0, 1, 2, 3), "it is removed")


@script("a host whose lease was over, and that was not removed, goes on when it hears")
def _() -> None:
    """The seed hears no majority either, and so removes nobody."""
    play = Play(3, remove_after=LEASE)
    play.put(1, b"g/k")
    for one, other in (("h0", "h1"), ("h1", "h2"), ("h0", "h2")):
        play.world.cut(one, other)
    play.world.run(4 * LEASE)
    play.must(all(play.world.is_fenced(host) for host in play.hosts), "no host hears a majority")
    play.world.heal()
    play.world.run(LEASE)
    play.must(are_members(play, 0, 1, 2), "nobody was heard by a majority, and somebody is removed")
    play.put(1, b"g/k")


@script("a seed whose host was suspended")
def _() -> None:
    """It has heard nobody for a minute of its clock, and its first look may come before anybody's heartbeat."""
    play, gone = Play(4, remove_after=LEASE), list[str]()
    play.world.left_out = lambda host: gone.append(host.address)
    for _ in range(10):
        play.hosts[0].clock_offset += 60 * SECOND
        play.world.run(LEASE)
        play.must(not gone, f"{gone} were there all the time, and are removed")
    play.put(0, b"g/k")


@mutation("a seed counts time in which it was stopped", "a seed whose host was suspended")
def _(patch: Patch) -> None:
    patch.setattr(
        fence.HostLeases, "_counts_from", property(lambda leases: 0, lambda leases, when: None), raising=False
    )  # pyright: ignore


@script("of two hosts the clock removes neither, and both go on")
def _() -> None:
    play = Play(2, remove_after=LEASE)
    play.put(1, b"g/k")
    play.put(0, b"other/k")
    play.cut_off(1)
    play.world.run(10 * LEASE)
    play.put(1, b"g/k")
    play.put(0, b"other/k")
    play.must(are_members(play, 0, 1), "one is removed")


@script("a host that doesn't know yet that there are three")
def _() -> None:
    """It holds no lease, as one of two, and is cut off while the third one comes."""
    play = Play(2, remove_after=LEASE)
    play.put(1, b"g/k")
    play.cut_off(1)
    for _ in range(2):
        play.add_host(is_owner=True, seed="h0")
        play.world.cut("h1", play.hosts[-1].address)
    play.world.run(20)
    play.must(are_members(play, 0, 1, 2, 3), "who holds no lease is removed")
    play.put(1, b"g/k")


@mutation("the clock removes who holds no lease", "a host that doesn't know yet that there are three")
def _(patch: Patch) -> None:
    def everybody(leases: Any, standing: Any) -> Any:
        return tuple(one.id for one in standing.roster.members if one.id not in standing.roster.leased)

    patch.setattr(fence.HostLeases, "obeying", everybody)


@script("a host says that it obeys a lease once its processes do")
def _() -> None:
    play = Play(1, remove_after=LEASE)

    def look(host: Any, request: Any) -> None:
        if isinstance(request, Heartbeat) and request.obeys:
            sender = next(one for one in play.hosts if one.id == request.member)
            now = play.world.now + sender.clock_offset
            play.must(0 < sender.word[0] <= now + LEASE * SECOND, f"it obeys nothing: {sender.word}")

    play.before = look
    for _ in range(3):
        play.add_host(is_owner=True, seed="h0")
        play.world.run(LEASE)
    standing = play.hosts[0].tables.standing()
    play.must(standing is not None and len(standing.roster.leased) == 4, "all obey it")


@mutation(
    "a host says that it obeys before its lease is written", "a host says that it obeys a lease once its processes do"
)
def _(patch: Patch) -> None:
    patch.setattr(fence.HostLease, "follow", lambda lease, standing: standing.roster.lease)  # pyright: ignore


@script("a seed that was replaced, and gives leases on")
def _() -> None:
    """It hears one host; the others have another seed, which removes both."""
    play = Play(5, promote_after=1, remove_after=5 * LEASE)
    play.put(1, b"g/k", b"old")
    for near in (0, 1):
        for other in (2, 3, 4):
            play.world.cut(f"h{near}", f"h{other}")
    gone: list[int] = []
    play.world.left_out = lambda host: gone.append(play.hosts.index(host))
    for _ in range(300):
        play.world.run(0.1)
        for at in gone:
            play.must(play.world.is_fenced(play.hosts[at]), f"h{at} is removed, and has a lease")
    play.must(sorted(gone) == [0, 1], f"removed are {gone}")


@mutation("a lease doesn't count since when a majority obeys the seed", "a seed that was replaced, and gives leases on")
def _(patch: Patch) -> None:
    answer = fence.HostLeases.answer

    def fresh(*arguments: Any) -> Any:
        answered = answer(*arguments)
        return msgspec.structs.replace(answered, age=0) if isinstance(answered, Alive) else answered

    patch.setattr(fence.HostLeases, "answer", fresh)


@mutation("a new seed doesn't wait for leases of the one before", "a seed that was replaced, and gives leases on")
def _(patch: Patch) -> None:
    begin = fence.HostLeases.begin

    def at_once(leases: Any, standing: Any, seed: Any) -> None:
        begin(leases, standing, seed)
        leases._counts_from = 0
        seed.began = 0

    patch.setattr(fence.HostLeases, "begin", at_once)


@script("a seed that members don't obey any more, though they ask it")
def _() -> None:
    """They have promised to obey another one, and nothing came of it yet."""
    play = Play(3, remove_after=LEASE)
    seed = play.hosts[0]
    for host in play.hosts[1:]:
        standing = host.tables.standing()
        play.must(standing is not None, "it is a member")
        host.tables.put_standing(msgspec.structs.replace(standing, promised=1 << 20))  # pyright: ignore
    before = play.world.now + seed.clock_offset
    held = seed.word[0]
    for _ in range(25):
        play.world.run(0.1)
        held = max(held, seed.word[0])
    play.must(held <= before + LEASE * SECOND, "it takes itself for obeyed by a majority that has promised another")


@mutation("a seed counts who has promised another one", "a seed that members don't obey any more, though they ask it")
def _(patch: Patch) -> None:
    answer = fence.HostLeases.answer

    def anybody(leases: Any, standing: Any, seed: Any, request: Any) -> Any:
        return answer(leases, standing, seed, msgspec.structs.replace(request, promised=0))

    patch.setattr(fence.HostLeases, "answer", anybody)


@script("a heartbeat that comes while its sender is removed")
def _() -> None:
    play = Play(4, remove_after=LEASE)
    play.cut_off(1)
    silent, answers = fence.HostLeases.silent, list[Any]()

    def asks(leases: Any, standing: Any, seed: Any) -> Any:
        found = silent(leases, standing, seed)
        if play.hosts[1].id in found and not answers:  # its lease would be good while it is removed
            beat = Heartbeat(play.hosts[1].id, standing.roster.term, standing.roster.epoch, 1, int(LEASE * SECOND))
            answers.append(leases.answer(standing, seed, beat))
        return found

    fence.HostLeases.silent = asks  # pyright: ignore
    try:
        play.world.run(4 * LEASE)
    finally:
        fence.HostLeases.silent = silent
    play.must(answers and not are_members(play, 0, 1, 2, 3), "it is removed")
    play.must(not any(isinstance(answer, Alive) for answer in answers), "it is given a lease, and removed")


@mutation("who is being removed gets a lease", "a heartbeat that comes while its sender is removed")
def _(patch: Patch) -> None:
    answer = fence.HostLeases.answer

    def anybody(leases: Any, standing: Any, seed: Any, request: Any) -> Any:
        closing, leases._closing = leases._closing, set()
        answered = answer(leases, standing, seed, request)
        leases._closing = closing
        return answered

    patch.setattr(fence.HostLeases, "answer", anybody)


@script("an answer that takes as long as a lease")
def _() -> None:
    """A lease counts from when its question was sent: the seed may have removed the host when the answer comes."""
    play = Play(4, remove_after=LEASE)
    lease, began = fence.HostLease(lambda: play.world.now, [0]), play.world.now
    standing = play.hosts[1].tables.standing()
    play.must(standing is not None and lease.follow(standing), "there are leases")  # pyright: ignore
    watch, leases = fence.SeedWatch(lambda: play.world.now), fence.HostLeases(lambda: play.world.now)
    asked = fence.beat(watch, lease, leases, directory.Directory(lambda: play.world.now))
    next(asked)
    asked.send(standing)  # it is sent now
    play.world.now += int(0.9 * LEASE * SECOND)
    with contextlib.suppress(StopIteration):
        asked.send(Alive(1, 1, 0))
    play.world.now = began + int(1.1 * LEASE * SECOND)
    play.must(lease.is_over, "a lease counts from its answer")


@mutation("a lease counts from its answer", "an answer that takes as long as a lease")
def _(patch: Patch) -> None:
    def renew(lease: Any, began: int) -> None:
        lease._word[0] = lease._clock() + lease._lasts

    patch.setattr(fence.HostLease, "renew", renew)


@script("an owner that is asked after its lease is over")
def _() -> None:
    """Who asks has not heard of its removal, which another owner may know of."""
    play = Play(4, remove_after=LEASE)
    play.put(1, b"g/k", b"old")
    grant = play.hosts[1].tables.own_groups[b"g"]
    play.cut_off(1)
    play.world.run(2 * LEASE)
    for request in (Lookup((b"g/k",), (grant,)), Resolve(1, 0, 1), List(b"g/", b"", 9, grant=grant)):
        answer = play.answer(1, request)
        play.must(isinstance(answer, Later), f"who is fenced says {answer}")
    answer = play.commit(1, b"g/k", grant)
    play.must(isinstance(answer, Later), f"who is fenced says {answer}")


@mutation("a host that is fenced answers others", "an owner that is asked after its lease is over")
def _(patch: Patch) -> None:
    patch.setattr(index, "_OfOwner", ())  # pyright: ignore


# --- a root that a roster names, and that hasn't been told ------------------------------------------------------------


def join_untold(play: Play) -> int:
    """Has another host admitted, by a roster that counts, and doesn't let it hear so. Returns its number."""
    new = len(play.hosts)
    play.add_host(is_owner=True, seed="h0")
    for _ in range(5000):
        standing = play.hosts[0].tables.standing()
        if standing is not None and play.hosts[new].id in standing.roster.ids:
            break
        play.world.run(0.001)
    play.world.cut("h0", f"h{new}", one_way=True)
    play.world.run(2)
    play.must(play.hosts[new].tables.standing() is None, "and hasn't heard so")
    return new


@script("two hosts are lost while a third one comes")
def _() -> None:
    play = Play(5)
    play.world.lose(play.hosts[others_than_deputies(play)])
    deputy = deputies(play)[0]
    new = join_untold(play)
    play.world.lose(play.hosts[0])
    promote(play, deputy)
    play.world.run(10)
    play.must(play.hosts[new].tables.standing() is not None, "the newcomer hears nothing of its admission")
    play.put(new, b"g/k")


@mutation("a root that was not told yet promises nothing", "two hosts are lost while a third one comes")
def _(patch: Patch) -> None:
    patch.setattr(promotion, "_promise_early", lambda tables, request: Later())  # pyright: ignore


@mutation("a root that was not told yet counts for nothing", "two hosts are lost while a third one comes")
def _(patch: Patch) -> None:
    def meet(index_: Any, standing: Any, request: Any) -> Any:
        met = met_before(index_, standing, request)
        return Later() if met.roster is None else met

    met_before = index.Index._met  # pyright: ignore[reportPrivateUsage]
    patch.setattr(index.Index, "_met", meet)


@script("a root that has promised hears of the old seed")
def _() -> None:
    """Its vote is needed by both seeds: by the new one's promotion, and by what the old one writes afterwards."""
    play = Play(4)
    new_seed, other = deputies(play)
    old_side = others_than_deputies(play)
    newcomer = join_untold(play)
    for deputy in (new_seed, other):
        play.world.cut("h0", f"h{deputy}")
        play.world.cut(f"h{old_side}", f"h{deputy}")
    told = list[Any]()

    def after(host: Any, request: Any, answer: Any) -> None:
        if host is play.hosts[newcomer] and isinstance(request, Promise):  # the last that it hears of anybody
            play.world.cut(f"h{new_seed}", host.address, one_way=True)
            play.world.cut("h0", host.address)
        if isinstance(request, Ask) and request.member.address == f"h{newcomer}" and host is play.hosts[0]:
            told.append(answer)

    play.after = after
    promote(play, new_seed)
    play.must(play.hosts[newcomer].tables.standing() is None, "it isn't told by the new seed")
    play.after = lambda host, request, answer: None
    play.world.run(2)  # the old seed leaves out its deputies, and needs three of five, as its rival has
    play.after = after
    told.clear()
    play.world.uncut("h0", f"h{newcomer}")
    while not any(isinstance(answer, IsRoster) and answer.admits for answer in told):
        play.world.run(0.01)
    first = play.begin(play.processes[old_side], put(play.processes[old_side], b"g/k"), 4)
    play.world.run(0.5)
    play.after = lambda host, request, answer: None
    play.world.uncut(f"h{new_seed}", f"h{newcomer}")
    second = play.begin(play.processes[other], put(play.processes[other], b"g/k"), 20)
    play.world.run(25)
    done = [ends for ends in (first, second) if ends and not isinstance(ends[0], MemstoreError)]
    play.must(len(done) < 2, f"two hosts own a group: {done}")
    play.world.heal()
    play.world.run(20)
    play.must(len(seeds(play)) == 1, f"the seeds are {seeds(play)}")
    play.put(newcomer, b"h/k")


@mutation("an early promise is forgotten", "a root that has promised hears of the old seed")
def _(patch: Patch) -> None:
    patch.setattr(roster, "early_term", lambda tables, cluster: 0)  # pyright: ignore


@mutation("an early promise leaves a newcomer its vote", "a root that has promised hears of the old seed")
def _(patch: Patch) -> None:
    def votes(tables: Any, member: bytes, told: Any, *, owns: bool) -> None:
        begin(tables, member, msgspec.structs.replace(told, voters=()), owns=owns)
        standing = tables.standing()
        if standing is not None:
            tables.put_standing(msgspec.structs.replace(standing, roster=told))

    begin = roster.begin
    patch.setattr(roster, "begin", votes)
