"""How operators of torch run on lazy leaves, and what becomes of their results."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memstore.structure import modes, over, to_device
from memstore.view.lazy import LazyTensor, read, refusal, wrap
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.leaf_bytes import LeafBytes
from memstore.view.operators import Rule, rule_of
from memstore.view.picks import pick
from memstore.view.stored_leaf import nbytes_of

_STRIDED = torch.strided
_DEVICE: Any = torch.ops.prim.device.default
_getitem: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
_FLAT = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype})


@modes.uncompiled
def run(
    cls: type[LazyTensor], operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """An operator with lazy leaves among its arguments."""
    if operator is _DEVICE:
        return args[0].stored.wrapped
    rule = rule_of(operator)
    if rule.written:
        _refuse_writes(operator, rule, args, kwargs or {})
    if not rule.reads_all and (not rule.reads_rows or isinstance(args[0], LazyTensor)):
        return _run_lazily(operator, rule, args, kwargs or {})
    if len(args) == 1 and not kwargs and type(args[0]) is cls:  # as below: 1 us less
        real = args[0].stored.read(args[0].shown)
        made = operator._op(real)
        if type(made) is torch.Tensor and made.layout is _STRIDED:
            return made.clone() if made.untyped_storage()._cdata == real.untyped_storage()._cdata else made
        return _apart(made, (real.untyped_storage()._cdata,))
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
    return _apart(made, [real.untyped_storage()._cdata for real in reals])


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
    """Whether all that was made are plain views of a leaf that has no memory to make anything else of."""
    if isinstance(made, (tuple, list)):
        return all(_are_views(one, shown) for one in made)
    if not isinstance(made, torch.Tensor):
        return True
    in_place = made.untyped_storage()._cdata == shown.untyped_storage()._cdata
    return in_place and not made.is_conj() and not made.is_neg()


def _resolved(made: Any) -> Any:
    if isinstance(made, (tuple, list)):
        return type(made)(map(_resolved, made))
    return made.resolve_conj().resolve_neg() if isinstance(made, torch.Tensor) else made


def _replace(value: Any, change: Callable[[LazyTensor], Any]) -> Any:
    """`value` with every lazy leaf in it changed."""
    if isinstance(value, LazyTensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_replace(one, change) for one in value)
    if kind is dict:
        return {name: _replace(one, change) for name, one in value.items()}
    return value


def results(made: Any, leaf: LazyTensor, source: torch.Tensor) -> Any:
    """What an operator made of `source`, a leaf's tensor: lazy if it lies in the memory of `source`, else as it is."""
    if isinstance(made, (tuple, list)):
        return type(made)(results(one, leaf, source) for one in made)
    if not isinstance(made, torch.Tensor):
        return made
    if made.untyped_storage()._cdata != source.untyped_storage()._cdata:
        _use(leaf, made.nbytes)
        return _on_place(made, leaf) if made.is_cpu else made
    if made.is_conj() or made.is_neg():  # a lazy leaf has no bit for it
        _use(leaf, nbytes_of(made))
        return _on_place(made.resolve_conj().resolve_neg(), leaf)
    if source is not leaf.shown:  # of a leaf that has memory
        made = over(leaf.shown.untyped_storage(), made.dtype, made.storage_offset(), made.shape, made.stride())
    return wrap(type(leaf), made, leaf.stored)


def _use(leaf: LazyTensor, nbytes: int) -> None:
    if isinstance(leaf.stored, LeafBytes):
        leaf.stored.use(nbytes)


def _on_place(made: torch.Tensor, leaf: LazyTensor) -> torch.Tensor:
    place = leaf.stored.place
    return made if place is None else to_device(made, place)


def _apart(made: Any, storages: Sequence[int]) -> Any:
    """Gives results memory of their own: some operators return an argument, and their schemas don't say so."""
    if isinstance(made, (tuple, list)):
        return type(made)(_apart(one, storages) for one in made)
    if not isinstance(made, torch.Tensor):
        return made
    try:
        return made.clone() if made.untyped_storage()._cdata in storages else made
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
    """`leaf[index]` for any index: lists, masks and tensors read their rows at once."""
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
