"""Forked children for tests: a function runs in one, and what it returns or raises comes back."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import memstore
from memstore.engine import syscalls

_CONTEXT = multiprocessing.get_context("fork")


class Wire:
    """Messages to the other process. Pickled whole: multiprocessing's own pickler would send tensors by reference."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any = None) -> None:
        self._connection.send_bytes(pickle.dumps(message))

    def receive(self, timeout: float = 240.0) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"no message in {timeout} s")
        return pickle.loads(self._connection.recv_bytes())

    @property
    def has_message(self) -> bool:
        return self._connection.poll()

    def close(self) -> None:
        self._connection.close()


class Child:
    """A forked process that runs `function(wire, *arguments)`; use it in a `with`, which kills it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        ours, theirs = map(Wire, _CONTEXT.Pipe())
        self._wire = ours
        self.process = _CONTEXT.Process(target=_run, args=(function, theirs, ours, arguments))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, message: Any = None) -> None:
        self._wire.send(message)

    @property
    def has_message(self) -> bool:
        return self._wire.has_message

    def receive(self, timeout: float = 240.0) -> Any:
        """The next message; as the last one the function's result, or its exception, which is raised."""
        try:
            message = self._wire.receive(timeout)
        except EOFError:
            self.process.join(100)
            raise RuntimeError(f"the child ended with exit code {self.process.exitcode}") from None
        if isinstance(message, _Raised):
            raise pickle.loads(message.error) from RuntimeError(message.text)
        return message.value if isinstance(message, _Returned) else message

    def wait_until_it_sleeps_on_a_futex(self, timeout: float = 100.0) -> None:
        """So that what wakes it is a wake, and not a look before it went to sleep."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with open(f"/proc/{self.pid}/syscall") as file:
                if file.read().split()[0] == str(syscalls._SYS_FUTEX):
                    return
        raise TimeoutError(f"the child did not go to sleep in {timeout} s")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()
        self.kill()


class _Returned:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.text = "".join(traceback.format_exception(error))
        try:
            self.error = pickle.dumps(error)
            pickle.loads(self.error)
        except Exception:  # an exception that can't be pickled is told by its text
            self.error = pickle.dumps(RuntimeError(self.text))


def _run(function: Callable[..., Any], wire: Wire, parents: Wire, arguments: tuple[Any, ...]) -> None:
    parents.close()
    torch.set_num_threads(1)  # a forked child has none of the parent's threads, and must not wait for them
    try:
        message: Any = _Returned(function(wire, *arguments))
    except BaseException as error:
        message = _Raised(error)
    wire.send(message)


def in_child(function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> Any:
    """Calls `function(*arguments)` in a forked child; returns what it returns, raises what it raises."""
    with Child(_without_wire, function, arguments) as child:
        return child.receive(timeout)


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test that runs in a forked child, and fails with what it raises there."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        in_child(functools.partial(test, *arguments, **named))

    return run


def _without_wire(_: Wire, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


@contextmanager
def children(count: int, function: Callable[..., Any], *arguments: Any) -> Iterator[list[Child]]:
    """`count` children of `function(wire, number, *arguments)`."""
    started: list[Child] = []
    try:
        for number in range(count):
            started.append(Child(function, number, *arguments))
        yield started
    finally:
        for child in started:
            child.__exit__()


def hold_key(wire: Wire, root: str) -> None:
    """For a child: gets "key", says so, and holds it until it is told to end."""
    with memstore.open(root, "r") as store:
        value = store.get("key")
        wire.send()
        wire.receive()
        del value
