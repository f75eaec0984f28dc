"""Ways to wake a process that waits: memstore, a bare futex, a queue, Ray.

Each has a process that waits and answers with the CLOCK_MONOTONIC time at which it was awake with the news in its
hands; the clock is one for all processes of a machine.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

import memstore
from memstore.engine.sync.primitives import Doorbell
from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.peers.ray_objects import start_ray
from tests.benchmarks.report import Role

ASLEEP_SECONDS = 0.002  # how long a waiter gets to fall asleep before it is woken
LONGEST_WAIT = 30.0
KEY = "wake"


class Woken(NamedTuple):
    start: int  # ns, before the call that wakes
    committed: int  # once the news is there for others to read
    returned: int  # after the call
    awake: int  # in the other process


class Waker(Peer):
    """`wake` tells the waiting process, once it sleeps, and returns when who knew what."""

    _child: Any = None
    _committed = 0

    def _start(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._child = context.Process(target=type(self)._wait, args=(other, *arguments), daemon=True)
        self._child.start()
        other.close()
        self._answer()  # it is up

    @staticmethod
    def _wait(pipe: Any, *arguments: Any) -> None:
        """The waiting process: an empty answer when it is up, then the time of each wake."""
        raise NotImplementedError

    def _signal(self) -> None:
        raise NotImplementedError

    def _answer(self) -> int:
        if not self._pipe.poll(LONGEST_WAIT):
            raise TimeoutError(f"{self.name}: the waiting process said nothing in {LONGEST_WAIT} s")
        return self._pipe.recv()

    def wake(self) -> Woken:
        time.sleep(ASLEEP_SECONDS)
        start = self._committed = time.monotonic_ns()
        self._signal()
        returned = time.monotonic_ns()
        return Woken(start, self._committed, returned, self._answer())

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()


class StoreWaker(Waker):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    role: ClassVar[Role] = "memstore"

    def setup(self) -> None:
        root = self.root / "store"
        self.store = memstore.open(root)
        self._value = torch.randn(256)
        self.store.put(KEY, self._value)
        self._watch_commits()
        self._start(str(root))

    def _watch_commits(self) -> None:
        """Looks at the clock where a put first touches the doorbell: the next thing after its transaction's commit."""
        change = self._change = Doorbell.change

        def watched(doorbell: Doorbell, bell: int) -> None:
            self._committed = time.monotonic_ns()
            change(doorbell, bell)

        Doorbell.change = watched  # type: ignore[method-assign]

    def _signal(self) -> None:
        self.store.put(KEY, self._value)

    @staticmethod
    def _wait(pipe: Any, *arguments: Any) -> None:
        (root,) = arguments
        store = memstore.open(root)
        version = store.version(KEY)
        pipe.send(0)
        while True:
            version = store.wait(KEY, newer_than=version)
            awake = time.monotonic_ns()
            pipe.send(awake)

    def close(self) -> None:
        super().close()
        if hasattr(self, "_change"):
            Doorbell.change = self._change  # type: ignore[method-assign]
        if hasattr(self, "store"):
            self.store.close()


class FutexWaker(Waker):
    """A word in a shared page and the futex system call, called from Python as memstore calls it."""

    id: ClassVar[str] = "futex"
    name: ClassVar[str] = "futex alone"
    role: ClassVar[Role] = "limit"

    def setup(self) -> None:
        page = self.root / "page"
        page.write_bytes(bytes(mmap.PAGESIZE))
        self._word = Word(page)
        self._start(str(page))

    def _signal(self) -> None:
        self._word.change_and_wake()

    @staticmethod
    def _wait(pipe: Any, *arguments: Any) -> None:
        word = Word(Path(arguments[0]))
        seen = word.value
        pipe.send(0)
        while True:
            while word.value == seen:
                word.wait(seen)
            awake = time.monotonic_ns()
            seen = word.value
            pipe.send(awake)


class Word:
    """A futex word at the start of a file."""

    WAIT, WAKE = 0, 1
    CALL: ClassVar[int | None] = {"x86_64": 202, "aarch64": 98}.get(platform.machine())

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR)
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        self._word = ctypes.c_uint32.from_buffer(self._page)
        self._syscall = ctypes.CDLL(None).syscall

    @property
    def value(self) -> int:
        return self._word.value

    def wait(self, seen: int) -> None:
        self._syscall(self.CALL, ctypes.byref(self._word), self.WAIT, ctypes.c_uint32(seen), None, None, 0)

    def change_and_wake(self) -> None:
        self._word.value += 1
        self._syscall(self.CALL, ctypes.byref(self._word), self.WAKE, 1 << 30, None, None, 0)


class QueueWaker(Waker):
    id: ClassVar[str] = "queue"
    name: ClassVar[str] = "torch.multiprocessing"
    settings: ClassVar[str] = "SimpleQueue of a tensor"

    def setup(self) -> None:
        import torch.multiprocessing as mp

        self._queue = mp.get_context("spawn").SimpleQueue()
        self._start(self._queue)

    def wake(self) -> Woken:
        self._next = torch.randn(256)  # a new one each time: the queue moves its storage to shared memory
        return super().wake()

    def _signal(self) -> None:
        self._queue.put(self._next)

    @staticmethod
    def _wait(pipe: Any, *arguments: Any) -> None:
        (queue,) = arguments
        pipe.send(0)
        while True:
            queue.get()
            pipe.send(time.monotonic_ns())


class RayWaker(Waker):
    """This process waits in ray.get for what an actor's method returns; the actor looks at the clock just before."""

    id: ClassVar[str] = "ray"
    name: ClassVar[str] = "Ray"
    settings: ClassVar[str] = "ray.get of an actor's result; from the method's last line"

    @classmethod
    def missing(cls) -> str | None:
        return needs("ray")

    def setup(self) -> None:
        start_ray()
        import ray

        self._ray = ray
        self._actor = ray.remote(_Publisher).remote()

    def wake(self) -> Woken:
        published, _ = self._ray.get(self._actor.publish.remote())
        return Woken(published, published, published, time.monotonic_ns())

    def close(self) -> None:
        if hasattr(self, "_ray"):
            self._ray.shutdown()


class _Publisher:
    def publish(self) -> tuple[int, Any]:
        import numpy as np

        value = np.random.default_rng().random(256, np.float32)
        time.sleep(ASLEEP_SECONDS)
        return time.monotonic_ns(), value
