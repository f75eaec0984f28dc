"""Lanes: the threads that make calls which may wait, a few for each thing that may keep them waiting.

What waits for a host that doesn't answer takes the threads of that host's lane, and no others: calls for this host, and
for other ones, go on. The threads of a lane are shared by all stores and loops of the process. They are started when
they are needed, end when there was nothing to do for some seconds, and no exit of the interpreter waits for them, but
for a moment.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from memstore.abandoned import ABANDONED, WRITING
from memstore.aio.jobs import Job
from memstore.errors import StoreTimeoutError
from memstore.late_imports import Hooks, around_forks

T = TypeVar("T")

log = logging.getLogger("memstore")

HERE = "here"  # the lane of calls that wait for this host's locks and disks alone
THREADS = 8  # of a lane, at most
IDLE = 5.0  # seconds after which a thread ends that has nothing to do
_AT_EXIT = 2.0  # seconds that the interpreter's end waits for calls under way: a thread should not end within a copy


class Lane:
    """Any thread may call it. It ends nothing: an idle one has no threads."""

    def __init__(self) -> None:
        self._jobs: deque[Job[Any]] = deque()
        lock = threading.Lock()
        self._some, self._quiet = threading.Condition(lock), threading.Condition(lock)
        self._threads = self._idle = self._running = 0

    def add(self, job: Job[Any]) -> bool:
        """Returns whether it has to wait, since all threads have something to do."""
        with self._some:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._some.notify()
                return False
            if self._threads >= THREADS:
                return True
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="memstore.aio", daemon=True).start()
        except BaseException:
            with self._some:
                self._threads -= 1
                if not self._threads:  # else one of the others will come to it
                    job.function = None
                    raise
        return False

    def take_back(self, job: Job[Any]) -> bool:
        """It isn't to run. Returns False if a thread runs it: then what it puts is given up, if there is time."""
        with self._some:
            if job.thread:
                ABANDONED[job.thread] = job
                return False
            job.function = None  # it leaves the queue by itself
            return True

    def expire(self, job: Job[Any]) -> bool:
        """It isn't to run, if nobody runs it yet. Returns whether that is so."""
        with self._some:
            is_waiting, job.function = job.function is not None, None
            return is_waiting

    def settled(self, job: Job[Any], *, asks: bool) -> asyncio.Future[None] | None:
        """Is done when the call that was under way is over. None: it is over; or it asks, and doesn't write yet."""
        with self._some:
            if job.thread and (job.thread in WRITING or not asks):
                job.settled = asyncio.get_running_loop().create_future()
            return job.settled

    def end(self, deadline: float) -> None:
        """Runs no call that waits, but what undoes one; returns when nothing is under way any more, or then."""
        with self._some:
            for job in self._jobs:
                if job.future is not None:
                    job.function = None
            self._quiet.wait_for(
                lambda: not self._running and not any(job.function for job in self._jobs),
                max(deadline - time.monotonic(), 0),
            )

    # --- a thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """False: there was nothing to do for long. A method of its own: what a job gave is forgotten after it."""
        me = threading.get_ident()
        with self._some:
            job = self._next()
            if job is None:
                self._threads -= 1
                return False
            function, job.function = job.function, None
            if function is None:
                return True
            job.thread = me
            self._running += 1
        job.run(function)
        del function
        with self._some:
            job.thread = 0
            is_given_up = ABANDONED.pop(me, None) is not None
        if is_given_up:
            job.drop()
        with self._some:
            self._running -= 1
            self._quiet.notify_all()
        job.deliver()
        return True

    def _next(self) -> Job[Any] | None:
        until = time.monotonic() + IDLE
        while not self._jobs:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._idle += 1
            try:
                self._some.wait(left)
            finally:
                self._idle -= 1
        return self._jobs.popleft()


_lanes: WeakValueDictionary[Hashable, Lane] = WeakValueDictionary()  # their threads, and who waits, keep them


async def call(
    name: Hashable,
    function: Callable[[float], T],
    seconds: float | None = None,
    *,
    settles: bool = False,
    asks: bool = False,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Calls a function in a thread of a lane, and awaits what it gives.

    Args:
        function: gets the seconds that it has waited for a thread.
        seconds: that it may wait for one, at most; None: as long as it takes.
        settles: it writes into memory of the caller's: a task that is cancelled goes on when the call has ended.
        asks: it does so `writing` (`memstore/abandoned.py`): before and after that, the task goes on at once.
        undo: called in a thread of the lane with what the function gave, if the task was cancelled and doesn't get it.

    Raises:
        StoreTimeoutError: no thread had time for it.
        What the function raises.
    """
    lane = _lanes.get(name)
    if lane is None:
        lane = _lanes.setdefault(name, Lane())
    job = Job(function, lane.add, undo)
    future = job.future
    assert future is not None, "nobody has run it"
    timer: asyncio.TimerHandle | None = None
    if lane.add(job) and seconds is not None and seconds < 1e8:
        timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), _expire, lane, job, future, seconds)
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:  # cancelled before it went on
            job.drop_soon(future.result())
        elif not lane.take_back(job) and settles:
            await _settle(lane, job, asks=asks)
        raise
    finally:
        if timer is not None:
            timer.cancel()


def start(name: Hashable, function: Callable[[], object]) -> None:
    """As `call`, of what nobody waits for. What it raises is noted in the log."""
    task = asyncio.ensure_future(call(name, lambda _: function()))
    task.add_done_callback(_note)


def _note(task: asyncio.Future[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("memstore.aio: %s", str(error))


def _expire(lane: Lane, job: Job[Any], future: asyncio.Future[Any], seconds: float) -> None:
    if lane.expire(job) and not future.done():
        future.set_exception(
            StoreTimeoutError(
                f"no thread had time for this call within {seconds:g} s: {THREADS} calls wait for the same, "
                "a lock or a host"
            )
        )


async def _settle(lane: Lane, job: Job[Any], *, asks: bool) -> None:
    settled = lane.settled(job, asks=asks)
    while settled is not None and not settled.done():
        try:
            await asyncio.shield(settled)
        except asyncio.CancelledError:  # once more: the memory is written to all the same
            continue


# --- forks, and the end -----------------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    """The threads, and who holds their locks, are the parent's."""
    _lanes.clear()
    ABANDONED.clear()
    WRITING.clear()


def _do_nothing() -> None:
    pass


around_forks(Hooks(_do_nothing, _do_nothing, _after_fork_in_child))


@atexit.register
def _end() -> None:
    deadline = time.monotonic() + _AT_EXIT
    for lane in list(_lanes.values()):
        lane.end(deadline)
