"""Ranks of a process group on this machine: forked processes that speak gloo, for tests."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.children import Child, Wire

TIMEOUT = 60.0  # seconds for a collective


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, dead: tuple[int, ...] = ()) -> list[Any]:
    """Calls `function(rank, *arguments)` on each rank of a new group.

    Args:
        dead: ranks that are expected to die: they have no result.

    Returns:
        What each returned, or the exception that it raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [Child(_rank, rank, world_size, folder, function, arguments) for rank in range(world_size)]
        try:
            outcomes = [None if rank in dead else _outcome(child) for rank, child in enumerate(children)]
            for rank in dead:
                children[rank].process.join(60)
            return outcomes
        finally:
            for child in children:
                child.__exit__()


def all_right(outcomes: list[Any]) -> list[Any]:
    """The results, where no rank raised."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def _outcome(child: Child) -> Any:
    try:
        return child.receive(120.0)
    except Exception as error:
        return error


def _rank(
    _: Wire, rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    return function(rank, *arguments)
