"""Weights that some ranks publish by rows and other ranks want by columns: what reshard and follow do on the ranks."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.benchmarks.peers.sharded import ShardedPeer, Weights
from tests.ranks.launcher import Ranks
from tests.support.fork_server import ForkServer

TENSORS = 64
NAMES = tuple(f"layers.{number}.weight" for number in range(TENSORS))
LOOKS = 16  # places of each tensor that are compared within a lap
VALUES = 1 << 20  # random whole numbers below; with a step added they are exact in float32
# What a rank would import by itself, in the middle of its first lap.
PRELOAD = ("torch._dynamo", "torch.distributed.checkpoint", "memstore.store.sharded", __name__)


class Plan(NamedTuple):
    """Who does what: `publishers` hold the weights by rows, `followers` want them by columns. Both are ranks."""

    publishers: tuple[int, ...]
    followers: tuple[int, ...]
    side: int  # of each of the square tensors

    @property
    def world_size(self) -> int:
        return max(*self.publishers, *self.followers) + 1

    @property
    def nbytes(self) -> int:
        return TENSORS * self.side**2 * 4

    @property
    def meshes(self) -> str:
        return f"{len(self.publishers)} ranks as Shard(0), and {len(self.followers)} ranks as Shard(1)"


class Handed(NamedTuple):
    """Moments of one step on one rank, in ns of a clock that all processes of a machine share. 0: not this rank's."""

    start: int
    published: int
    filled: int


class Followed(NamedTuple):
    """What a rank did of a lap in which nobody waited for anybody."""

    seconds: float  # a publisher's, until it had published all; a follower's, until it had filled the last
    steps: int
    torn: int


@contextmanager
def started(plan: Plan, peers: Sequence[ShardedPeer]) -> Generator[Ranks]:
    """The ranks, each with its weights or targets and the peers. They live as long as the `with`."""
    with ForkServer(PRELOAD) as server, Ranks(server, plan.world_size) as ranks:
        ranks.run(join, plan, list(peers))
        yield ranks


# --- on the ranks -----------------------------------------------------------------------------------------------------


class _Rank:
    """What this rank keeps from lap to lap. `step` counts on all ranks alike; each step adds 1 to all weights."""

    def __init__(self, plan: Plan, peers: list[ShardedPeer]) -> None:
        self.plan, self.peers, self.step = plan, peers, 0
        publishing, following = (DeviceMesh("cpu", list(ranks)) for ranks in (plan.publishers, plan.followers))
        rank = dist.get_rank()
        self.publishes, self.follows = rank in plan.publishers, rank in plan.followers
        self.weights: Weights = {}
        self.targets: Weights = {}
        if self.publishes:
            self.weights = self._tensors(publishing, 0)
            for name, part in self._parts(publishing, 0):
                self.weights[name].to_local().copy_(part)
        if self.follows:
            self.targets = self._tensors(following, 1)
            self.looks = {name: _look(part) for name, part in self._parts(following, 1)}
        self.following = following
        for peer in peers:
            peer.join(
                publishing.get_group() if self.publishes else None, following.get_group() if self.follows else None
            )

    def _tensors(self, mesh: DeviceMesh, dim: int) -> Weights:
        """All at once: what is made beside them would leave holes in the heap."""
        shape = [self.plan.side, self.plan.side]
        shape[dim] //= mesh.size()
        return {name: DTensor.from_local(torch.zeros(shape), mesh, [Shard(dim)]) for name in NAMES}

    def _parts(self, mesh: DeviceMesh, dim: int) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of each tensor at step 0, random, and the same whenever it is asked for."""
        whole = torch.empty(self.plan.side, self.plan.side)
        for number, name in enumerate(NAMES):
            torch.randint(VALUES, whole.shape, generator=torch.Generator().manual_seed(number), out=whole)
            yield name, whole.chunk(mesh.size(), dim)[mesh.get_local_rank()]

    def go_on(self) -> None:
        """The next step, as training would make it."""
        self.step += 1
        for tensor in self.weights.values():
            tensor.to_local().add_(1)

    def filled_step(self) -> int | None:
        """The step that all targets have in all their elements; None: they have several."""
        steps: set[float] = set()
        for name, part in self._parts(self.following, 1):
            steps |= _steps(self.targets[name].to_local(), part)
        return int(steps.pop()) if len(steps) == 1 else None

    def looked_step(self) -> int | None:
        """The same, of some places of each target: soon done."""
        found = [_look(self.targets[name].to_local()) - expected for name, expected in self.looks.items()]
        steps = set(torch.cat(found).tolist())
        return int(steps.pop()) if len(steps) == 1 else None


_here: list[_Rank] = []


def join(plan: Plan, peers: list[ShardedPeer]) -> None:
    _here[:] = [_Rank(plan, peers)]


def clear(number: int) -> None:
    """Gives back what a peer takes. Not timed."""
    if dist.get_rank() == 0:
        _here[0].peers[number].clear()


def hand_over(number: int) -> Handed:
    """One step: all of it is published before anyone fills; then all of it is filled before anyone goes on."""
    here, peer = _here[0], _here[0].peers[number]
    here.go_on()
    start = _together()
    if here.publishes:
        peer.publish(here.step, here.weights)
    published = _together()
    if here.follows:
        peer.fill(here.targets)
    return Handed(start, published, _together())


def wake_and_fill(number: int) -> Handed:
    """One step: followers wait for it from before it is published."""
    here, peer = _here[0], _here[0].peers[number]
    here.go_on()
    start, published, filled = _together(), 0, 0
    if here.publishes:
        peer.publish(here.step, here.weights)
        published = time.monotonic_ns()
    if here.follows:
        peer.fill(here.targets, peer.newest())
        filled = time.monotonic_ns()
    _together()
    return Handed(start, published, filled)


def follow(number: int, steps: int) -> Followed:
    """So many steps, one right after the other; followers fill the newest, until they have the last."""
    here, peer = _here[0], _here[0].peers[number]
    last, done, torn = here.step + steps, 0, 0
    start = _together()
    if here.publishes:
        while done < steps:
            here.go_on()
            peer.publish(here.step, here.weights)
            done += 1
    else:
        here.step, reached = last, 0
        while reached < last:
            peer.fill(here.targets, peer.newest())
            found = here.looked_step()
            done, torn, reached = done + 1, torn + (found is None), found or reached
    return Followed((time.monotonic_ns() - start) * 1e-9, done, torn)


def check(number: int) -> None:
    """Raises unless this rank's targets are the last step's, bit for bit. Not timed."""
    here = _here[0]
    if here.peers[number].role == "limit":  # it hands nothing to anybody
        return
    found = here.filled_step() if here.follows else here.step
    if found != here.step:
        what = "parts of several steps" if found is None else f"step {found}"
        raise ValueError(f"{here.peers[number].name}: filled with {what}, of step {here.step}")


def _together() -> int:
    """All ranks are here: the time."""
    dist.barrier()
    return time.monotonic_ns()


def _steps(found: torch.Tensor, expected: torch.Tensor) -> set[float]:
    differences = found - expected
    return {float(differences.min()), float(differences.max())}


def _look(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // LOOKS)].clone()
