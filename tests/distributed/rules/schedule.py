"""One schedule: hosts, processes that read and change a few keys, bad luck, and what must hold afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

from memstore.distributed.rules import directory, recovery
from memstore.distributed.rules.messages import IsRoster, SetPolicy
from memstore.distributed.rules.nouns import EPOCH_BITS, Policy, group_of
from tests.distributed.rules.checks import check_bytes, check_gone, check_sessions, check_settled
from tests.distributed.rules.history import DELETE, LOSS, PUT, RETURN, Operation, check_history
from tests.distributed.rules.scenes import CALM, Scene
from tests.distributed.rules.sharded_puts import ShardedPuts
from tests.distributed.rules.workload import Workload
from tests.distributed.rules.world import HOUR, SECOND, Host, World
from tests.support.explore import Fault

LATEST = 25  # seconds
FOR_EVER = 1 << 62


class Schedule:
    """Everything that is drawn is drawn from the seed: the same one does the same again."""

    def __init__(self, scene: Scene, seed: int) -> None:
        world = World(
            seed,
            scene.weather,
            audit_every=scene.audit_every,
            sessions_last=scene.sessions_last,
            promote_after=scene.promote_after,
            remove_after=scene.remove_after,
            is_shared=scene.shared,
        )
        self.scene, self.world = scene, world
        self.chance = self.world.random
        self.workload = Workload(scene, self.world)
        self.shards = ShardedPuts(self.workload)
        self.no_owners: set[str] = set()
        self.is_promoting = False
        world.left_out = self.note_loss
        world.comes_back, world.came_back = scene.returns, self.came_back
        self.down: dict[bytes, float] = {}
        world.begun_return, world.ended_return = self.workload.begin_return, self.workload.end_return
        world.taken = lambda value, host: self.workload.origin[value].add(host)

    def run(self) -> None:
        """Runs it. Keepers are waited for, however long: to go on without one that is silent is a second failure."""
        with mock.patch.object(recovery, "NOTE_TRIES", FOR_EVER), mock.patch.object(recovery, "NOTE_SILENT", FOR_EVER):
            self.run_all()

    def run_all(self) -> None:
        scene, world = self.scene, self.world
        hosts = [world.add_host(f"h{number}") for number in range(scene.hosts)]
        self.no_owners = {host.address for host in hosts[scene.hosts - scene.visitors :]}
        for host in hosts[: scene.first]:
            self.serve(host)
        weather, world.weather = world.weather, CALM
        self.run_until_settled(hosts[: scene.first])
        self.workload.put_stable(hosts[: scene.first])
        self.run_until_settled(hosts[: scene.first])
        if scene.replicas:
            self.state_policy(hosts)
        world.weather = weather
        for host in hosts[scene.first :]:
            self.workload.fill(host)
            world.at(self.chance.uniform(0, scene.seconds), lambda host=host: self.serve(host))
        for _ in range(scene.attempts):
            world.at(self.chance.uniform(0, scene.seconds), lambda: self.shards.begin(hosts))
        for _ in range(scene.processes):
            self.workload.start_process(self.chance.choice(hosts))
        self.draw_bad_luck(hosts)
        world.run(scene.seconds)

        self.workload.is_over = True
        world.heal()
        world.weather = CALM
        for host in hosts:
            self.serve(host)
        world.run(LATEST)  # what was sent before is here by now, and who was stopped goes on
        self.is_promoting = False
        self.find_a_seed(hosts)
        self.run_until_settled(hosts)
        self.workload.admitted()
        for host in hosts:
            process = world.start_process(host)
            for key in self.workload.keys:
                self.workload.get(process, key, lambda: None, must=True)
            self.workload.list_stable(process)
        self.run_until_settled(hosts)
        if scene.sessions_last < HOUR:
            world.run(2 * scene.sessions_last)
            check_sessions(world, hosts)
        for key, history in self.workload.histories.items():
            wrong = check_history(history)
            if wrong:
                raise Fault(f"{key!r}: {wrong}", tuple(world.trace))

    def state_policy(self, hosts: list[Host]) -> None:
        """A person states that each value is to lie on two hosts."""
        for host in hosts:
            standing = host.tables.standing()
            if standing is not None and standing.is_seed and host.index is not None:
                while not isinstance(self.world.answer(host, host.index, SetPolicy(Policy(None, 2))), IsRoster):
                    self.world.run(0.1)
        self.run_until_settled(hosts[: self.scene.first])

    def serve(self, host: Host) -> None:
        if host.id in self.down and self.is_known(host):
            return  # no host is removed that runs
        self.world.serve(host, "h0", is_owner=host.address not in self.no_owners)

    def run_until_settled(self, hosts: list[Host]) -> None:
        last = Fault("nothing settles", tuple(self.world.trace))
        for _ in range(60):
            self.world.run(1)
            try:
                check_settled(self.world, hosts)
                check_bytes(self.world, hosts)
                check_gone(self.world, hosts)
                if not any(process.is_alive for process in self.workload.under_way):
                    return
                last = Fault("some calls don't end", tuple(self.world.trace))
            except Fault as fault:
                last = fault
        raise last

    # --- bad luck -----------------------------------------------------------------------------------------------------

    def draw_bad_luck(self, hosts: list[Host]) -> None:
        scene, world, chance = self.scene, self.world, self.chance

        def soon(action: Callable[[], None]) -> None:
            world.at(chance.uniform(0, scene.seconds), action)

        spots = hosts[-scene.visitors :] if scene.spot else hosts
        for _ in range(scene.kills):
            soon(lambda: self.kill(chance.choice(hosts)))
        for _ in range(scene.losses):
            soon(lambda: self.lose(chance.choice(spots), hosts))
        for _ in range(scene.cuts):
            soon(lambda: self.cut(hosts, chance.choice(spots) if scene.spot else None))
        for _ in range(scene.cut_offs):
            soon(lambda: self.cut_off(hosts))
        for _ in range(scene.hand_overs):
            soon(lambda: self.hand_over(chance.choice(hosts), chance.choice(hosts)))
        for _ in range(scene.drains):
            soon(lambda: self.drain(chance.choice(hosts), hosts))
        for _ in range(scene.cancels):
            soon(lambda: world.cancel_drain(chance.choice(hosts)))
        for _ in range(scene.promotions):
            soon(lambda: self.promote(chance.choice(hosts)))
        for _ in range(scene.forced):
            soon(lambda: self.promote(chance.choice(hosts), forced=True))
        for _ in range(scene.splits):
            soon(lambda: self.split(chance.choice(hosts), hosts))
        for _ in range(scene.expiries):
            soon(lambda: self.forget_session(chance.choice(hosts)))

    def kill(self, host: Host) -> None:
        if host.clients and self.chance.random() < 0.3:
            process = self.chance.choice(host.clients)
            self.world.note(f"a process of {host.address} is killed")
            process.is_alive = False
            host.clients.remove(process)
            self.workload.start_process(host)
            return
        self.world.kill_index(host)
        if self.scene.changes and self.chance.random() < 0.5:
            self.no_owners ^= {host.address}
        self.world.at(self.chance.choice([0.3, 0.3, 10]), lambda: self.serve(host))

    def lose(self, host: Host, hosts: list[Host]) -> None:
        """A host is lost, unless it would be the last one of a majority. A person removes it, and it comes back."""
        if (
            host.index is None
            or host.tables.standing() is None
            or not self.may_be_lost(host, hosts)
            or host.id in self.down
        ):
            return
        lost = host.id
        self.note_loss(host)
        if self.scene.returns and self.chance.random() < 0.8:
            self.stop_until_removed(host, hosts)
            return
        self.world.lose(host)
        late = 8 * self.scene.remove_after  # one that was lost before the seed knew that it holds a lease stays
        self.world.at(self.chance.uniform(0.2, 5) + late, lambda: self.world.remove(lost))
        self.world.at(self.chance.uniform(0.2, 5), lambda: self.find_a_seed(hosts))
        self.world.at(self.chance.uniform(0.5, 8), lambda: self.serve(host))

    def stop_until_removed(self, host: Host, hosts: list[Host]) -> None:
        """All processes of a host end. Its memory stays: somebody serves it again, once a person has removed it."""
        world, lost = self.world, host.id
        world.note(f"{host.address} is down")
        self.down[lost] = world.now / SECOND
        world.kill_index(host)
        for process in host.clients:
            process.is_alive = False
        host.clients.clear()
        world.gone.add(lost)

        def serve() -> None:
            if self.is_known(host):
                world.at(1, serve)
            elif host.id == lost:
                self.serve(host)

        world.at(self.chance.uniform(0.2, 3), lambda: world.remove(lost))
        world.at(self.chance.uniform(0.2, 3), lambda: self.find_a_seed(hosts))
        world.at(self.chance.uniform(3, 8), serve)

    def is_known(self, host: Host) -> bool:
        """Returns whether somebody takes it for a member."""
        others = [one.tables.standing() for one in self.world.hosts.values() if one.id not in self.down]
        return any(it is not None and host.id in it.roster.ids for it in others)

    def came_back(self, host: Host, former: bytes) -> None:
        """What it has put since it was down is lost, too: it may have been served once more before it was removed."""
        self.shards.lose()
        values = frozenset(value for value, origin in self.workload.origin.items() if former in origin)
        for history in self.workload.histories.values():
            history.append(Operation(LOSS, self.down.get(former, 0), math.inf, lost=values))
        self.workload.start_process(host)

    def note_loss(self, host: Host) -> None:
        """Notes that what a host has may be lost, from now on."""
        world, start, lost = self.world, self.world.now / SECOND, host.id
        groups = {*host.tables.own_groups, *host.tables.kept_groups, *host.tables.leaving_groups}
        self.shards.lose()
        if self.scene.replicas:
            for key, history in self.workload.histories.items():
                if key.partition(b"/")[0] in groups:
                    unsure = frozenset(one.value for one in history if one.kind in (PUT, DELETE) and one.may_not_happen)
                    history.append(Operation(LOSS, start, start, undoes=True, keeps=True, unsure=unsure))
            return
        values = frozenset(value for value, origin in self.workload.origin.items() if lost in origin)
        if self.scene.shared:  # but files that the host has put into its own groups, or living owners name
            values -= self._in_files(host)
        everything = frozenset(self.workload.origin)
        for key, history in self.workload.histories.items():
            group = key.partition(b"/")[0]
            history.append(Operation(LOSS, start, math.inf, lost=values))
            if group in groups:
                until = world.handed.get(group, -1)  # what was put before lies with its owner alone
                before = {one.value for one in history if one.kind in (PUT, RETURN) and one.start <= until}
                lost_here = values | frozenset(everything & before)
                history.append(Operation(LOSS, start, start, lost=lost_here, undoes=True))
        self.workload.stable = {key for key in self.workload.stable if key.partition(b"/")[0] not in groups}

    def _in_files(self, host: Host) -> frozenset[int]:
        """Values whose files are on the storage, and that some record names which outlives the host."""
        tables, named = host.tables, {place.put_id for place in host.tables.lendings}
        for put_id, segment in tables.segments.items():
            grant = None if segment.header is None else tables.own_groups.get(group_of(segment.header[0]))
            if segment.header is not None and grant is not None and not grant.after:
                named |= {put_id} if segment.header[1].version >> EPOCH_BITS >= grant.epoch else set()
        return frozenset(tables.segments[put_id].value for put_id in named if put_id in tables.segments)

    def may_be_lost(self, host: Host, hosts: list[Host]) -> bool:
        """So that a majority of each roster that somebody has lives, and a deputy in it if the seed is lost."""
        for other in hosts:
            standing = other.tables.standing()
            if standing is None or other.id in self.world.gone:
                continue
            roster = standing.roster
            living = {one.id for one in hosts if one.tables.standing() is not None} - {host.id, *self.down}
            for ids in (roster.ids, frozenset(roster.voters)):
                if ids and 2 * len(living & ids) <= len(ids):
                    return False
            if not living & {roster.seed, *roster.deputies}:
                return False
        return True

    def find_a_seed(self, hosts: list[Host]) -> None:
        """A person looks whether the seed's host is there, and else makes others the seed in turn.

        Where deputies take over by themselves, a person does so for a seed that is to be drained, and no other.
        """
        standings = [standing for host in hosts if (standing := host.tables.standing()) is not None]
        newest = max((standing.roster for standing in standings), key=lambda roster: roster.position)
        is_there = self.scene.promote_after or any(
            host.id == newest.seed and host.id not in self.down for host in hosts
        )
        if is_there and not newest.is_leaver(newest.seed):
            return
        self.promote(self.chance.choice(hosts))
        self.world.at(3, lambda: self.find_a_seed(hosts))

    def promote(self, host: Host, *, forced: bool = False) -> None:
        """One after the other: a person who forces it makes sure that nobody else does."""

        def ended(done: bool) -> None:
            self.is_promoting = False

        if not self.is_promoting:
            self.is_promoting = True
            self.world.promote(host, ended, forced=forced)

    def split(self, host: Host, hosts: list[Host]) -> None:
        """Cuts off a host, most often the seed, and promotes another one."""
        seeds = [one for one in hosts if (it := one.tables.standing()) is not None and it.is_seed]
        host = self.chance.choice([host, *seeds, *seeds])
        near = self.chance.choice([one for one in hosts if one is not host])
        for other in hosts:
            if other is not host and (other is not near or self.chance.random() < 0.5):
                self.world.cut(host.address, other.address)
                if other is not near:
                    self.world.cut(near.address, other.address)
        rest = [one for one in hosts if one not in (host, near)]
        if self.scene.promote_after:
            self.world.at(self.chance.choice([4, 8]), self.world.heal)
            return
        self.world.at(0.2, lambda: self.promote(self.chance.choice(rest)))
        self.world.at(1.5, lambda: self.promote(self.chance.choice(rest)))
        self.world.at(self.chance.choice([4, 8]), self.world.heal)

    def cut(self, hosts: list[Host], spot: Host | None) -> None:
        """Cuts a link, or all of a host that may go at any moment."""
        one, *others = self.chance.sample(hosts, 2)
        one_way = self.chance.random() < 0.4
        if spot is not None:
            one, others = spot, [host for host in hosts if host is not spot]
        for other in others:
            self.world.cut(one.address, other.address, one_way=one_way)
        self.world.at(self.chance.choice(self.scene.cuts_last), self.world.heal)

    def cut_off(self, hosts: list[Host]) -> None:
        """Cuts off a host from all others, or all but one, often the seed. Its own processes go on."""
        seeds = [one for one in hosts if (it := one.tables.standing()) is not None and it.is_seed]
        host, near = self.chance.choice([*hosts, *seeds]), self.chance.choice([None, None, *hosts])
        for other in hosts:
            if other not in (host, near):
                self.world.cut(host.address, other.address, one_way=self.chance.random() < 0.2)
        self.world.at(self.chance.choice(self.scene.cuts_last), self.world.heal)

    def hand_over(self, host: Host, taker: Host) -> None:
        groups = sorted(host.tables.own_groups)
        if groups and taker is not host:
            group = self.chance.choice(groups)
            self.world.note(f"{host.address} hands {group!r} to {taker.address}")
            directory.begin(host.tables, group, taker.id)

    def drain(self, host: Host, hosts: list[Host]) -> None:
        """A person drains a host, of which only values that are copied elsewhere may be lost with another one."""

        def ended(done: bool) -> None:
            if not done:  # it is the seed, or the last owner
                self.world.at(1, lambda: self.find_a_seed(hosts))

        if host.tables.standing() is not None:
            self.world.drain(host.id, ended)

    def forget_session(self, host: Host) -> None:
        """As after an hour without a connection of it."""
        sessions = host.tables.sessions(0, 1 << 20)
        if sessions:
            host.tables.end_session(self.chance.choice(sessions))
