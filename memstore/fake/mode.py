"""Modes: what torch functions and attributes say of a fake tensor; fake_mode, and fake_like.

Operators don't see all functions, or see them too late. For these there are handlers: each gets the session, the
function, and its arguments, the first of which is a fake tensor, with its mark. A session enters a mode for functions
and one for operators together, and leaves both together. Then each fake tensor gets a class that says by itself what it
is, and where (`become_fake`).
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memstore import _modes as modes
from memstore import structure
from memstore._compat import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    DispatchMode,
    aten_to_copy,
    default_device,
    has_own_operators,
    is_compiling,
    make_subclass,
    parse_to,
    set_version,
    version_of,
)
from memstore._wording import an
from memstore.errors import UnsupportedValueError
from memstore.fake.session import (
    APART,
    META,
    Mark,
    Recorder,
    Session,
    TensorRef,
    is_inference,
    is_leaf,
    is_meta,
    lend,
    mark_of,
    meta_twin,
    over_storage,
    ref_of,
    requires_grad,
    set_mark,
    storage_bytes,
    tensors_in,
    with_index,
)

# --- Copies ----------------------------------------------------------------------------------------------------------
# copy.deepcopy of tensors inside of a session, also of one that lasts for this copy alone.
#
# torch copies a storage by tensors of its own that show it. Inside of the modes these would be fake, and the copy of a
# real storage would stay what its memory was before. So what is real is copied with the modes put aside.


_OURS = "_memstore_"  # what deferred_init has noted of a tensor: of its copy it isn't true


def _deepcopied(session: Session, function: Any, mark: Mark, args: Any, options: dict[str, Any]) -> Any:
    """Copies the storage, which copies its past too. Tensors that share a storage share the copy."""
    fake, memo = args
    if id(fake) in memo:
        return memo[id(fake)]
    with DisableTorchFunction():
        made = memo[id(fake)] = _deepcopy(fake, mark, memo)
        session.note(made)
    with _Functions(session):  # attributes may be tensors too
        for name, one in fake.__dict__.items():
            if not name.startswith(_OURS):
                setattr(made, name, copy.deepcopy(one, memo))
    return made


def _deepcopy(fake: torch.Tensor, mark: Mark, memo: dict[int, Any]) -> torch.Tensor:
    """Copies a tensor without its attributes."""
    if not is_leaf(fake):
        raise RuntimeError("a tensor that was computed from others (no leaf) can't be copied with deepcopy")
    ref, cls = ref_of(fake, mark), original_class(type(fake))
    if id(mark) not in memo:
        whole = TensorRef(mark, torch.uint8, (storage_bytes(fake),), (1,), 0, False, False)
        memo[id(mark)] = over_storage(fake, whole).clone()
    made = over_storage(memo[id(mark)], ref)
    lend(made)
    if cls is not torch.Tensor:
        return make_subclass(cls, made, requires_grad(fake))
    return made.requires_grad_() if requires_grad(fake) else made


def _deepcopy_real(session: Session, function: Any, args: Any) -> Any:
    """Copies a tensor that isn't fake. One that wraps others is copied by operators, which the modes are to see."""
    real, memo = args
    if has_own_operators(type(real)):
        return function(real, memo)
    with _Functions(session):
        copy.deepcopy(real.__dict__, memo)  # among its attributes may be fakes: torch finds their copies in the memo
    with modes.put_aside(entirely=True):
        return function(real, memo)


# --- Handlers --------------------------------------------------------------------------------------------------------


Args = Any  # a tuple: strict types would ask for its length at each place
Handler = Callable[[Session, Any, Mark, Args, dict[str, Any]], Any]
_tensor: Any = torch.Tensor


