"""The two modes of a session, entered and left together: for torch functions, and for operators."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._guards import TracingContext
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from memstore import _modes as modes
from memstore._wording import an
from memstore.errors import UnsupportedValueError
from memstore.fake.functions import DEVICES, HANDLERS, MOVES, PLAIN, deepcopied, deepcopy_real, set_data, set_real_data
from memstore.fake.session import Recorder, Session
from memstore.fake.tensors import META, FakeTensor, become_fake, mark_of, meta_twin, requires_grad, tensors_in

_CPU = torch.device("cpu")
_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
_OF_VALUES = {torch.tensor, torch.as_tensor, torch.asarray}
_LIFTING = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.Tensor.new_tensor}


class _Functions(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(self._session, func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one.__torch_dispatch__ is not _NO_DISPATCH for one in types):
            return NotImplemented  # it has a say in what it does; what it does with its parts comes here
        with torch._C.DisableTorchFunction():
            return self._session.run(func, args, kwargs or {})


class _Thread(threading.local):
    session: Session | None = None  # the innermost


_thread = _Thread()


@contextmanager
def in_session(session: Session, *, brief: bool = False) -> Generator[Session]:
    """Enters both modes, until the end. Then each tensor that lives says by itself that it is fake.

    Args:
        brief: for one function, which makes no tensor that the modes don't see.
    """
    before, _thread.session = _thread.session, session
    try:
        with _Operators(session), _Functions(session):
            yield session
    finally:
        _thread.session = before
        with torch._C.DisableTorchFunction():
            for one in session.living.seen() if brief else session.living.all():
                become_fake(one)


def call(session: Session, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a torch function, as it is in a session."""
    function, args, options = _plainer(session, function, args, options)
    handler = HANDLERS.get(function)
    claim, is_made = None, function in _LIFTING
    with torch._C.DisableTorchFunction():
        for one in tensors_in(args if not options else (*args, *options.values())):
            mark = mark_of(one)
            if mark is not None:
                session.note(one)
                claim = claim or mark.device
        mark = mark_of(args[0]) if handler is not None and args and isinstance(args[0], torch.Tensor) else None
    if handler is not None and mark is not None:
        return handler(session, function, mark, args, options)
    if handler is set_data and isinstance(args[1], torch.Tensor) and claim is not None:
        return set_real_data(session, function, args)
    if handler is deepcopied:
        return deepcopy_real(session, function, args)
    if session.fake_cuda and function is not torch.device:
        if function in MOVES and (function is torch.Tensor.cuda or _names_cuda(args[1:], options)):
            return _move_real(session, function, args, options)
        instead = _CPU if function in _OF_VALUES else META  # on meta nobody would hear of what is made of values
        claim, args, options = _without_cuda(claim, args, _by_default(function, options), instead)
    before, lifted, cast = session.claim, session.lifts, session.casts
    session.claim, session.lifts = claim, is_made or lifted
    session.casts = cast or claim is not None and torch.is_autocast_enabled(claim.type)  # operators see it off
    try:
        return function(*args, **options)
    finally:
        session.claim, session.lifts, session.casts = before, lifted, cast


