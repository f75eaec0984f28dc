"""Scripts, and rules left out, of what hosts do by themselves when another one is silent."""

from __future__ import annotations

from typing import Any

from memstore.distributed.rules import fence
from memstore.distributed.rules.messages import Silence
from tests.distributed.rules.mutations import MUTATIONS, Patch, mutation
from tests.distributed.rules.scripts import SCRIPTS, Play, script

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
        play.world.run(4 * AFTER)
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
