"""The facts of a value's tensors (dtypes, shapes, strides, traits), each taken by one map over C functions.

If any fact can't be taken so (sparse, nested, quantized, meta tensors), the value is walked again, carefully: tensor by
tensor, for special forms and for errors that name the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import Traits, modes, traits
from memstore.structure.tree import Tree
from memstore.structure.walk.walk import Walk

_dtype = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_stride = torch.Tensor.stride
_data_ptr = torch.Tensor.data_ptr
_is_neg = torch.Tensor.is_neg
_WalkT = TypeVar("_WalkT", bound=Walk)
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


class Facts(NamedTuple):
    """The facts of all tensors of a value, in order. Hashable."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    traits: tuple[Traits, ...] | None  # None: all are plain
    resolve: tuple[bool, ...] | None  # conj or neg bit set: the bytes in memory aren't the values. None: of none


def take_apart(value: Any, walk_with: Callable[[bool], _WalkT]) -> tuple[Tree, _WalkT, Facts, list[int]]:
    """Walks over a value: in the fast way, and only if that fails carefully.

    Returns: its tree, the walk, the facts of its tensors, and their addresses. Raises RefusedError.
    """
    hindered = bool(_dispatch_modes()) or _transform() is not None
    found = None if hindered else _try(value, walk_with(False))
    if found is not None:
        return found
    with modes.put_aside():
        found = (_try(value, walk_with(False)) if hindered else None) or _try(value, walk_with(True))
    if found is None:
        raise RefusedError("a tensor that has no plain memory")
    return found


def _try(value: Any, walk: _WalkT) -> tuple[Tree, _WalkT, Facts, list[int]] | None:
    """None if the value has to be walked carefully."""
    try:
        tree = walk.visit(value)
        facts = _facts(walk.tensors)
        addresses = list(map(_data_ptr, walk.tensors))
    except RecursionError:
        raise RefusedError("more levels than what is left of Python's stack here can take") from None
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        if walk.careful:
            raise RefusedError(f"a tensor that has no plain memory ({error})") from error
        return None
    return None if facts is None else (tree, walk, facts, addresses)


def _facts(tensors: Sequence[torch.Tensor]) -> Facts | None:
    """The facts of all tensors; None, or an error by torch, if one of them has to be looked at by itself."""
    dtypes = tuple(map(_dtype, tensors))
    kinds = set(dtypes)
    if not kinds.isdisjoint(traits.QUANTIZED):
        return None
    found: tuple[Traits, ...] | None = None
    if (
        not all(map(_is_cpu, tensors))
        or any(map(_requires_grad, tensors))
        or any([getattr(tensor, "_is_buffer", False) for tensor in tensors])  # noqa: C419 - a list is faster
        or torch.nn.Parameter in set(map(type, tensors))
    ):
        found = tuple(map(traits.traits_of, tensors))
        if any(trait.device == "meta" for trait in found):
            return None
    resolve: tuple[bool, ...] | None = None
    if any(map(_is_neg, tensors)) or (not kinds.isdisjoint(_COMPLEX) and any(t.is_conj() for t in tensors)):
        resolve = tuple(tensor.is_neg() or tensor.is_conj() for tensor in tensors)
    return Facts(dtypes, tuple(map(_shape, tensors)), tuple(map(_stride, tensors)), found, resolve)
