"""Calls that block, made in threads for tasks of asyncio.

`awaited` makes a coroutine of a method that blocks. A `ThreadPool` runs the call: there are a few threads for each
thing that may keep calls waiting (this host's locks, or one other host). A `ThreadCall` is one call that a thread makes
for a task; it takes along what torch keeps for the task's thread (`TorchState`), and is given up when the task is
cancelled.
"""

# A method of `awaited` calls those that `Awaits` has for its subclasses.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import inspect
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import ExitStack
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload
from weakref import WeakValueDictionary

import torch

from memstore import _modes as modes
from memstore._threads import ABANDONED, WRITING, Hooks, around_forks
from memstore._wording import names_its_methods
from memstore.engine import deadline_after
from memstore.errors import StoreTimeoutError

# --- Methods that block, as methods that are awaited -----------------------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Blocking = TypeVar("Blocking")

WORTH_COUNTING = 0.001  # seconds in a queue, beyond which they are taken off a call's timeout


class Awaits(ABC, Generic[Blocking]):
    """An object that calls the methods of a blocking one in threads.

    Attributes:
        timeout: seconds that calls take at most which aren't told otherwise.
    """

    timeout: float

    def __init_subclass__(cls, **options: Any) -> None:
        """Names the methods by this class, and not by `awaited`: Python names a coroutine that nobody awaits so."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith("memstore."):  # a user's class leaves ours their names
            names_its_methods(cls)

    @abstractmethod
    def _blocking(self) -> Blocking:
        """Returns the object. Called in a thread, since it may have to be opened."""

    @abstractmethod
    def _pool_of(self, key: object) -> Hashable:
        """Returns the name of the pool of a call whose first argument is `key`, which need not be a key."""

    async def _made(
        self,
        method: Callable[..., R],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        pool: Hashable,
        is_timed: bool,
        settles: bool = False,
        undo: Callable[[R], object] | None = None,
    ) -> R:
        """Calls a method in a thread, within the call's timeout, if it takes one; `settles` and `undo`: see `call`."""
        if not is_timed:
            return await call(pool, lambda waited: method(self._blocking(), *arguments, **options), undo=undo)
        given = options.get("timeout")
        seconds = self.timeout if given is None else given
        deadline_after(seconds)  # refuses what is no number

        def make(waited: float) -> R:
            left = {"timeout": max(seconds - waited, 0.0)} if waited > WORTH_COUNTING else {}
            return method(self._blocking(), *arguments, **{**options, **left})

        return await call(pool, make, seconds, settles=settles, undo=undo)


@overload
def awaited(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, P], R], wrap: Callable[[Any, R], T]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, P], R], *, pool: Callable[[Any, Any], Hashable]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]: ...
def awaited(
    method: Callable[..., Any],
    wrap: Callable[[Any, Any], Any] | None = None,
    *,
    pool: Callable[[Any, Any], Hashable] | None = None,
) -> Any:
    """Makes a method for classes that are `Awaits`, from one of the object that blocks.

    Args:
        wrap: makes, of the object that awaits and of what the method gives, what is returned.
        pool: of the object that awaits, and a call's first argument; None: `_pool_of`.
    """
    signature = inspect.signature(method)
    is_timed = "timeout" in signature.parameters

    @functools.wraps(method, assigned=("__doc__", "__name__"))
    async def made_in_a_thread(self: Awaits[Any], *arguments: Any, **options: Any) -> Any:
        key = arguments[0] if arguments else options.get("key")
        name = self._pool_of(key) if pool is None else pool(self, key)
        settles = options.get("out") is not None
        made = await self._made(method, arguments, options, pool=name, is_timed=is_timed, settles=settles)
        return made if wrap is None else wrap(self, made)

    if wrap is not None:
        _say(made_in_a_thread, signature, wrap.__annotations__["return"])
    return made_in_a_thread


