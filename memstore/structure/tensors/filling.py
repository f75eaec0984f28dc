"""Whether a tensor of the caller's may be filled, and how. Every call that writes into such tensors asks here first.

A call looks at all of its targets before it writes to the first: `why_not_filled` says what is wrong with one. Then
bytes go straight to the memory of those that `takes_bytes`; `copy_into` writes all others, as torch lets them be
written.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.autograd import forward_ad

from memstore import modes
from memstore.errors import ReadOnlyError
from memstore.structure.tensors import traits
from memstore.structure.tensors.memory import FREED, why_no_memory
from memstore.wording import an

GONE = "a tensor whose storage was freed or cut: its bytes aren't there"
EXPANDED = "an expanded tensor, several of whose elements are one in memory: it can't be filled"
_LAZY = "a lazy leaf of a view, whose version never changes"
_META = "a meta tensor, without memory: give it some first, as module.to_empty(device=...) does"

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_WITHOUT_MEMORY = {
    "FakeTensor": "a fake tensor, without memory: give a real one, which materialize_module makes of a deferred one",
    "FunctionalTensor": "a tensor inside a transform of torch.func, which has no memory of its own",
    "UninitializedTensorMixin": "a parameter or buffer that is not initialized yet, and has no memory",
}


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Why values can't be written to a tensor; None if they can. Shape and dtype are not looked at.

    Takes 1 µs for a contiguous tensor on the CPU. Of a DTensor give the local tensor.
    """
    if type(tensor) not in _PLAIN:
        reason = _why_not_of_class(type(tensor)) or (_LAZY if _refuses_pointers(tensor) else None)
        if reason is not None:
            return reason
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        return f"a {kind} tensor, which can't be filled in place: give a plain one"
    if tensor.is_meta:
        return _META
    reason = why_no_memory(tensor)
    if reason is not None:
        return GONE if reason == FREED else f"{an(type(tensor))} that has no memory of its own: give a plain one"
    if not tensor.is_contiguous() and traits.overlaps_itself(tensor.shape, tensor.stride()):
        return EXPANDED
    return None


def _why_not_of_class(kind: type) -> str | None:
    for base in kind.__mro__:
        reason = _WITHOUT_MEMORY.get(base.__name__)
        if reason is not None and base.__module__.startswith(("torch.", "memstore.fake.")):
            return reason
    if hasattr(kind, "__tensor_flatten__"):
        return f"a {kind.__qualname__}, which is made of other tensors: it can't be filled in place"
    return None


def _refuses_pointers(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except ReadOnlyError:
        return True
    except RuntimeError:
        return False
    return False


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor that may be filled are just the bytes in its memory, which this process writes."""
    return tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj()


def copy_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """`target.copy_(source)` for a target that may be filled, whatever its kind."""
    copy_all([target], [source], one_by_one=True, non_blocking=non_blocking)


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, one_by_one: bool, non_blocking: bool
) -> None:
    """Every target is written as torch lets it be: inference tensors in inference mode, Parameters without autograd.

    Args:
        one_by_one: some have a conj or neg bit, or other dtypes or devices than their sources.
    """
    groups: dict[bool, list[int]] = {}
    for i, target in enumerate(targets):
        groups.setdefault(target.is_inference(), []).append(i)
    one_by_one = one_by_one or forward_ad._current_level >= 0
    for is_inference, chosen in groups.items():
        aside = modes.put_aside(entirely=True) if is_inference else nullcontext()
        with aside, torch.inference_mode(is_inference), torch.no_grad():  # inference_mode(False) would turn autograd on
            into = [traits.copyable(targets[i]) for i in chosen]
            out_of = [traits.copyable(sources[i]) for i in chosen]
            if one_by_one:  # the other has no kernel for some of these
                for target, source in zip(into, out_of, strict=True):
                    target.copy_(source, non_blocking=non_blocking)
            else:
                # a third of the time of 300 calls
                torch._foreach_copy_(into, out_of, non_blocking=non_blocking)