def _repr(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> str:
    """Renders `tensor(..., size=(2, 3), dtype=torch.float16, device=cuda:0, fake=True)`, as torchdistX does."""
    with DisableTorchFunction():
        ref = ref_of(args[0], mark)
        needs_grad = requires_grad(args[0])
    dtype = "" if ref.dtype == torch.get_default_dtype() else f", dtype={ref.dtype}"
    device = "" if mark.device.type == "cpu" else f", device={with_index(mark.device)}"
    return f"tensor(..., size={ref.size}{dtype}{device}{', requires_grad=True' if needs_grad else ''}, fake=True)"


def _format(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> str:
    return format(repr(args[0]), args[1])


def _read(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    """Handles `numpy()` and `tolist()`: on values, if there are any."""
    with DisableTorchFunction():
        fake = args[0]
        values = _values(session, function.__name__, fake, mark)
        return function(values.requires_grad_(requires_grad(fake)), *args[1:], **options)


def _values(session: Session, name: str, fake: torch.Tensor, mark: Mark) -> torch.Tensor:
    recorder = session.recorder or (None if mark.history is None else mark.history.recorder())
    if recorder is None:
        raise UnsupportedValueError(
            f"Tensor.{name} needs values, and a fake tensor has none: make it outside of fake_mode"
        )
    return recorder.values(ref_of(fake, mark))


def _no_pointer(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    raise UnsupportedValueError(
        f"Tensor.{function.__name__} can't be had of a fake tensor, which has no memory: materialize it first"
    )


def _no_pickle(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    what = "a fake tensor" if mark.history is None else "a deferred tensor"
    raise UnsupportedValueError(
        f"{what} has no values that could be pickled, saved or sent: materialize it first, or send what makes it"
    )


def _get_data(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> torch.Tensor:
    """Handles `fake.data`, which is no operator. Its versions begin where they tell that it was had so."""
    with DisableTorchFunction():
        made: torch.Tensor = function(args[0])
        if not is_inference(made):
            set_version((made,), (APART,))
        session.note(made)
    return made


def _set_data(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    """Handles `fake.data = other`: it shows another storage from now on, and nothing is written."""
    fake, value = args
    if isinstance(value, torch.Tensor):
        with DisableTorchFunction():
            if not is_meta(value):
                value = session.lift(value)
            session.note(fake)
    with DisableTorchFunction():
        lend(fake)
        result = function(fake, value)
        lend(fake)
    return result


def _set_real_data(session: Session, function: Any, args: Args) -> Any:
    """Handles `real.data = fake`: the real one gets its values, in memory of its own. A meta tensor becomes fake."""
    real, fake = args
    with DisableTorchFunction():
        if is_meta(real):
            session.note(real)
            result = function(real, fake)
            lend(real)
            return result
        mark = mark_of(fake)
        assert mark is not None, "it is fake"
        return function(real, _values(session, "data", fake, mark))


def _type(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    """Handles `type`: returns a name, or converts as `to` does."""
    dtype = args[1] if len(args) > 1 else options.get("dtype")
    if isinstance(dtype, torch.dtype):
        return _move(session, _tensor.to, mark, (args[0], dtype), {})
    if dtype is None:
        with DisableTorchFunction(), modes.put_aside():
            name = torch.empty(0, dtype=args[0].dtype).type()
        return name.replace("torch.", "torch.cuda.") if mark.device.type == "cuda" else name
    with DisableTorchFunctionSubclass():
        return function(*args, **options)


def _move(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    """Handles `to`, `cpu` and `cuda`. To the device that a tensor claims they make no copy."""
    name = function.__name__
    more = {one: value for one, value in options.items() if one == "memory_format"}
    dtype, copies = None, bool(options.get("copy"))
    if name == "to":
        if len(args) > 1 and isinstance(args[1], torch.Tensor):
            other = args[1]
            other_mark = mark_of(other)
            device, dtype = (other.device if other_mark is None else other_mark.device), other.dtype
        else:
            given = {one: value for one, value in options.items() if one not in ("copy", "memory_format")}
            device, dtype, _, _ = parse_to(*args[1:3], **given)
        place = 3 if len(args) > 1 and isinstance(args[1], (torch.dtype, torch.Tensor)) else 4  # behind non_blocking
        copies = copies or any(value is True for value in args[place : place + 1])
    else:
        index = args[1] if len(args) > 1 else options.get("device")
        device = torch.device(name) if index is None else torch.device(index)
    if device is None or with_index(device) == with_index(mark.device):
        if dtype is None and not copies and not more:
            return args[0]
        with DisableTorchFunctionSubclass():
            return torch.Tensor.to(args[0], dtype=dtype or args[0].dtype, copy=copies, **more)
    if device.type == "cuda" and not torch.cuda.is_available() and not session.fake_cuda:
        with DisableTorchFunctionSubclass():
            return function(*args, **options)  # as torch refuses it
    before, session.claim = session.claim, None if device.type == "meta" else device
    try:
        wanted = args[0].dtype if dtype is None else dtype
        return aten_to_copy(args[0], dtype=wanted, device=META if device.type == "cuda" else device, **more)
    finally:
        session.claim = before


_MOVES = {_tensor.to, _tensor.cuda}
# They say what a tensor is, also outside of a mode, and need none.
_PLAIN = {
    *(getattr(_tensor, name).__get__ for name in ("shape", "dtype", "requires_grad", "layout", "ndim", "is_leaf")),
    *(getattr(_tensor, name).__get__ for name in ("grad_fn", "grad", "is_sparse", "is_quantized")),
    version_of,
    *(getattr(_tensor, name) for name in ("size", "stride", "numel", "dim", "storage_offset", "element_size")),
    *(getattr(_tensor, name) for name in ("is_floating_point", "is_complex", "is_contiguous", "nelement", "__hash__")),
    *(_tensor.requires_grad.__set__, _tensor.requires_grad_),
}

# They say where a fake tensor would be, which its mark knows.
_OF_MARKS: dict[Any, Callable[[Mark], Any]] = {
    _tensor.device.__get__: lambda mark: with_index(mark.device),
    _tensor.is_cuda.__get__: lambda mark: mark.device.type == "cuda",
    _tensor.is_cpu.__get__: lambda mark: mark.device.type == "cpu",
    _tensor.is_meta.__get__: lambda mark: False,
    _tensor.get_device: lambda mark: -1 if mark.device.type == "cpu" else with_index(mark.device).index or 0,
}
_HANDLERS: dict[Any, Handler] = {
    _tensor.__repr__: _repr,
    _tensor.__format__: _format,
    _tensor.numpy: _read,
    _tensor.tolist: _read,
    _tensor.__array__: _read,
    _tensor.data_ptr: _no_pointer,
    _tensor.__dlpack__: _no_pointer,
    _tensor.__reduce_ex__: _no_pickle,
    _tensor.share_memory_: _no_pointer,
    _tensor.data.__get__: _get_data,
    _tensor.data.__set__: _set_data,
    _tensor.type: _type,
    _tensor.to: _move,
    _tensor.cpu: _move,
    _tensor.cuda: _move,
    _tensor.__deepcopy__: _deepcopied,
}


# --- The modes -------------------------------------------------------------------------------------------------------


_CPU = torch.device("cpu")
_OF_VALUES = {torch.tensor, torch.as_tensor, torch.asarray}
_LIFTING = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.Tensor.new_tensor}


class _Functions(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(self._session, func, args, kwargs or {})


class _Operators(DispatchMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(has_own_operators, types)):
            return NotImplemented  # it has a say in what it does; what it does with its parts comes here
        with DisableTorchFunction():
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
        with DisableTorchFunction():
            for one in session.living.seen() if brief else session.living.all():
                become_fake(one)


def _call(session: Session, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a torch function, as it is in a session."""
    function, args, options = _plainer(session, function, args, options)
    of_mark, handler = _OF_MARKS.get(function), _HANDLERS.get(function)
    claim, is_made = None, function in _LIFTING
    with DisableTorchFunction():
        for one in tensors_in(args if not options else (*args, *options.values())):
            mark = mark_of(one)
            if mark is not None:
                session.note(one)
                claim = claim or mark.device
        is_known = (of_mark or handler) is not None and bool(args) and isinstance(args[0], torch.Tensor)
        mark = mark_of(args[0]) if is_known else None
    if of_mark is not None and mark is not None:
        return of_mark(mark)
    if handler is not None and mark is not None:
        return handler(session, function, mark, args, options)
    if handler is _set_data and isinstance(args[1], torch.Tensor) and claim is not None:
        return _set_real_data(session, function, args)
    if handler is _deepcopied:
        return _deepcopy_real(session, function, args)
    if session.fake_cuda and function is not torch.device:
        if function in _MOVES and (function is torch.Tensor.cuda or _names_cuda(args[1:], options)):
            with DisableTorchFunction():
                fake = session.lift(args[0])
                mark = mark_of(fake)
            assert mark is not None, "it was just marked"
            return _move(session, function, mark, (fake, *args[1:]), options)
        by_default = default_device(function) if options.get("device") is None else None
        if by_default is not None:  # torch would add it behind this mode
            options = {**options, "device": by_default}
        instead = _CPU if function in _OF_VALUES else META  # on meta nobody would hear of what is made of values
        claim, args, options = _without_cuda(claim, args, options, instead)
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
        with DisableTorchFunction():
            mark = mark_of(args[0])
            if mark is not None:
                given = {name: one for name, one in options.items() if one is not None}
                return torch.tensor, args[1:], {"dtype": args[0].dtype, "device": mark.device, **given}
    is_of_tensor = function in _OF_VALUES and bool(args) and isinstance(args[0], torch.Tensor)
    if session.fake_cuda and is_of_tensor and _names_cuda((), options):
        named = {name: one for name, one in options.items() if name in ("device", "dtype")}
        return torch.Tensor.to, args[:1], named
    return function, args, options


def _without_cuda(
    claim: torch.device | None, args: tuple[Any, ...], options: dict[str, Any], instead: torch.device
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """Returns arguments without CUDA, which torch would look for, and the device that what is made claims."""
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


def _run_outside(function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a torch function on a fake tensor whose mode is over."""
    session = _thread.session  # there is one inside of a function that was called with its mode put aside
    of_mark, handler = _OF_MARKS.get(function), _HANDLERS.get(function)
    if of_mark is not None or (handler is not None and session is not None):
        with DisableTorchFunction():
            mark = mark_of(args[0])
        if of_mark is not None and mark is not None:
            return of_mark(mark)
        if handler is not None and session is not None and mark is not None:
            return handler(session, function, mark, args, options)
    if session is not None or function in _PLAIN:
        with DisableTorchFunctionSubclass():
            result = function(*args, **options)
        return result if session is None else session.living.noted(result)
    if is_compiling():
        raise UnsupportedValueError(
            "torch.compile can't trace tensors that are fake or deferred: materialize the module first"
        )
    recorder: Recorder | None = None
    with DisableTorchFunction():
        for one in tensors_in((*args, *options.values())):
            mark = mark_of(one)
            if mark is not None and mark.history is not None:
                recorder = mark.history.recorder()
                break
    with in_session(Session(recorder, fake_cuda=recorder is None), brief=True) as session:
        return session.living.noted(function(*args, **options))


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
    """Returns whether a tensor was made in `fake_mode`, or by `deferred_init`, and has no memory.

    Args:
        tensor: any tensor.
    """
    with DisableTorchFunction():
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
    with DisableTorchFunction(), modes.put_aside():
        if mark_of(_checked("meta_like", fake)) is None:
            raise ValueError(f"a fake tensor is needed, and this is {an(type(fake))} on {fake.device}")
        return meta_twin(fake).requires_grad_(requires_grad(fake))


def _checked(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} takes a tensor, and not {an(type(tensor))}")
    return tensor


# --- The class of a fake tensor --------------------------------------------------------------------------------------
# The class of a fake tensor outside of its mode: it says by itself what it is, and where.
#
# It is a class of its own for each class of tensors: an instance of that one, under the same name. A tensor becomes of
# it at the end of its mode, as lazy parameters become others: by assignment to `__class__`.


class FakeTensor:
    """Base of the classes of fake tensors. A torch function on an instance runs in a mode of its own.

    Attributes:
        original: the class that the tensor had.
    """

    __slots__ = ()
    original: type[torch.Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_outside(function, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = _run_outside(torch.Tensor.__repr__, (type(self),), (self,), {})
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _run_outside(self.original.__deepcopy__, (type(self),), (self, memo), {})

    def set_(self, *args: Any, **options: Any) -> Any:
        return _run_outside(torch.Tensor.set_, (type(self),), (self, *args), options)  # torch asks nobody

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _run_outside(torch.Tensor.__reduce_ex__, (type(self),), (self, protocol), {})


def become_fake(tensor: torch.Tensor) -> None:
    """Gives the tensor the class that says that it is fake."""
    cls = type(tensor)
    if not issubclass(cls, FakeTensor):
        tensor.__class__ = _fake_class(cls)


def original_class(cls: type[Any]) -> type[torch.Tensor]:
    return cls.original if issubclass(cls, FakeTensor) else cls


@functools.cache
def _fake_class(cls: Any) -> Any:
    def new(_: Any, *args: Any, **options: Any) -> Any:
        return cls(*args, **options)  # `type(parameter)(values)`, as loaders of weights do, makes what isn't fake

    names = {"original": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    names["__new__"] = new
    if hasattr(cls, "cls_to_become"):  # of a lazy one that gets its shape outside of the mode
        names["cls_to_become"] = _fake_class(cls.cls_to_become)
    return type(cls)(cls.__name__, (FakeTensor, cls), names)


# --- fake_like -------------------------------------------------------------------------------------------------------


@modes.uncompiled
def fake_like(value: Any) -> Any:
    """Returns the same containers with fake tensors, of the same shapes, dtypes and devices. No bytes are read.

    Args:
        value: a view, a tensor, a TensorDict, or dicts, lists and tuples of these, of any depth. Other objects stay.

    Returns:
        New containers. A tensor that occurs twice in `value` is one fake tensor.

    Example:
        >>> import torch
        >>> from memstore.fake import fake_like
        >>> fake_like({"w": torch.zeros(2, 3)})
        {'w': tensor(..., size=(2, 3), fake=True)}
    """
    structure.check_nesting(value)
    with modes.put_aside():
        return _like(value, {})


def _like(value: Any, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = _fake(value)
        return seen[id(value)]
    if hasattr(value, "apply") and hasattr(value, "batch_size"):  # a TensorDict, or a tensorclass
        return value.apply(lambda one: _like(one, seen), inplace=False)
    if isinstance(value, Mapping):
        names: list[Any] = list(value)
        found = {name: _like(value[name], seen) for name in names}
        if type(value) is dict:
            return found
        if not isinstance(value, dict):
            return type(value)(found)  # type: ignore[call-arg]
        made: Any = copy.copy(value)  # with what else it has: a defaultdict its factory
        made.update(found)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_like(one, seen) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_like(one, seen) for one in value)
    return value


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction(), torch.no_grad():
        made: torch.Tensor = meta_twin(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        mark = mark_of(tensor)
        set_mark(made, Mark(tensor.device if mark is None else mark.device, None))
        become_fake(made)
    return made
