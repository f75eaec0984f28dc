"""Workers that stop at a message of a call of theirs: there they kill others or themselves, or wait to be killed.

Steps are counted: 2n is before the n-th message of the call goes out, 2n + 1 when its answer has come, and before
anybody looks at it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import memstore
from memstore.distributed.links import Links
from memstore.distributed.rules import owning

FOR_EVER = 1000.0  # seconds


def call_at_step(
    channel: Connection,
    root: str,
    action: Callable[..., Any],
    arguments: tuple[Any, ...],
    step: int,
    pids: Sequence[int],
) -> None:
    """Calls `action(store, *arguments)`, and kills processes at a step of it.

    Sends what it returns or the name of its error, and whether it came to that step.

    Args:
        pids: empty: this process, which sends nothing then.
    """

    def kill() -> None:
        for pid in pids or [os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    with memstore.open(root, "r+", timeout=20.0) as store:
        counted = _at_step(step, kill)
        try:
            result = action(store, *arguments)
        except memstore.MemstoreError as error:
            result = type(error).__name__
        channel.send((result, counted[0] > step))


def stop_at_step(
    channel: Connection, root: str, action: Callable[..., Any], arguments: tuple[Any, ...], step: int, goes_on: bool
) -> None:
    """Says that it is at that step, and waits there until it is killed; or goes on with it."""

    def stop() -> None:
        channel.send("there")
        if not goes_on:
            time.sleep(FOR_EVER)

    with memstore.open(root, "r+", timeout=FOR_EVER) as store:
        _at_step(step, stop)
        channel.send(action(store, *arguments))


def die_before_commit(channel: Connection, root: str, key: str) -> None:
    """Dies with the grant of a new group, in the transaction that is to record it."""
    with memstore.open(root, "r+", timeout=20.0) as store:
        owning.commit_here = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore
        store.put(key, "of a dead process")


def put_when_told(channel: Connection, root: str, first: str, key: str) -> None:
    """Puts a key, so that it has connections; and another one when it is told to. Sends the seconds that took."""
    with memstore.open(root, "r+", timeout=20.0) as store:
        store.put(first, 1)
        channel.send("ready")
        channel.recv()
        began = time.monotonic()
        store.put(key, "late")
        channel.send(time.monotonic() - began)


def put_again_and_again(channel: Connection, root: str, known: str, new: str) -> None:
    """Puts numbers into a key of a known group, and into one of a new group each time, until it is told to end.

    Sends how long it took at most, and the errors.
    """
    longest, errors = {"known": 0.0, "new": 0.0}, list[str]()
    with memstore.open(root, "r+", timeout=20.0) as store:
        store.put(known, 0)
        channel.send("ready")
        number = 0
        while not channel.poll(0.02):
            number += 1
            for kind, key in (("known", known), ("new", f"{new}-{number}/k")):
                began = time.monotonic()
                try:
                    store.put(key, number)
                except memstore.MemstoreError as error:
                    errors.append(str(error))
                longest[kind] = max(longest[kind], time.monotonic() - began)
        channel.send((longest, errors))


def _at_step(step: int, act: Callable[[], None]) -> list[int]:
    """Returns a list with the number of steps so far."""
    counted = [0]

    def count() -> None:
        if counted[0] == step:
            counted[0] += 1
            act()
        else:
            counted[0] += 1

    def around(send: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            count()
            answer = send(*arguments)
            count()
            return answer

        return counting

    for name in ("send", "begin"):
        setattr(Links, name, around(getattr(Links, name)))
    return counted
