"""Lazy tensors, which show a box of a stored leaf and read it later, and how operators of torch run on them.

`run` is what torch calls for an operator. `rule_of` says by its schema what it does with its tensors; `pick` reads the
points of a leaf in boxes that an operator of indices means; `results` makes lazy tensors of views. `views.py` makes
StoredTensor of all this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from memstore._compat import (
    PARAMETER_MARK,
    aten_unsafe_index,
    call_of,
    make_subclass,
    make_wrapper_subclass,
    schema_of,
    throw_on_mutable_data_ptr,
)
from memstore.errors import ReadOnlyError
from memstore.structure import modes, over, to_device, traits
from memstore.view.leaf_boxes import LeafBoxes, Points
from memstore.view.source import LeafBytes, StoredLeaf, nbytes_of

# --- LazyTensor ------------------------------------------------------------------------------------------------------
# LazyTensor: a tensor that shows a box of a stored leaf and reads it later. `views.py` makes StoredTensor of it.
#
# Over the bytes of a stored leaf lie two storages. The one here may be read and not written: torch refuses a pointer to
# write by, in C. A lazy tensor is a subclass instance of `shown`, a tensor over that storage. So what looks for its
# memory past the operators finds the values, or an error. To slice `shown` reads nothing. The other storage is that of
# `LeafBytes.tensor`. Operators read from it exactly the bytes that they look at, and nothing is copied first. What they
# return has memory of its own.
#
# A lazy tensor whose values go to another device when they are read has no memory there: it is a wrapper without any.
# So is that of a leaf in boxes, and what it shows is a tensor without memory too. It says that it is on its device, but
# is of the kind of meta tensors: a plain tensor that were given it as its `.data` would read at the address 0.


Lazy = TypeVar("Lazy", bound="LazyTensor")

_META = torch.device("meta")


class LazyTensor(torch.Tensor):
    """Lazy leaf, as the modules of this package know it. It is not for users.

    Attributes:
        shown: the elements, over the guarded storage, or without memory.
        stored: what reads them.
    """

    shown: torch.Tensor
    stored: StoredLeaf


def wrap(cls: type[Lazy], shown: torch.Tensor, stored: StoredLeaf) -> Lazy:
    """Makes the lazy tensor that shows `shown`, which lies in the guarded storage of its leaf, if it has any."""
    if stored.wrapped is None:
        leaf = make_subclass(cls, shown)  # in inference mode too it can be used in training
    else:
        with torch.inference_mode(False):
            shape, strides, offset = shown.shape, shown.stride(), shown.storage_offset()
            is_apart = shown.is_meta
            device = _META if is_apart else stored.wrapped
            layout, more = torch.strided, {"dispatch_device": is_apart}
            leaf = make_wrapper_subclass(cls, shape, strides, offset, None, shown.dtype, layout, device, **more)
        throw_on_mutable_data_ptr(leaf)
    leaf.shown, leaf.stored = shown, stored
    return leaf


def read(leaf: LazyTensor) -> torch.Tensor:
    """Returns the leaf's values, on their device. They are not to be written, nor to be given to a user."""
    return leaf.stored.read(leaf.shown)


def kind_of(leaf: LazyTensor) -> traits.Traits:
    """Returns what a leaf is beside its bytes: Parameter, Buffer or neither; its gradient, and its device."""
    kind = traits.traits_of(leaf)
    is_parameter = getattr(leaf, PARAMETER_MARK, False)
    return kind._replace(
        kind=traits.PARAMETER if is_parameter else kind.kind, requires_grad=leaf.requires_grad and leaf.is_leaf
    )


def with_kind(leaf: Lazy, kind: traits.Traits) -> Lazy:
    """Makes `leaf`, which nobody else has yet, a Parameter (by the mark that isinstance looks at) or a Buffer."""
    if kind.kind == traits.PARAMETER:
        setattr(leaf, PARAMETER_MARK, True)
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


# --- Operators on lazy tensors, and what becomes of their results ----------------------------------------------------


_STRIDED = torch.strided
_DEVICE: Any = torch.ops.prim.device.default
_COPY: Any = torch.ops.aten.copy_.default
_getitem: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
_FLAT = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype})


