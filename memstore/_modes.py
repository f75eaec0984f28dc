"""Modes of torch, put aside while memstore works with tensors of its own.

Under FakeTensorMode a leaf that is made over the mapping would be a fake one; inside `torch.func.grad` or `vmap` a
wrapper without memory; in inference mode one that can't be trained. So what is active at a get or put doesn't reach
the calls of its own: what is got is real memory, and what is put is what the value holds. Tensors that are fake, or
wrapped, stay what they are, and are refused where bytes are needed.

To look for modes takes 0.05 us a kind, to put them aside 10 us. So a plain get looks for the two kinds alone that
change what is made of memory (`count_dispatch_modes`, `current_transform`), and a put of a plain tensor looks for none.
Where a call fails, both try again with all modes put aside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from memstore import _compat
from memstore._compat import (
    SavedTensorsMode,
    count_dispatch_modes,
    count_function_modes,
    current_transform,
    is_before_dispatch,
    tracing_state,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def are_active() -> bool:
    """Returns whether there is a mode or transform that `put_aside` would put aside."""
    return bool(
        count_dispatch_modes()
        or current_transform() is not None
        or count_function_modes()
        or tracing_state() is not None
        or is_before_dispatch()
    )


@contextmanager
def put_aside(*, entirely: bool = False) -> Generator[None]:
    """Takes modes and transforms away from this thread while the body runs.

    Subclasses of tensors still do what they do.

    Args:
        entirely: also without allow_mutation_on_saved_tensors, which fails for inference tensors.
    """
    transforms: list[Any] = []
    functions: list[Any] = []
    dispatching: list[Any] = []
    tracer, is_before = tracing_state(), is_before_dispatch()
    try:
        if tracer is not None:
            _compat.set_tracing_state(None)
        while current_transform() is not None:
            transforms.append(_compat.pop_transform())
        while count_function_modes():
            functions.append(_compat.pop_function_mode())
        while count_dispatch_modes():
            dispatching.append(_compat.pop_dispatch_mode())
        for mode in reversed(dispatching):
            if isinstance(mode, SavedTensorsMode) and not entirely:
                _compat.push_dispatch_mode(mode)
        if is_before:
            _compat.set_before_dispatch(False)
        yield
    finally:
        if is_before:
            _compat.set_before_dispatch(True)
        while count_dispatch_modes():
            _compat.pop_dispatch_mode()
        for mode in reversed(dispatching):
            _compat.push_dispatch_mode(mode)
        for mode in reversed(functions):
            _compat.push_function_mode(mode)
        for transform in reversed(transforms):
            _compat.push_transform(transform)
        if tracer is not None:
            _compat.set_tracing_state(tracer)


def kept_modes() -> tuple[Any, ...]:
    """Returns the modes of this thread that `put_aside` leaves where they are: for another thread, see `keeping`."""
    stack = map(_compat.dispatch_mode_at, range(count_dispatch_modes()))
    return tuple(mode for mode in stack if isinstance(mode, SavedTensorsMode))


@contextmanager
def keeping(modes: tuple[Any, ...]) -> Generator[None]:
    """Gives this thread these modes too while the body runs."""
    for mode in modes:
        _compat.push_dispatch_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _compat.pop_dispatch_mode()


def unaffected(function: Callable[P, R]) -> Callable[P, R]:
    """Calls a function with all modes put aside. Where none is active, it costs half a microsecond.

    torch.compile leaves it alone too: see `uncompiled`.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        if not are_active():
            return function(*arguments, **options)
        with put_aside():
            return function(*arguments, **options)

    return uncompiled(call)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function itself, which torch.compile leaves alone from now on, as well as what it calls.

    It would trace numpy arrays and storages as copies of them, and take what it has made for one leaf of a view for
    another one.
    """
    _compat.skip_compilation(cast("FunctionType", function))
    return function


def uncompiled_methods(cls: type[T]) -> type[T]:
    """Decorates a class whose methods, with those of its bases of memstore, are `uncompiled`."""
    for base in cls.__mro__:
        for one in vars(base).values():
            function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
            if isinstance(function, FunctionType) and function.__globals__["__name__"].startswith("memstore."):
                uncompiled(function)
    return cls


for _function in (unaffected, uncompiled, uncompiled_methods):  # a module may be imported by compiled code
    _compat.skip_compilation(_function)
