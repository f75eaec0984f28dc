"""Opening a store for tasks of asyncio; and the stores of this machine."""

from __future__ import annotations

import os
from typing import Any, Literal

from memstore.aio.lanes import call
from memstore.aio.store import AsyncStore
from memstore.engine import absolute_path
from memstore.info import StoreSummary
from memstore.listing import Mode
from memstore.store.octal import OWNER_ONLY
from memstore.store.stores import destroy as destroy_blocking
from memstore.store.stores import stores as stores_blocking


async def destroy(root: str | os.PathLike[str], *, timeout: float = 30.0) -> None:
    """Removes a store with all its values, and its folder. Arguments and errors as `memstore.destroy`."""
    path = absolute_path(root)
    await call(("destroy", path), lambda _: destroy_blocking(path, timeout=timeout))


async def stores() -> tuple[StoreSummary, ...]:
    """Lists the stores of this machine, as `memstore.stores`."""
    return await call("stores", lambda _: stores_blocking())


def open(
    root: str | os.PathLike[str],
    mode: Mode = "a",
    *,
    durability: Literal["process", "disk"] | None = None,
    checksum: bool | None = None,
    inline_limit: int | None = None,
    capacity: int | str | None = None,
    verify: bool = False,
    allow_pickle: bool = False,
    unix_group: int | str | None = None,
    file_mode: int = OWNER_ONLY,
    timeout: float = 30.0,
    wait: float | None = None,
    cluster: str | None = None,
) -> AsyncStore:
    """Opens the store in the folder `root` for tasks of asyncio. Arguments and errors as `memstore.open`.

    Nothing is opened yet, so this may be called where nothing can be awaited: `async with`, `await`, or the store's
    first call opens it, and raises what `memstore.open` would. An invalid root or mode is refused at once.

    Example:
        >>> import asyncio, memstore.aio, tempfile, torch
        >>> async def main():
        ...     async with memstore.aio.open(tempfile.mkdtemp()) as store:
        ...         await store.put("policy", {"w": torch.ones(2, 2)})
        ...         return (await store.get("policy"))["w"].sum()
        >>> asyncio.run(main())
        tensor(4.)
    """
    options: dict[str, Any] = {
        "durability": durability,
        "checksum": checksum,
        "inline_limit": inline_limit,
        "capacity": capacity,
        "verify": verify,
        "allow_pickle": allow_pickle,
        "unix_group": unix_group,
        "file_mode": file_mode,
        "timeout": timeout,
        "wait": wait,
        "cluster": cluster,
    }
    return AsyncStore(root, mode, options)
