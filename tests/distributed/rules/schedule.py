"""One schedule: hosts, processes that read and change a few keys, bad luck, and what must hold afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable

from memstore.distributed.rules import View
from tests.distributed.rules.checks import check_bytes, check_sessions, check_settled
from tests.distributed.rules.history import LOSS, Operation, check_history
from tests.distributed.rules.scenes import CALM, Scene
from tests.distributed.rules.sharded_puts import ShardedPuts
from tests.distributed.rules.workload import Workload
from tests.distributed.rules.world import HOUR, SECOND, Host, World
from tests.support.explore import Fault

LATEST = 25  # seconds


class Schedule:
    """Everything that is drawn is drawn from the seed: the same one does the same again."""

    def __init__(self, scene: Scene, seed: int) -> None:
        world = World(seed, scene.weather, audit_every=scene.audit_every, sessions_last=scene.sessions_last)
        self.scene, self.world = scene, world
        self.chance = self.world.random
        self.workload = Workload(scene, self.world)
        self.shards = ShardedPuts(self.workload)
        self.no_homes: set[str] = set()
        self.ambushes = scene.ambushes

    def run(self) -> None:
        scene, world = self.scene, self.world
        hosts = [world.add_host(f"h{number}") for number in range(scene.hosts)]
        self.no_homes = {host.address for host in hosts[scene.hosts - scene.visitors :]}
        for host in hosts[: scene.first]:
            self.serve(host)
        weather, world.weather = world.weather, CALM
        self.run_until_settled(hosts[: scene.first])
        self.workload.put_stable(hosts[0])
        world.run(1)
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
        self.run_until_settled(hosts)
        self.workload.registered()
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

    def serve(self, host: Host) -> None:
        self.world.serve(host, "h0", is_home=host.address not in self.no_homes)

    def run_until_settled(self, hosts: list[Host]) -> None:
        last = Fault("nothing settles", tuple(self.world.trace))
        for _ in range(60):
            self.world.run(1)
            try:
                check_settled(self.world, hosts)
                check_bytes(self.world, hosts)
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

        for _ in range(scene.kills):
            soon(lambda: self.kill(chance.choice(hosts)))
        for _ in range(scene.losses):
            soon(lambda: self.lose(chance.choice(hosts[1:])))
        for _ in range(scene.cuts):
            soon(lambda: self.cut(hosts))
        for _ in range(scene.silences):
            soon(lambda: self.silence(*chance.sample(hosts[1:], 2)))
        for _ in range(scene.changing_homes):
            soon(lambda: self.change_home(chance.choice(hosts[1:])))
        for _ in range(scene.expiries):
            soon(lambda: self.forget_session(chance.choice(hosts)))
        self.lie_in_wait()

    def kill(self, host: Host) -> None:
        if host.clients and self.chance.random() < 0.3:
            process = self.chance.choice(host.clients)
            self.world.note(f"a process of {host.address} is killed")
            process.is_alive = False
            host.clients.remove(process)
            self.workload.start_process(host)
            return
        self.world.kill_index(host)
        self.world.at(self.chance.choice([0.3, 0.3, 10]), lambda: self.serve(host))

    def lose(self, host: Host) -> None:
        if host.index is None:
            return
        start, lost = self.world.now / SECOND, host.id
        self.world.lose(host)
        self.shards.lose()
        values = frozenset(value for value, origin in self.workload.origin.items() if lost in origin)
        for key, history in self.workload.histories.items():
            at_home = values
            if self.was_home(lost, key):
                at_home = frozenset(self.workload.origin)
            history.append(Operation(LOSS, start, math.inf, lost=at_home))
        self.workload.stable = {key for key in self.workload.stable if not self.was_home(lost, key)}
        self.world.at(self.chance.uniform(0.5, 5), lambda: self.serve(host))

    def views(self) -> list[View]:
        standings = [host.tables.standing() for host in self.world.hosts.values()]
        return [standing.view for standing in standings if standing is not None]

    def lie_in_wait(self) -> None:
        if not self.ambushes:
            return
        standing = self.world.hosts["h0"].tables.standing()
        assert standing is not None
        new = [one for one in standing.view.members if one.is_home and one.id not in standing.view.before]
        if len(new) > 1 and self.chance.random() < 0.5:
            host = self.world.hosts[self.chance.choice(new).address]
            if host.id in standing.view.homes:
                self.ambushes -= 1
                self.lose(host)
        self.world.at(0.1, self.lie_in_wait)

    def was_home(self, member: bytes, key: bytes) -> bool:
        """Or has its records still, on their way to the new home."""
        return any(member in (view.home_of(key), view.home_before(key)) for view in self.views())

    def cut(self, hosts: list[Host]) -> None:
        one, other = self.chance.sample(hosts, 2)
        self.world.cut(one.address, other.address, one_way=self.chance.random() < 0.4)
        self.world.at(self.chance.choice([2, 2, 15]), self.world.heal)

    def silence(self, host: Host, other: Host) -> None:
        standing = host.tables.standing()
        keys = [key for key in self.workload.keys if standing is not None and standing.is_home_of(key)]
        self.world.cut(host.address, other.address, one_way=True)
        for key in keys:
            self.shards.begin_on(key, [other, self.world.hosts["h0"]])
        self.world.at(self.chance.uniform(2, 4), lambda: self.lose(host))
        self.world.at(15, self.world.heal)

    def change_home(self, host: Host) -> None:
        """It is served again, with the other choice."""
        self.no_homes ^= {host.address}
        self.world.kill_index(host)
        self.serve(host)

    def forget_session(self, host: Host) -> None:
        """As after an hour without a connection of it."""
        sessions = host.tables.sessions(0, 1 << 20)
        if sessions:
            host.tables.end_session(self.chance.choice(sessions))
