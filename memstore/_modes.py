"""Modes of torch, put aside while memstore works with tensors of its own.

Under FakeTensorMode a leaf that is made over the mapping would be a fake one; inside `torch.func.grad` or `vmap` a
wrapper without memory; in inference mode one that can't be trained. So what is active at a get or put doesn't reach
the calls of its own: what is got is real memory, and what is put is what the value holds. Tensors that are fake, or
wrapped, stay what they are, and are refused where bytes are needed.

To look for modes takes 0.05 us a kind, to put them aside 10 us. So a plain get looks for the two kinds alone that
change what is made of memory (`count_dispatch_modes`, `current_transform`), and a put of a plain tensor looks for none.
Where a call fails, both try again with all modes put aside.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_c: Any = torch._C

count_dispatch_modes: Any = _c._len_torch_dispatch_stack
current_transform: Any = _functorch.peek_interpreter_stack  # None outside of torch.func's
_count_function_modes: Any = _c._len_torch_function_stack
_tracer, _set_tracer = _c._get_tracing_state, _c._set_tracing_state  # torch.jit.trace's, which copies can crash
_before_dispatch = _c.DispatchKey.PreDispatch  # of torch.export and make_fx: a stack by itself

_eval_frame: Any = _c._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)

# allow_mutation_on_saved_tensors, which copies what autograd has saved before out= writes over it
_KEPT: type[Any] = getattr(torch.autograd.graph, "_CloneArgBeforeMutateMode", type(None))


def are_active() -> bool:
    """Returns whether there is a mode or transform that `put_aside` would put aside."""
    return bool(
        count_dispatch_modes()
        or current_transform() is not None
        or _count_function_modes()
        or _tracer() is not None
        or _c._dispatch_tls_is_dispatch_key_included(_before_dispatch)
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
    tracer, before = _tracer(), _c._dispatch_tls_is_dispatch_key_included(_before_dispatch)
    try:
        if tracer is not None:
            _set_tracer(None)
        while current_transform() is not None:
            transforms.append(_functorch.pop_dynamic_layer_stack())
        while _count_function_modes():
            functions.append(_c._pop_torch_function_stack())
        while count_dispatch_modes():
            dispatching.append(_c._pop_torch_dispatch_stack(None))
        for mode in reversed(dispatching):
            if isinstance(mode, _KEPT) and not entirely:
                _c._push_on_torch_dispatch_stack(mode)
        if before:
            _c._dispatch_tls_set_dispatch_key_included(_before_dispatch, False)
        yield
    finally:
        if before:
            _c._dispatch_tls_set_dispatch_key_included(_before_dispatch, True)
        while count_dispatch_modes():
            _c._pop_torch_dispatch_stack(None)
        for mode in reversed(dispatching):
            _c._push_on_torch_dispatch_stack(mode)
        for mode in reversed(functions):
            _c._push_on_torch_function_stack(mode)
        for transform in reversed(transforms):
            _functorch.push_dynamic_layer_stack(transform)
        if tracer is not None:
            _set_tracer(tracer)


def kept_modes() -> tuple[Any, ...]:
    """Returns the modes of this thread that `put_aside` leaves where they are: for another thread, see `keeping`."""
    stack = map(_c._get_dispatch_stack_at, range(count_dispatch_modes()))
    return tuple(mode for mode in stack if isinstance(mode, _KEPT))


@contextmanager
def keeping(modes: tuple[Any, ...]) -> Generator[None]:
    """Gives this thread these modes too while the body runs."""
    for mode in modes:
        _c._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            _c._pop_torch_dispatch_stack(None)


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
    another one. (`torch.compiler.disable` says the same, and imports the compiler, which takes seconds.)
    """
    plain: Any = function
    plain._torchdynamo_disable = True  # it isn't inlined into a graph
    _eval_frame.set_code_exec_strategy(plain.__code__, _SKIP)  # nor compiled by itself
    return function


def uncompiled_methods(cls: type[T]) -> type[T]:
    """Decorates a class whose methods, with those of its bases of memstore, are `uncompiled`."""
    for base in cls.__mro__:
        for one in vars(base).values():
            function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
            if isinstance(function, FunctionType) and function.__globals__["__name__"].startswith("memstore."):
                uncompiled(function)
    return cls


def _stay_out_of_graphs(*functions: Any) -> None:
    for function in functions:
        uncompiled(function)


_stay_out_of_graphs(unaffected, uncompiled, uncompiled_methods)  # a room may be imported by compiled code
