"""LazyTensor: a tensor that shows a box of a stored leaf and reads it later. `leaf.py` makes StoredTensor of it.

Over the bytes of a stored leaf lie two storages. The one here may be read and not written: torch refuses a pointer to
write by, in C. A lazy tensor is a subclass instance of `shown`, a tensor over that storage. So what looks for its
memory past the operators finds the values, or an error. To slice `shown` reads nothing. The other storage is that of
`LeafBytes.tensor`. Operators read from it exactly the bytes that they look at, and nothing is copied first. What they
return has memory of its own.

A lazy tensor whose values go to another device when they are read has no memory there: it is a wrapper without any. So
is that of a leaf in boxes, and what it shows is a tensor without memory too. It says that it is on its device, but is
of the kind of meta tensors: a plain tensor that were given it as its `.data` would read at the address 0.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from memstore.errors import ReadOnlyError
from memstore.structure import traits
from memstore.view.stored_leaf import StoredLeaf

Lazy = TypeVar("Lazy", bound="LazyTensor")

make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
_make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
_META = torch.device("meta")
guard: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr


class LazyTensor(torch.Tensor):
    """What the modules of this package know of a lazy leaf. Not for users.

    Attributes:
        shown: the elements, over the guarded storage, or without memory.
        stored: what reads them.
    """

    shown: torch.Tensor
    stored: StoredLeaf


def wrap(cls: type[Lazy], shown: torch.Tensor, stored: StoredLeaf) -> Lazy:
    """The lazy tensor that shows `shown`, which lies in the guarded storage of its leaf, if it has any."""
    if stored.wrapped is None:
        leaf = make_subclass(cls, shown)  # in inference mode too it can be used in training
    else:
        with torch.inference_mode(False):
            shape, strides, offset = shown.shape, shown.stride(), shown.storage_offset()
            is_apart = shown.is_meta
            device = _META if is_apart else stored.wrapped
            layout, more = torch.strided, {"dispatch_device": is_apart}
            leaf = _make_wrapper(cls, shape, strides, offset, None, shown.dtype, layout, device, **more)
        guard(leaf)
    leaf.shown, leaf.stored = shown, stored
    return leaf


def read(leaf: LazyTensor) -> torch.Tensor:
    """The leaf's values, on their device. Not to be written, nor to be given to a user."""
    return leaf.stored.read(leaf.shown)


def kind_of(leaf: LazyTensor) -> traits.Traits:
    kind = traits.traits_of(leaf)
    is_parameter = getattr(leaf, "_is_param", False)
    return kind._replace(
        kind=traits.PARAMETER if is_parameter else kind.kind, requires_grad=leaf.requires_grad and leaf.is_leaf
    )


def with_kind(leaf: Lazy, kind: traits.Traits) -> Lazy:
    """`leaf`, which nobody else has yet, as a Parameter (by the mark that isinstance looks at) or Buffer."""
    if kind.kind == traits.PARAMETER:
        leaf._is_param = True  # type: ignore[attr-defined]
        leaf.requires_grad_(kind.requires_grad)
    else:
        traits.with_traits(leaf, kind)
    return leaf


def name_of(leaf: LazyTensor) -> str:
    return f"a lazy leaf of {leaf.stored.source.key!r}"


def refusal(leaf: LazyTensor, what: str) -> ReadOnlyError:
    return ReadOnlyError(
        f"{what} would write into {name_of(leaf)}, which a view only reads: take a copy with clone(), and "
        "write into that",
        key=leaf.stored.source.key,
    )