def _plainer(
    session: Session, function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the call itself, or another call that does more by operators, which the modes see."""
    if function is torch.Tensor.new_tensor:
        with torch._C.DisableTorchFunction():
            mark = mark_of(args[0])
            if mark is not None:
                given = {name: one for name, one in options.items() if one is not None}
                return torch.tensor, args[1:], {"dtype": args[0].dtype, "device": mark.device, **given}
    is_of_tensor = function in _OF_VALUES and bool(args) and isinstance(args[0], torch.Tensor)
    if session.fake_cuda and is_of_tensor and _names_cuda((), options):
        named = {name: one for name, one in options.items() if name in ("device", "dtype")}
        return torch.Tensor.to, args[:1], named
    return function, args, options


def _by_default(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with the device of `torch.device(...)` as a context, which torch would add behind this mode."""
    if options.get("device") is None and function in _device_constructors():
        for one in _get_current_function_mode_stack():
            if isinstance(one, DeviceContext):
                return {**options, "device": one.device}
    return options


def _without_cuda(
    claim: torch.device | None, args: tuple[Any, ...], options: dict[str, Any], instead: torch.device
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """Arguments without CUDA, which torch would look for; what is made claims it."""
    named = _cuda_device(options.get("device"))
    if named is not None:
        return named, args, {**options, "device": instead}
    for number, one in enumerate(args):
        device = _cuda_device(one) if isinstance(one, torch.device) else None
        if device is not None:
            return device, (*args[:number], instead, *args[number + 1 :]), options
    return claim, args, options


def _names_cuda(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return any(_cuda_device(one) is not None for one in (*args, options.get("device")))


def _cuda_device(value: Any) -> torch.device | None:
    if isinstance(value, (str, torch.device)):
        device = torch.device(value)
        return device if device.type == "cuda" else None
    return None


def _move_real(session: Session, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Moves a real tensor to CUDA where there is none: makes a fake one of it."""
    with torch._C.DisableTorchFunction():
        fake = session.lift(args[0])
    mark = mark_of(fake)
    assert mark is not None, "it was just marked"
    return HANDLERS[function](session, function, mark, (fake, *args[1:]), options)


def _run_outside(function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a torch function on a fake tensor whose mode is over."""
    session, handler = _thread.session, HANDLERS.get(function)
    # With a session: inside of a function that was called with its mode put aside.
    if handler is not None and (session is not None or function in DEVICES):
        with torch._C.DisableTorchFunction():
            mark = mark_of(args[0])
        if mark is not None:
            return handler(cast(Session, session), function, mark, args, options)
    if session is not None or function in PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **options)
        return result if session is None else session.living.noted(result)
    if TracingContext.try_get() is not None:
        raise UnsupportedValueError(
            "torch.compile can't trace tensors that are fake or deferred: materialize the module first"
        )
    recorder: Recorder | None = None
    with torch._C.DisableTorchFunction():
        for one in tensors_in((*args, *options.values())):
            mark = mark_of(one)
            if mark is not None and mark.history is not None:
                recorder = mark.history.recorder()
                break
    with in_session(Session(recorder, fake_cuda=recorder is None), brief=True) as session:
        return session.living.noted(function(*args, **options))


FakeTensor.run = staticmethod(_run_outside)
Session.functions = _Functions


@contextmanager
def fake_mode(*, fake_cuda: bool = False) -> Generator[None]:
    """Makes all new tensors fake, in a `with`: they have a shape, a dtype and a device, but no memory.

    Results that are computed from them are fake too, also after the context has ended.

    Args:
        fake_cuda: allow tensors on CUDA devices on a machine without CUDA.

    Example:
        >>> import torch
        >>> from memstore.fake import fake_mode, is_fake
        >>> with fake_mode(fake_cuda=True):
        ...     model = torch.nn.Linear(1_000_000, 1_000_000, device="cuda")
        >>> model.weight.device, is_fake(model.weight)
        (device(type='cuda', index=0), True)
    """
    with in_session(Session(None, fake_cuda=fake_cuda)):
        yield


@modes.uncompiled
def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in `fake_mode`, or by `deferred_init`, and has no memory.

    Args:
        tensor: any tensor.
    """
    with torch._C.DisableTorchFunction():
        return mark_of(_checked("is_fake", tensor)) is not None


@modes.uncompiled
def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Makes a meta tensor with the shape, strides, dtype and requires_grad of a fake one, and no history of autograd.

    Args:
        fake: a fake tensor.

    Raises:
        ValueError: it isn't fake.
        TypeError: it is no tensor.
    """
    with torch._C.DisableTorchFunction(), modes.put_aside():
        if mark_of(_checked("meta_like", fake)) is None:
            raise ValueError(f"a fake tensor is needed, and this is {an(type(fake))} on {fake.device}")
        return meta_twin(fake).requires_grad_(requires_grad(fake))


def _checked(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} takes a tensor, and not {an(type(tensor))}")
    return tensor