def called_as(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., Coroutine[Any, Any, R]]], Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]]:
    """Gives an awaited method that is written by hand the arguments and the text of the blocking one."""

    def named(written: Callable[..., Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
        functools.update_wrapper(written, method, assigned=("__doc__", "__name__"))
        _say(written, inspect.signature(method), written.__annotations__["return"])
        return written

    return named


def _say(awaiting: Any, signature: inspect.Signature, returned: str) -> None:
    """Lets `help` and the reference show the arguments of the blocking method, and what this one returns."""
    awaiting.__signature__ = signature.replace(return_annotation=returned)


def refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    """Makes a method in the place of Python's own syntax, which can't be awaited."""

    def refuse(_: object, *arguments: object) -> NoReturn:
        raise TypeError(f"{what} would block a loop of asyncio: write {instead}")

    return refuse


# --- Pools of threads ------------------------------------------------------------------------------------------------
# What waits for a host that doesn't answer takes the threads of that host's pool, and no others: calls for this host,
# and for other ones, go on. The threads of a pool are shared by all stores and loops of the process. They are started
# when they are needed, end when there was nothing to do for some seconds, and no exit of the interpreter waits for
# them, but for a moment.


log = logging.getLogger("memstore")

HERE = "here"  # the pool of calls that wait for this host's locks and disks alone
THREADS = 8  # of a pool, at most
IDLE = 5.0  # seconds after which a thread ends that has nothing to do
_AT_EXIT = 2.0  # seconds that the interpreter's end waits for calls under way: a thread should not end within a copy


class ThreadPool:
    """The threads for calls that wait for one thing. Any thread may call it; an idle one has no threads."""

    def __init__(self) -> None:
        self._jobs: deque[ThreadCall[Any]] = deque()
        lock = threading.Lock()
        self._some, self._quiet = threading.Condition(lock), threading.Condition(lock)
        self._threads = self._idle = self._running = 0

    def add(self, job: ThreadCall[Any]) -> bool:
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

    def take_back(self, job: ThreadCall[Any]) -> bool:
        """Gives a call up. Returns False if a thread runs it: then what it puts is given up, if there is time."""
        with self._some:
            if job.thread:
                ABANDONED[job.thread] = job
                return False
            job.function = None  # it leaves the queue by itself
            return True

    def expire(self, job: ThreadCall[Any]) -> bool:
        """Gives a call up that nobody runs yet. Returns whether that is so."""
        with self._some:
            is_waiting, job.function = job.function is not None, None
            return is_waiting

    def settled(self, job: ThreadCall[Any], *, asks: bool) -> asyncio.Future[None] | None:
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
        """Runs one call. Returns False if there was nothing to do for long.

        It is a method of its own, so that after it nothing refers to what the call gave.
        """
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

    def _next(self) -> ThreadCall[Any] | None:
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


_pools: WeakValueDictionary[Hashable, ThreadPool] = WeakValueDictionary()  # their threads, and who waits, keep them


async def call(
    name: Hashable,
    function: Callable[[float], T],
    seconds: float | None = None,
    *,
    settles: bool = False,
    asks: bool = False,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Calls a function in a thread of a pool, and awaits what it gives.

    Args:
        function: gets the seconds that it has waited for a thread.
        seconds: that it may wait for one, at most; None: as long as it takes.
        settles: it writes into memory of the caller's: a task that is cancelled goes on when the call has ended.
        asks: it does so `writing` (`memstore/_threads.py`): before and after that, the task goes on at once.
        undo: called in a thread of the pool with what the function gave, if the task was cancelled and doesn't get it.

    Raises:
        StoreTimeoutError: no thread had time for it.
        What the function raises.
    """
    pool = _pools.get(name)
    if pool is None:
        pool = _pools.setdefault(name, ThreadPool())
    job = ThreadCall(function, pool.add, undo)
    future = job.future
    assert future is not None, "nobody has run it"
    timer: asyncio.TimerHandle | None = None
    if pool.add(job) and seconds is not None and seconds < 1e8:
        timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), _expire, pool, job, future, seconds)
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:  # cancelled before it went on
            job.drop_soon(future.result())
        elif not pool.take_back(job) and settles:
            await _settle(pool, job, asks=asks)
        raise
    finally:
        if timer is not None:
            timer.cancel()


def start(name: Hashable, function: Callable[[], object]) -> None:
    """Calls a function as `call` does, for nobody who waits. An error is noted in the log."""
    task = asyncio.ensure_future(call(name, lambda _: function()))
    task.add_done_callback(_note)


def _note(task: asyncio.Future[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("memstore.aio: %s", str(error))


def _expire(pool: ThreadPool, job: ThreadCall[Any], future: asyncio.Future[Any], seconds: float) -> None:
    if pool.expire(job) and not future.done():
        future.set_exception(
            StoreTimeoutError(
                f"no thread had time for this call within {seconds:g} s: {THREADS} calls wait for the same, "
                "a lock or a host"
            )
        )


async def _settle(pool: ThreadPool, job: ThreadCall[Any], *, asks: bool) -> None:
    settled = pool.settled(job, asks=asks)
    while settled is not None and not settled.done():
        try:
            await asyncio.shield(settled)
        except asyncio.CancelledError:  # once more: the memory is written to all the same
            continue


# --- forks, and the end -----------------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    """Forgets the threads, and who holds their locks, which are the parent's."""
    _pools.clear()
    ABANDONED.clear()
    WRITING.clear()


around_forks(Hooks(after_in_child=_after_fork_in_child))


@atexit.register
def _end() -> None:
    deadline = time.monotonic() + _AT_EXIT
    for pool in list(_pools.values()):
        pool.end(deadline)


# --- One call --------------------------------------------------------------------------------------------------------
# How a call is given up when its task is cancelled:
#
# 1. Not begun: it never runs.
# 2. Under way: the task goes on at once, the thread goes on to the end of the call, and what it gives is dropped. Calls
#    ask whether that is so (`memstore/_threads.py`): a put that has not copied all of its bytes by then isn't made, and
#    one that has is made whole.
# 3. Under way, and it writes into memory of the caller's (`settles`): the task goes on when the call has ended, so that
#    nothing is written there any more. A call that asks before it writes holds the task only while it does.
# 4. Over, but the task doesn't get what it gives: `undo` is called with that, in a thread. So rows that a sample has
#    taken from all others are put back. Such a task may be cancelled at three moments: before the thread is done,
#    before the loop has seen that, and before the task has gone on.


class ThreadCall(Generic[T]):
    """One call that a thread makes, for a task or for nobody. Its pool's lock guards what changes.

    Attributes:
        future: of that loop; what the task awaits. None: no task does.
        settled: as `future`, and never cancelled: for a task that is to see the call's end. None: there is none.
        thread: that runs it; 0: none does.
        function: called with the seconds that it has waited for a thread. None: it is not to run.
    """

    __slots__ = (
        "_add",
        "_context",
        "_error",
        "_loop",
        "_made",
        "_result",
        "_state",
        "_undo",
        "function",
        "future",
        "settled",
        "thread",
    )

    def __init__(
        self,
        function: Callable[[float], T],
        add: Callable[[ThreadCall[Any]], object],
        undo: Callable[[T], object] | None = None,
        *,
        is_awaited: bool = True,
    ) -> None:
        """
        Args:
            add: gives another job to the pool.
            undo: called in a thread with what the function gave, if the task doesn't get it.
            is_awaited: a task of this loop waits for it. False: nobody does, and what it raises is noted in the log.
        """
        self._loop = asyncio.get_running_loop() if is_awaited else None
        self._add, self._undo = add, undo
        self._context, self._state = contextvars.copy_context(), TorchState()
        self._made = time.monotonic()
        self._result: Any = None
        self._error: BaseException | None = None
        self.future: asyncio.Future[T] | None = None if self._loop is None else self._loop.create_future()
        self.settled: asyncio.Future[None] | None = None
        self.function: Callable[[float], T] | None = function
        self.thread = 0

    def run(self, function: Callable[[float], T]) -> None:
        """Calls it, in a thread, and keeps what it gives, or what it raises."""
        waited = time.monotonic() - self._made
        try:
            self._result = self._context.run(self._state.run, lambda: function(waited))
        except BaseException as error:
            self._error = error

    def drop(self) -> None:
        """Drops what the function gave, which the task doesn't get. Called in a thread."""
        result, error, self._result, self._error = self._result, self._error, None, None
        undo, self._undo = self._undo, None  # once: `_set` comes after it
        if error is None and undo is not None:
            try:
                undo(result)
            except Exception as failed:
                log.info("memstore.aio: %s", str(failed))

    def drop_soon(self, result: T) -> None:
        """Drops it in a thread of the pool. Called in the loop."""
        undo, self._undo = self._undo, None
        if undo is not None:
            self._add(ThreadCall(lambda _: undo(result), self._add, is_awaited=False))

    def deliver(self) -> None:
        """Gives the task its result, from any thread. When the task goes on, nothing here refers to what it gets."""
        if self._loop is None:
            if self._error is not None:
                log.info("memstore.aio: %s", str(self._error))
            self._result = self._error = None
            return
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop was closed: nobody waits
            self.drop()

    def _set(self) -> None:
        future, self.future = self.future, None
        if self.settled is not None:
            self.settled.set_result(None)
        result, error, self._result, self._error = self._result, self._error, None, None
        if future is None or future.done():
            if error is None:
                self.drop_soon(result)
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


# --- What torch keeps for each thread --------------------------------------------------------------------------------
# A call depends on it, so it is taken along to the thread that makes the call:
#
# - Inference mode and grad mode: rows that are read under inference mode are inference tensors.
# - The current CUDA device and stream: what is copied to a device is ordered as the awaiting task has it.
# - The mode that keeps what autograd has saved, where a get writes over it.
#
# Other modes and transforms (FakeTensorMode, `torch.device` as a context, `torch.func`) are put aside by memstore's
# calls anyway, see `memstore/_modes.py`; a thread of ours has none.


_inference: Callable[[], bool] = torch.is_inference_mode_enabled
_grad: Callable[[], bool] = torch.is_grad_enabled


class TorchState:
    """The state of torch in the thread that makes it. `run` calls a function with it, in any thread."""

    __slots__ = ("_grad", "_inference", "_modes", "_stream")

    def __init__(self) -> None:
        self._inference, self._grad = _inference(), _grad()
        self._modes = modes.kept_modes() if modes.count_dispatch_modes() else ()
        self._stream: Any = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(self, function: Callable[[], T]) -> T:
        if self._grad and not self._inference and not self._modes and self._stream is None:
            return function()
        with ExitStack() as states:
            states.enter_context(torch.inference_mode(self._inference))
            states.enter_context(torch.set_grad_enabled(self._grad))
            if self._stream is not None:
                states.enter_context(torch.cuda.stream(self._stream))  # and its device
            states.enter_context(modes.keeping(self._modes))
            return function()
