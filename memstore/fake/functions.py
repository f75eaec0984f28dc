"""What torch functions and attributes say of a fake tensor: those that operators don't see, or see too late.

Each handler gets the session, the function, and its arguments; the first one is a fake tensor, with its mark.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from memstore import _modes as modes
from memstore.errors import UnsupportedValueError
from memstore.fake.operators import lend, with_index
from memstore.fake.session import Session
from memstore.fake.tensors import (
    APART,
    META,
    Mark,
    TensorRef,
    is_inference,
    is_leaf,
    is_meta,
    mark_of,
    original_class,
    over_storage,
    ref_of,
    requires_grad,
    storage_bytes,
)

# --- Text ------------------------------------------------------------------------------------------------------------
# Fake tensors as text, in the form that torchdistX has.


def text_of(tensor: torch.Tensor, mark: Mark) -> str:
    """Renders a tensor as `tensor(..., size=(2, 3), dtype=torch.float16, device=cuda:0, fake=True)`, less defaults."""
    ref = ref_of(tensor, mark)
    parts = ["...", f"size={ref.size}"]
    if ref.dtype != torch.get_default_dtype():
        parts.append(f"dtype={ref.dtype}")
    if mark.device.type != "cpu":
        parts.append(f"device={with_index(mark.device)}")
    if requires_grad(tensor):
        parts.append("requires_grad=True")
    return f"tensor({', '.join(parts)}, fake=True)"


# --- Copies ----------------------------------------------------------------------------------------------------------
# copy.deepcopy of tensors inside of a session, also of one that lasts for this copy alone.
#
# torch copies a storage by tensors of its own that show it. Inside of the modes these would be fake, and the copy of a
# real storage would stay what its memory was before. So what is real is copied with the modes put aside.


_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
_OURS = "_memstore_"  # what deferred_init has noted of a tensor: of its copy it isn't true


def deepcopied(session: Session, function: Any, mark: Mark, args: Any, options: dict[str, Any]) -> Any:
    """Copies the storage, which copies its past too. Tensors that share a storage share the copy."""
    fake, memo = args
    if id(fake) in memo:
        return memo[id(fake)]
    with torch._C.DisableTorchFunction():
        made = memo[id(fake)] = _deepcopy(fake, mark, memo)
        session.note(made)
    with session.functions(session):  # attributes may be tensors too
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
        return torch.Tensor._make_subclass(cls, made, requires_grad(fake))
    return made.requires_grad_() if requires_grad(fake) else made


def deepcopy_real(session: Session, function: Any, args: Any) -> Any:
    """Copies a tensor that isn't fake. One that wraps others is copied by operators, which the modes are to see."""
    real, memo = args
    if type(real).__torch_dispatch__ is not _NO_DISPATCH:
        return function(real, memo)
    with session.functions(session):
        copy.deepcopy(real.__dict__, memo)  # among its attributes may be fakes: torch finds their copies in the memo
    with modes.put_aside(entirely=True):
        return function(real, memo)


# --- Handlers --------------------------------------------------------------------------------------------------------


Args = Any  # a tuple: strict types would ask for its length at each place
Handler = Callable[[Session, Any, Mark, Args, dict[str, Any]], Any]
_tensor: Any = torch.Tensor
_nn: Any = torch._C._nn  # type: ignore[attr-defined]
_set_version: Any = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]


def _device(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    return with_index(mark.device)


def _is_cuda(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> bool:
    return mark.device.type == "cuda"


def _is_cpu(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> bool:
    return mark.device.type == "cpu"


def _is_meta(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> bool:
    return False


def _get_device(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> int:
    return -1 if mark.device.type == "cpu" else with_index(mark.device).index or 0


def _repr(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> str:
    with torch._C.DisableTorchFunction():
        return text_of(args[0], mark)


def _format(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> str:
    return format(repr(args[0]), args[1])


def _read(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    """Handles `numpy()` and `tolist()`: on values, if there are any."""
    with torch._C.DisableTorchFunction():
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
    with torch._C.DisableTorchFunction():
        made: torch.Tensor = function(args[0])
        if not is_inference(made):
            _set_version((made,), (APART,))
        session.note(made)
    return made


def set_data(session: Session, function: Any, mark: Mark, args: Args, options: dict[str, Any]) -> Any:
    """Handles `fake.data = other`: it shows another storage from now on, and nothing is written."""
    fake, value = args
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            if not is_meta(value):
                value = session.lift(value)
            session.note(fake)
    with torch._C.DisableTorchFunction():
        lend(fake)
        result = function(fake, value)
        lend(fake)
    return result


def set_real_data(session: Session, function: Any, args: Args) -> Any:
    """Handles `real.data = fake`: the real one gets its values, in memory of its own. A meta tensor becomes fake."""
    real, fake = args
    with torch._C.DisableTorchFunction():
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
        with torch._C.DisableTorchFunction(), modes.put_aside():
            name = torch.empty(0, dtype=args[0].dtype).type()
        return name.replace("torch.", "torch.cuda.") if mark.device.type == "cuda" else name
    with torch._C.DisableTorchFunctionSubclass():
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
            device, dtype, _, _ = _nn._parse_to(*args[1:3], **given)
        place = 3 if len(args) > 1 and isinstance(args[1], (torch.dtype, torch.Tensor)) else 4  # behind non_blocking
        copies = copies or any(value is True for value in args[place : place + 1])
    else:
        index = args[1] if len(args) > 1 else options.get("device")
        device = torch.device(name) if index is None else torch.device(index)
    if device is None or with_index(device) == with_index(mark.device):
        if dtype is None and not copies and not more:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.to(args[0], dtype=dtype or args[0].dtype, copy=copies, **more)
    if device.type == "cuda" and not torch.cuda.is_available() and not session.fake_cuda:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **options)  # as torch refuses it
    before, session.claim = session.claim, None if device.type == "meta" else device
    try:
        wanted = args[0].dtype if dtype is None else dtype
        return torch.ops.aten._to_copy(args[0], dtype=wanted, device=META if device.type == "cuda" else device, **more)
    finally:
        session.claim = before


MOVES = {_tensor.to, _tensor.cuda}
# They say what a tensor is, also outside of a mode, and need none.
PLAIN = {
    *(getattr(_tensor, name).__get__ for name in ("shape", "dtype", "requires_grad", "layout", "ndim", "is_leaf")),
    *(getattr(_tensor, name).__get__ for name in ("grad_fn", "_version", "grad", "is_sparse", "is_quantized")),
    *(getattr(_tensor, name) for name in ("size", "stride", "numel", "dim", "storage_offset", "element_size")),
    *(getattr(_tensor, name) for name in ("is_floating_point", "is_complex", "is_contiguous", "nelement", "__hash__")),
    *(_tensor.requires_grad.__set__, _tensor.requires_grad_),
}

DEVICES: dict[Any, Handler] = {  # they need no session
    _tensor.device.__get__: _device,
    _tensor.is_cuda.__get__: _is_cuda,
    _tensor.is_cpu.__get__: _is_cpu,
    _tensor.is_meta.__get__: _is_meta,
    _tensor.get_device: _get_device,
}
HANDLERS: dict[Any, Handler] = {
    **DEVICES,
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
    _tensor.data.__set__: set_data,
    _tensor.type: _type,
    _tensor.to: _move,
    _tensor.cpu: _move,
    _tensor.cuda: _move,
    _tensor.__deepcopy__: deepcopied,
}
