"""A trainer, generators and an evaluator, actors on a Monarch mesh, pass weights and batches through one store.

    python examples/monarch_rl.py [--until MEAN] [--workers tcp://HOST:PORT ...] [--root PATH]

Without --workers the mesh is this host. With them it is the hosts whose Monarch workers listen there, this one first:
the store is one across all of them, and the actors' lines are the same. They know each other by keys only:

    "policy/weights"   the trainer puts a version after each update; generators and the evaluator wait for a newer one
    "batches-N/steps"  generator N plays with the newest policy (CartPole), and puts what it saw; the trainer waits
    "scores/greedy"    the evaluator plays each newest policy without chance, and puts its mean return

Monarch starts the actors, and carries a few bytes to each at the start and the end; all tensors pass through the store.
The trainer learns by PPO, and ends when an evaluation has reached --until; 500 is the maximum. At the end a table shows
what was passed. `pip install '.[demo,cluster]'` brings what it needs.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from typing import Any

import gymnasium
import torch
from monarch.actor import (
    Actor,
    attach_to_workers,
    current_rank,
    enable_transport,
    endpoint,
    shutdown_context,
    this_host,
)
from torch import Tensor, nn

import memstore

GAMMA, LAMBDA = 0.99, 0.95  # discount a step; of the advantage's estimates
STEPS, EPOCHS, MINIBATCH, CLIP = 1024, 8, 256, 0.2  # of a generator's batch; passes over it, and by how many rows
EPISODES = 5  # of an evaluation
LONG = 120.0  # seconds: nobody waits so long for another


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.judge = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class Member(Actor):
    """What all of them do: open the store of their host, and count what passes."""

    def __init__(self, root: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(current_rank().rank)
        self.store, self.policy, self.version = memstore.open(root, timeout=LONG), Policy(), 0
        self.put_bytes, self.got_bytes, self.puts, self.waits = 0, 0, 0, list[float]()

    def follow(self) -> bool:
        """Loads the next version of the policy, as soon as there is one. False: there will be none."""
        began = time.perf_counter()
        self.version = self.store.load_model("policy/weights", self.policy, newer_than=self.version, timeout=LONG)
        self.waits.append(time.perf_counter() - began)
        self.got_bytes += sum(one.nbytes for one in self.policy.parameters())
        return "policy/is_final" not in self.store

    def put(self, key: str, value: dict[str, Any]) -> None:
        self.store.put(key, value)
        self.puts += 1
        self.put_bytes += sum(one.nbytes for one in value.values() if isinstance(one, Tensor))

    def row(self) -> list[str]:
        name = f"{type(self).__name__.lower()} {current_rank().rank}"
        moved = [f"{self.puts}", f"{self.put_bytes / 2**20:.2f}", f"{len(self.waits)}", f"{self.got_bytes / 2**20:.2f}"]
        return [name, socket.gethostname(), *moved, f"{1e3 * statistics.median(self.waits):.0f}"]


class Generator(Member):
    @endpoint
    def generate(self) -> list[str]:
        game = gymnasium.make("CartPole-v1")
        seen, number = game.reset(seed=current_rank().rank)[0], current_rank().rank
        while self.follow():
            batch, seen = self.play(game, seen)
            self.put(f"batches-{number}/steps", {**batch, "version": self.version})
        return self.row()

    @torch.no_grad()
    def play(self, game: Any, seen: Any) -> tuple[dict[str, Tensor], Any]:
        rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        after: list[tuple[float, float, float]] = []  # reward, what comes next is worth, whether the episode goes on
        for _ in range(STEPS):
            now = torch.from_numpy(seen)
            chances = torch.distributions.Categorical(logits=self.policy.act(now))
            action = chances.sample()
            seen, reward, fell, cut, _ = game.step(int(action))
            rows.append((now, action, chances.log_prob(action), self.policy.judge(now)[0]))
            worth = 0.0 if fell else float(self.policy.judge(torch.from_numpy(seen)))
            after.append((float(reward), worth, float(not (fell or cut))))
            if fell or cut:
                seen = game.reset()[0]
        observation, actions, chance, value = (torch.stack(column) for column in zip(*rows, strict=True))
        advantage = torch.zeros(STEPS)
        ahead = 0.0
        for step in reversed(range(STEPS)):
            reward, worth, goes_on = after[step]
            ahead = reward + GAMMA * worth - float(value[step]) + GAMMA * LAMBDA * goes_on * ahead
            advantage[step] = ahead
        batch = {"observation": observation, "action": actions, "chance": chance, "advantage": advantage}
        return {**batch, "return": advantage + value}, seen


class Trainer(Member):
    @endpoint
    def train(self, generators: int, updates: int, until: float) -> list[str]:
        optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-3)
        versions = [0] * generators
        for _ in range(updates):
            self.publish()
            batches = [self.take(number, versions) for number in range(generators)]
            self.learn({name: torch.cat([one[name] for one in batches]) for name in batches[0]}, optimizer)
            if self.store.get("scores/greedy")["best"] >= until:
                break
        self.store.put("policy/is_final", True)
        self.publish()
        return self.row()

    def publish(self) -> None:
        self.version = self.store.save_model("policy/weights", self.policy, timeout=LONG)
        self.puts += 1
        self.put_bytes += sum(one.nbytes for one in self.policy.parameters())

    def take(self, number: int, versions: list[int]) -> dict[str, Tensor]:
        """The generator's next batch."""
        began, key = time.perf_counter(), f"batches-{number}/steps"
        versions[number] = self.store.wait(key, newer_than=versions[number], timeout=LONG)
        batch = dict(self.store.get(key))
        self.waits.append(time.perf_counter() - began)
        played = batch.pop("version")
        assert played == self.version, f"played with version {played} of the policy, and {self.version} was published"
        self.got_bytes += sum(one.nbytes for one in batch.values())
        return batch

    def learn(self, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(EPOCHS):
            for some in torch.randperm(len(advantage)).split(MINIBATCH):
                chances = torch.distributions.Categorical(logits=self.policy.act(batch["observation"][some]))
                ratio = (chances.log_prob(batch["action"][some]) - batch["chance"][some]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                gain = torch.minimum(ratio * advantage[some], clipped * advantage[some]).mean()
                judged = self.policy.judge(batch["observation"][some]).squeeze(1)
                wrong = nn.functional.mse_loss(judged, batch["return"][some])
                optimizer.zero_grad()
                (0.5 * wrong - gain - 0.01 * chances.entropy().mean()).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                optimizer.step()


class Evaluator(Member):
    @endpoint
    def evaluate(self) -> list[str]:
        game = gymnasium.make("CartPole-v1")
        game.reset(seed=1_000)
        best = 0.0
        while self.follow():
            returns = torch.tensor([self.play(game) for _ in range(EPISODES)])
            mean = float(returns.mean())
            best = max(best, mean)
            self.put("scores/greedy", {"mean": mean, "best": best, "returns": returns, "version": self.version})
        return self.row()

    @torch.no_grad()
    def play(self, game: Any) -> float:
        seen, total, is_over = game.reset()[0], 0.0, False
        while not is_over:
            seen, reward, fell, cut, _ = game.step(int(self.policy.act(torch.from_numpy(seen)).argmax()))
            total, is_over = total + float(reward), fell or cut
        return total


# --- who starts them, and follows -------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python examples/monarch_rl.py")
    parser.add_argument("--until", type=float, default=475.0, metavar="MEAN", help="the return that is good enough")
    parser.add_argument("--updates", type=int, default=150, help="of the policy, at most")
    parser.add_argument("--generators", type=int, default=2, help="on each host")
    parser.add_argument("--workers", nargs="+", metavar="ADDRESS", help="of Monarch, of the hosts; this host's first")
    parser.add_argument("--root", default="/dev/shm/memstore-rl", help="of the store, which begins anew")
    options = parser.parse_args()
    try:
        return run(options.root, mesh_of(options.workers), options)
    finally:
        shutdown_context().get()


def mesh_of(workers: list[str] | None) -> Any:
    if not workers:
        return this_host()
    ip = workers[0].partition("//")[2].rpartition(":")[0]
    enable_transport(f"tcp://{ip}:0")  # so that actors of other hosts reach this process
    return attach_to_workers(ca="trust_all_connections", workers=workers)


def run(root: str, mesh: Any, options: argparse.Namespace) -> int:
    cluster = memstore.serve(mesh, root)
    with memstore.open(root) as store:
        store.clear()  # what a run has left that was killed: its agents go on, and this run found them
    generators = mesh.spawn_procs(per_host={"generators": options.generators}).spawn("gen", Generator, root)
    try:
        with memstore.open(root) as store:
            store.put("scores/greedy", {"mean": 0.0, "best": 0.0})
            first = mesh.slice(hosts=0) if options.workers else mesh
            trainer = first.spawn_procs().spawn("trainer", Trainer, root)
            evaluator = first.spawn_procs().spawn("evaluator", Evaluator, root)
            ends = [
                trainer.train.call(generators.size(), options.updates, options.until),
                generators.generate.call(),
                evaluator.evaluate.call(),
            ]
            follow(store)
            rows = [row for end in ends for row in end.get(LONG).values()]
            best = store.get("scores/greedy")["best"]
        show(rows, len(cluster.hosts))
        print(f"the best evaluation: {best:.0f} of 500")
        return 0 if best >= options.until else 1
    finally:
        cluster.stop(remove=True)  # on each host


def follow(store: memstore.Store) -> None:
    """Prints what the evaluator puts, until the trainer has done its work."""
    began, version = time.monotonic(), store.info("scores/greedy").version
    while "policy/is_final" not in store:
        try:
            version = store.wait("scores/greedy", newer_than=version, timeout=1.0)
        except memstore.StoreTimeoutError:
            continue
        print(f"{time.monotonic() - began:5.0f} s  greedy return {store.get('scores/greedy')['mean']:3.0f}", flush=True)


def show(rows: list[list[str]], hosts: int) -> None:
    heads = ["actor", "host", "puts", "MiB put", "gets", "MiB got", "median wait, ms"]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    print(f"\npassed through the store of {hosts} host{'s' if hosts > 1 else ''}:")
    for row in [heads, *rows]:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