@modes.uncompiled
def run(
    cls: type[LazyTensor], operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Runs an operator with lazy leaves among its arguments."""
    if operator is _DEVICE:
        return args[0].stored.wrapped
    rule = rule_of(operator)
    if rule.written:
        _refuse_writes(operator, rule, args, kwargs or {})
    if not rule.reads_all and (not rule.reads_rows or isinstance(args[0], LazyTensor)):
        return _run_lazily(operator, rule, args, kwargs or {})
    if len(args) == 1 and not kwargs and type(args[0]) is cls:  # as below: 1 us less
        real = args[0].stored.read(args[0].shown)
        made = rule.call(real)
        if type(made) is torch.Tensor and made.layout is _STRIDED:
            return made.clone() if made.untyped_storage() is real.untyped_storage() else made
        return _apart(made, [real])
    if operator is _COPY and args[0].is_meta:  # of a loader that counts what it would copy: no byte is needed
        both: Any = args
        return operator(both[0], torch.empty(both[1].shape, dtype=both[1].dtype, device=_META), *both[2:])
    return _run_on_values(operator, rule, args, kwargs or {})


def _run_on_values(operator: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reals: list[torch.Tensor] = []

    def use(leaf: LazyTensor) -> torch.Tensor:
        real = leaf.stored.read(leaf.shown)
        reals.append(real)
        return real.clone() if rule.keeps else real

    arguments: list[Any] = []
    for one in args:
        is_leaf = isinstance(one, LazyTensor)
        arguments.append(use(one) if is_leaf else one if type(one) in _FLAT else _replace(one, use))
    made = operator(*arguments, **_replace(kwargs, use)) if kwargs else operator(*arguments)
    return _apart(made, reals)


def _refuse_writes(operator: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for place, name in rule.written:
        found: list[LazyTensor] = []
        _replace(args[place] if place < len(args) else kwargs.get(name), lambda leaf, found=found: found.append(leaf))
        if found:
            raise refusal(found[0], f"{operator} (its argument {name!r})")


def _run_lazily(operator: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that needs only the shapes of its arguments, or some elements of the first."""
    if rule.reads_rows:
        leaf = args[0]
        rest = [_on_cpu(_replace(argument, read)) for argument in args[1:]]
        if isinstance(leaf.stored, LeafBoxes):
            return _on_place(pick(operator, leaf.stored, leaf.shown, rest, _replace(kwargs, read)), leaf)
        real = leaf.stored.tensor(leaf.shown)
        if leaf.stored.source.absent is not None:
            leaf.stored.source.bring(real)
        return results(operator(real, *rest, **_replace(kwargs, read)), leaf, real)
    used: list[LazyTensor] = []

    def use(leaf: LazyTensor) -> torch.Tensor:
        used.append(leaf)
        return leaf.shown

    arguments, options = _replace(args, use), _replace(kwargs, use)
    if rule.reads_nothing:
        if used and isinstance(used[0].stored, LeafBoxes):
            options = {"device": used[0].stored.wrapped} | {key: one for key, one in options.items() if one is not None}
        made = operator(*arguments, **options)
        return made if kwargs.get("device") or not used else _on_place(made, used[0])
    if rule.moves and any(leaf.stored.wrapped is not None for leaf in used):
        return _run_on_values(operator, rule, args, kwargs)
    made = operator(*arguments, **options)
    if any(isinstance(leaf.stored, LeafBoxes) for leaf in used) and not _are_views(made, used[0].shown):
        return _resolved(_run_on_values(operator, rule, args, kwargs))
    return results(made, used[0], used[0].shown)


def _are_views(made: Any, shown: torch.Tensor) -> bool:
    """Returns whether all results are plain views of a leaf that has no memory to make anything else of."""
    if isinstance(made, (tuple, list)):
        return all(_are_views(one, shown) for one in made)
    if not isinstance(made, torch.Tensor):
        return True
    return made.untyped_storage() is shown.untyped_storage() and not made.is_conj() and not made.is_neg()


def _resolved(made: Any) -> Any:
    if isinstance(made, (tuple, list)):
        return type(made)(map(_resolved, made))
    return made.resolve_conj().resolve_neg() if isinstance(made, torch.Tensor) else made


def _replace(value: Any, change: Callable[[LazyTensor], Any]) -> Any:
    """Returns `value` with every lazy leaf in it changed."""
    if isinstance(value, LazyTensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_replace(one, change) for one in value)
    if kind is dict:
        return {name: _replace(one, change) for name, one in value.items()}
    return value


def results(made: Any, leaf: LazyTensor, source: torch.Tensor) -> Any:
    """Returns an operator's results for `source`, a leaf's tensor: lazy if they lie in its memory, else as they are."""
    if isinstance(made, (tuple, list)):
        return type(made)(results(one, leaf, source) for one in made)
    if not isinstance(made, torch.Tensor):
        return made
    in_place = made.untyped_storage() is source.untyped_storage()
    if not in_place or made.is_conj() or made.is_neg():  # a lazy leaf has no bits for these
        if isinstance(leaf.stored, LeafBytes):
            leaf.stored.use(nbytes_of(made) if in_place else made.nbytes)
        made = made.resolve_conj().resolve_neg() if in_place else made
        return _on_place(made, leaf) if made.is_cpu else made
    if source is not leaf.shown:  # of a leaf that has memory
        made = over(leaf.shown.untyped_storage(), made.dtype, made.storage_offset(), made.shape, made.stride())
    return wrap(type(leaf), made, leaf.stored)


def _on_place(made: torch.Tensor, leaf: LazyTensor) -> torch.Tensor:
    place = leaf.stored.place
    return made if place is None else to_device(made, place)


def _apart(made: Any, reals: Sequence[torch.Tensor]) -> Any:
    """Gives results memory of their own: some operators return an argument, and their schemas don't say so."""
    if isinstance(made, (tuple, list)):
        return type(made)(_apart(one, reals) for one in made)
    if not isinstance(made, torch.Tensor):
        return made
    try:
        storage = made.untyped_storage()  # one object for all tensors of a storage
        return made.clone() if any(storage is real.untyped_storage() for real in reals) else made
    except (NotImplementedError, RuntimeError):  # sparse, or another wrapper: no memory, so none of ours
        return made


def plain_index(index: Any) -> Any:
    return _on_cpu(_replace(index, read))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    kind = type(value)
    return kind(_on_cpu(one) for one in value) if kind is tuple or kind is list else value


def index_leaf(leaf: LazyTensor, index: Any) -> Any:
    """Returns `leaf[index]` for any index: lists, masks and tensors read their rows at once."""
    index = plain_index(index)
    is_asked_for = leaf.stored.source.is_on_disk and _prefetch(leaf, index)
    if not isinstance(leaf.stored, LeafBytes):
        return _getitem(leaf, index)
    real = leaf.stored.tensor(leaf.shown)
    if leaf.stored.source.absent is not None and not is_asked_for:
        leaf.stored.source.bring(real)
    return results(real[index], leaf, real)


def _prefetch(leaf: LazyTensor, index: object) -> bool:
    """Asks for the rows of an index of one dimension, if they are on a disk still. Whether it is such an index."""
    if isinstance(index, list) and all(type(row) is int for row in index):
        index = torch.tensor(index, dtype=torch.int64)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.shape == leaf.shape[:1]:
        index = index.nonzero().squeeze(1)
    if not leaf.ndim or not isinstance(index, torch.Tensor) or index.ndim != 1 or index.dtype != torch.int64:
        return False
    rows = torch.where(index < 0, index + len(leaf), index)
    if len(rows) and 0 <= int(rows.min()) <= int(rows.max()) < len(leaf) and leaf.stored.is_cold(leaf.shown, rows):
        leaf.stored.prefetch(leaf.shown, rows)
    return True


# --- What an operator does with its tensors, as its schema says it: makes views, writes, or reads --------------------
# Schemas don't say all, so some operators are known by name: in-place collectives write what they are given, gathers
# read only rows of their first argument, `zeros_like` and the like read nothing, and `set_` gives one tensor the memory
# of another.


_aten: Any = torch.ops.aten

_OF_SHAPES = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
_MOVES = frozenset({"aten::to", "aten::type_as"})


class Rule(NamedTuple):
    """Effects of an operator on its tensors.

    Attributes:
        call: calls it in C.
        written: place and name of each argument that is written.
        moves: its results may be on another device; in inference mode such a one comes whole, and seems to make views.
        reads_rows: only those elements of the first argument are read that the result has.
        reads_nothing: only shapes and dtypes matter.
        keeps: another tensor gets the memory of an argument.
        reads_all: it makes no views, and none of the rules above lets it read less.
    """

    call: Callable[..., Any]
    written: tuple[tuple[int, str], ...]
    moves: bool
    reads_rows: bool
    reads_nothing: bool
    keeps: bool
    reads_all: bool


@functools.cache
def rule_of(operator: Any) -> Rule:
    """Returns the rule of an operator, by its schema and its name."""
    schema = schema_of(operator)
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if schema.name.startswith("c10d::") and schema.name.endswith("_"):
        written.append((0, schema.arguments[0].name))
    makes_views = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    reads_rows, reads_nothing = operator in _MEANINGS, schema.name in _OF_SHAPES
    return Rule(
        call_of(operator),
        tuple(written),
        moves=schema.name in _MOVES,
        reads_rows=reads_rows,
        reads_nothing=reads_nothing,
        keeps=schema.name == "aten::set_",
        reads_all=not (makes_views or reads_rows or reads_nothing),
    )


# --- Operators that read some elements of a leaf in boxes ------------------------------------------------------------


_MASKS = frozenset({torch.bool, torch.uint8})
_INTEGERS = frozenset({torch.int64, torch.int32})


class _MeantPoints(NamedTuple):
    """Points that an operator means: `box[indices]`."""

    box: torch.Tensor
    indices: Sequence[torch.Tensor | None]
    may_be_negative: bool = False


def pick(operator: Any, stored: LeafBoxes, box: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the result of an operator of rows on a box; `args` are the arguments behind it.

    Raises what torch does, where it refuses the arguments.
    """
    meant = _MEANINGS[operator](box, *args, **kwargs) if box.ndim else None
    indices = None if meant is None else _in_range(meant)
    if meant is None or indices is None:  # torch has something to say: to any tensor of that shape
        operator(torch.zeros((), dtype=box.dtype).expand(box.shape), *args, **kwargs)
        return operator(stored.read(box), *args, **kwargs)
    points = Points(indices)
    made = stored.pick(meant.box, points)
    if made is None:
        return operator(stored.read(box), *args, **kwargs)
    placed = points.placed(made)
    return placed if operator in _OF_INDEX else placed.contiguous()


def _in_range(meant: _MeantPoints) -> list[torch.Tensor | None] | None:
    """Returns the indices as `Points` takes them; None where they are others than torch takes."""
    found: list[torch.Tensor | None] = []
    for index in meant.indices:
        if index is not None and index.dtype in _MASKS and meant.may_be_negative:
            dims = meant.box.shape[len(found) : len(found) + index.ndim]
            if index.shape != dims or not index.ndim:
                return None
            found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    if len(found) > meant.box.ndim:
        return None
    for dim, index in enumerate(found):
        if index is None:
            continue
        if index.dtype not in _INTEGERS:
            return None
        size, index = meant.box.shape[dim], index.to(torch.int64)
        if meant.may_be_negative and index.numel() and int(index.min()) < 0:
            index = torch.where(index < 0, index + size, index)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            return None
        found[dim] = index
    try:
        torch.broadcast_shapes(*(index.shape for index in found if index is not None))
    except RuntimeError:
        return None
    return found


def _index_select(box: torch.Tensor, dim: int, index: torch.Tensor) -> _MeantPoints | None:
    if not -box.ndim <= dim < box.ndim or index.ndim > 1:
        return None
    return _MeantPoints(box, [*[None] * (dim % box.ndim), index.reshape(-1)])


def _masked_select(box: torch.Tensor, mask: torch.Tensor) -> _MeantPoints | None:
    if mask.dtype != torch.bool:
        return None
    try:
        shape = torch.broadcast_shapes(box.shape, mask.shape)
    except RuntimeError:
        return None
    return _MeantPoints(box.expand(shape), mask.expand(shape).nonzero(as_tuple=True))


def _gather(box: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> _MeantPoints | None:
    if index.ndim != box.ndim or not -box.ndim <= dim < box.ndim:
        return None
    indices: list[torch.Tensor | None] = []
    for on, size in enumerate(index.shape):
        shape = [1] * box.ndim
        shape[on] = size
        indices.append(index if on == dim % box.ndim else torch.arange(size).reshape(shape))
    return _MeantPoints(box, indices)


def _take(box: torch.Tensor, index: torch.Tensor) -> _MeantPoints | None:
    count = box.numel()
    if index.dtype != torch.int64 or (index.numel() and not -count <= int(index.min()) <= int(index.max()) < count):
        return None
    return _MeantPoints(box, torch.unravel_index(torch.where(index < 0, index + count, index), box.shape))


def _embedding(box: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> _MeantPoints | None:
    return _MeantPoints(box, [indices]) if box.ndim == 2 else None


_OF_INDEX = frozenset({_aten.index.Tensor, aten_unsafe_index})
_MEANINGS: dict[Any, Callable[..., _MeantPoints | None]] = {
    _aten.index.Tensor: functools.partial(_MeantPoints, may_be_negative=True),
    aten_unsafe_index: functools.partial(_MeantPoints, may_be_negative=True),
    _aten.index_select.default: _index_select,
    _aten.masked_select.default: _masked_select,
    _aten.gather.default: _gather,
    _aten.take.default: _take,
    _aten.embedding.default: _embedding,
}
