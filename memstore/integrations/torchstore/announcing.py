"""How actors of Monarch find a store that was made after they were started: they ask one actor of their root client.

Importing this imports Monarch, which takes seconds.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, endpoint, get_or_spawn_controller

_ACTOR = "memstore_torchstore"


class Paths(Actor):
    """One a job: `get_or_spawn_controller` makes it in the job's root client, whoever asks first."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    @endpoint
    async def announce(self, name: str, path: str) -> None:
        self._paths[name] = path

    @endpoint
    async def find(self, name: str) -> str | None:
        return self._paths.get(name)


async def _paths() -> Any:
    return await get_or_spawn_controller(_ACTOR, Paths)


async def announce(name: str, path: str) -> None:
    """Tells it all actors of the job."""
    await (await _paths()).announce.call_one(name, path)


async def find(name: str) -> str | None:
    """The root of a store, if some process of the job has announced it; it may have been shut down since."""
    return await (await _paths()).find.call_one(name)
