"""A method of a class that blocks, as one that is awaited: with the same arguments, types and text."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from memstore.aio.lanes import call
from memstore.engine import deadline_after

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Blocking = TypeVar("Blocking")

WORTH_COUNTING = 0.001  # seconds in a queue, beyond which they are taken off a call's timeout


class Awaits(ABC, Generic[Blocking]):
    """Calls the methods of a blocking object in threads.

    Attributes:
        timeout: seconds that calls take at most which aren't told otherwise.
    """

    timeout: float

    def __init_subclass__(cls, **options: Any) -> None:
        """Python names a coroutine that nobody awaits as its function is named: by this class, and not by `awaited`."""
        super().__init_subclass__(**options)
        for name, method in vars(cls).items():
            if inspect.iscoroutinefunction(method) and method.__module__.startswith("memstore."):
                method.__qualname__ = f"{cls.__qualname__}.{name}"

    @abstractmethod
    def blocking(self) -> Blocking:
        """The object. In a thread: it may have to be opened."""

    @abstractmethod
    def lane_of(self, key: object) -> Hashable:
        """Of a call whose first argument is `key`, which need not be one."""

    async def made(
        self,
        method: Callable[..., R],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        lane: Hashable,
        is_timed: bool,
        settles: bool = False,
        undo: Callable[[R], object] | None = None,
    ) -> R:
        """Calls a method in a thread, within the call's timeout, if it takes one; `settles` and `undo`: see `call`."""
        if not is_timed:
            return await call(lane, lambda waited: method(self.blocking(), *arguments, **options), undo=undo)
        given = options.get("timeout")
        seconds = self.timeout if given is None else given
        deadline_after(seconds)  # refuses what is no number

        def make(waited: float) -> R:
            left = {"timeout": max(seconds - waited, 0.0)} if waited > WORTH_COUNTING else {}
            return method(self.blocking(), *arguments, **{**options, **left})

        return await call(lane, make, seconds, settles=settles, undo=undo)


@overload
def awaited(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, P], R], wrap: Callable[[Any, R], T]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, P], R], *, lane: Callable[[Any, Any], Hashable]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]: ...
def awaited(
    method: Callable[..., Any],
    wrap: Callable[[Any, Any], Any] | None = None,
    *,
    lane: Callable[[Any, Any], Hashable] | None = None,
) -> Any:
    """A method for classes that are `Awaits`, of the object that blocks.

    Args:
        wrap: makes, of the object that awaits and of what the method gives, what is returned.
        lane: of the object that awaits, and a call's first argument; None: `lane_of`.
    """
    signature = inspect.signature(method)
    is_timed = "timeout" in signature.parameters

    @functools.wraps(method, assigned=("__doc__", "__name__"))
    async def made_in_a_thread(self: Awaits[Any], *arguments: Any, **options: Any) -> Any:
        key = arguments[0] if arguments else options.get("key")
        name = self.lane_of(key) if lane is None else lane(self, key)
        settles = options.get("out") is not None
        made = await self.made(method, arguments, options, lane=name, is_timed=is_timed, settles=settles)
        return made if wrap is None else wrap(self, made)

    if wrap is not None:
        _say(made_in_a_thread, signature, wrap.__annotations__["return"])
    return made_in_a_thread


def called_as(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., Coroutine[Any, Any, R]]], Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]]:
    """For an awaited method that is written by hand: it has the arguments and the text of the blocking one."""

    def named(written: Callable[..., Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
        functools.update_wrapper(written, method, assigned=("__doc__", "__name__"))
        _say(written, inspect.signature(method), written.__annotations__["return"])
        return written

    return named


def _say(awaiting: Any, signature: inspect.Signature, returned: str) -> None:
    """`help` and the reference show the arguments of the blocking method, and what this one returns."""
    awaiting.__signature__ = signature.replace(return_annotation=returned)


def refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    """A method in the place of Python's own syntax, which can't be awaited."""

    def refuse(_: object, *arguments: object) -> NoReturn:
        raise TypeError(f"{what} would block a loop of asyncio: write {instead}")

    return refuse
