"""Tensors of classes that are made of other tensors and can name them, like torchao's quantized weights.

    ["wrapper", class, kind and requires_grad, names, entries, tree of [context, shape, strides]]

Such a class has `__tensor_flatten__`, which gives the names of the tensors inside and a context, and
`__tensor_unflatten__`, which makes it of them: torch's protocol for its compiler. These two run, of a class that is
imported, a subclass of torch.Tensor, and has both; nothing else that a stored name could choose.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memstore.engine import Path
from memstore.errors import MemstoreError, UnsupportedValueError
from memstore.structure.checks import MalformedError, require, sizes, unpack
from memstore.structure.objects import class_name, defines, dotted, find_class, short
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import traits, why_no_memory
from memstore.structure.tree import Node, Parts, Reader, Tree, register
from memstore.structure.walk import Walk, flattener


def is_wrapper(kind: type) -> bool:
    """Whether the class has the protocol; torch.Tensor itself has not."""
    return (
        issubclass(kind, torch.Tensor) and defines(kind, "__tensor_flatten__") and defines(kind, "__tensor_unflatten__")
    )


def flatten_wrapper(value: Any, walk: Walk) -> Tree:
    kind = type(value)
    if walk.in_place:
        raise RefusedError(f"a {kind.__qualname__} can't be filled in place; get it without out=")
    try:
        name = class_name(kind)
    except RefusedError:
        if walk.allow_pickle:
            return walk.object(value)
        raise
    try:
        names, context = value.__tensor_flatten__()
        inner = [getattr(value, one) for one in names]
    except Exception as error:  # the class's own code
        raise RefusedError(f"a {kind.__qualname__} whose __tensor_flatten__ fails: {error}") from error
    if not names or not all(isinstance(one, torch.Tensor) for one in inner):
        raise RefusedError(f"a {kind.__qualname__} whose __tensor_flatten__ names no tensors")
    found = traits.traits_of(value)
    is_parameter = getattr(value, "_is_param", False)
    flags = traits.to_flags(traits.PARAMETER if is_parameter else found.kind, found.requires_grad)
    trees = walk.entries(value, names, inner)
    about = walk.visit([context, list(value.shape), list(value.stride())])
    return ("wrapper", name, flags, walk.keys(names), trees, about)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def pair_parts(target: torch.Tensor, source: torch.Tensor) -> Pairs | None:
    """The plain tensors of a tensor that wraps others, each with the one of `source` that is copied into it.

    None if the two aren't made alike. What isn't in the parts (block sizes, dtypes) stands in the context, which has to
    be equal.
    """
    pairs: Pairs = []
    return pairs if _is_wrapper(type(target)) and _pair(target, source, pairs) else None


def _pair(target: Any, source: Any, pairs: Pairs) -> bool:
    kind = type(target)
    if not _is_wrapper(kind):
        pairs.append((target, source))
        alike = not _is_wrapper(type(source)) and target.shape == source.shape and target.dtype == source.dtype
        return alike and why_no_memory(target) is None
    if type(source) is not kind:
        return False
    (names, context), (others, other) = target.__tensor_flatten__(), source.__tensor_flatten__()
    try:
        is_equal = names == others and bool(context == other)
    except Exception:  # of what the class has for a context
        return False
    return is_equal and all(_pair(getattr(target, one), getattr(source, one), pairs) for one in names)


def fill_parts(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copies a tensor into one that is made alike, part by part. False, with nothing copied, where it isn't.

    The caller has disabled autograd.
    """
    pairs = pair_parts(target, source)
    for into, part in pairs or ():
        into.copy_(part)
    return pairs is not None


def clone_parts(tensor: Any) -> Any:
    """A copy of a tensor that wraps others, made by its class of copies of them; of any other tensor its clone."""
    if not _is_wrapper(type(tensor)):
        return tensor.detach().clone()
    names, context = tensor.__tensor_flatten__()
    inner = {name: clone_parts(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def _is_wrapper(kind: type) -> bool:
    return flattener(kind) is flatten_wrapper


@register
class WrapperNode(Node):
    __slots__ = ("about", "entries", "kind_of_tensor", "name", "names", "requires_grad")
    kind = "wrapper"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        name, flags, names, trees, about = unpack(payload, str, int, list, list, (int, list))
        require(len(names) == len(trees) > 0, "malformed wrapped tensors")
        require(all(type(one) is str for one in names) and len(set(names)) == len(names), "malformed names of tensors")
        node = cls()
        node.name, node.names = name, tuple(names)
        node.kind_of_tensor, node.requires_grad = traits.read_flags(flags)
        first = reader.tensors
        node.entries = reader.entries(trees)
        reader.fixed.update(
            range(first, reader.tensors)
        )  # only the class knows what they mean together, so dtype= leaves them
        node.about = reader.node(about)
        return node

    def build(self, parts: Parts) -> Any:
        about = self.about.build(parts)
        require(type(about) is list and len(about) == 3, "malformed wrapped tensors")
        shape, stride = sizes(about[1]), sizes(about[2])
        require(len(shape) == len(stride), "malformed wrapped tensors")
        inner = dict(zip(self.names, self.entries.build(parts), strict=True))
        require(all(isinstance(tensor, torch.Tensor) for tensor in inner.values()), "malformed wrapped tensors")
        kind = find_class(self.name, _is_wrapper, "a subclass of torch.Tensor that has __tensor_unflatten__")
        try:
            made = kind.__tensor_unflatten__(inner, about[0], torch.Size(shape), stride)
        except (MemstoreError, MalformedError):
            raise
        except Exception as error:  # the class's own code, which may have changed
            raise self._refusal(f"its __tensor_unflatten__ fails: {error}") from error
        if type(made) is not kind or tuple(made.shape) != shape:
            raise self._refusal(f"its __tensor_unflatten__ makes a {type(made).__qualname__} of another shape or class")
        return self._finished(made)

    def _finished(self, made: Any) -> Any:
        if made.requires_grad != self.requires_grad:
            made = made.detach()
            if self.requires_grad:
                try:
                    made.requires_grad_()
                except RuntimeError as error:  # of integers
                    raise MalformedError(f"a gradient that can't be: {error}") from None
        if self.kind_of_tensor == traits.PARAMETER:
            made._is_param = True  # what isinstance(made, Parameter) looks at
            return made
        return traits.with_traits(made, traits.Traits(self.kind_of_tensor, False, None))

    def _refusal(self, why: str) -> UnsupportedValueError:
        return UnsupportedValueError(
            f"the stored value has a {dotted(self.name)}, which can't be made again here: {why}"
        )

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield from self.entries.named(self.names)
        yield ("context",), self.about

    def describe(self) -> str:
        return short(self.name)
