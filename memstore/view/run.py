"""How operators of torch run on lazy leaves, and what becomes of their results."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memstore.view.leaf import StoredTensor, count_of, nbytes_of, read, refusal, wrap
from memstore.view.operators import rule_of
from memstore.view.pages import bring_rows

_CPU = torch.device("cpu")


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = rule_of(operator)
    for place, name in rule.written:
        found: list[StoredTensor] = []
        _replace(args[place] if place < len(args) else kwargs.get(name), lambda leaf, found=found: found.append(leaf))
        if found:
            raise refusal(found[0], f"{operator} (its argument {name!r})")
    used: list[StoredTensor] = []

    def use(leaf: StoredTensor) -> torch.Tensor:
        used.append(leaf)
        return leaf._real

    if rule.makes_views:
        arguments, options = _replace(args, use), _replace(kwargs, use)
        if rule.moves and used[0]._place != _CPU:
            return operator(*_replace(args, read), **_replace(kwargs, read))
        return results(operator(*arguments, **options), used[0])
    if rule.reads_nothing:
        made = operator(*_replace(args, use), **_replace(kwargs, use))
        return made if kwargs.get("device") or not used else made.to(used[0]._place)
    if rule.reads_rows and isinstance(args[0], StoredTensor):
        rest = [_on_cpu(_replace(argument, read)) for argument in args[1:]]
        return results(operator(args[0]._real, *rest, **_replace(kwargs, read)), args[0])
    change = _read_copy if rule.keeps else read
    made = operator(*_replace(args, change, used), **_replace(kwargs, change, used))
    return _apart(made, {leaf._real.untyped_storage()._cdata for leaf in used})


def _read_copy(leaf: StoredTensor) -> torch.Tensor:
    return read(leaf).clone()


def _replace(value: Any, change: Callable[[StoredTensor], Any], used: list[StoredTensor] | None = None) -> Any:
    """`value` with every lazy leaf in it changed."""
    if isinstance(value, StoredTensor):
        if used is not None:
            used.append(value)
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_replace(one, change, used) for one in value)
    if kind is dict:
        return {name: _replace(one, change, used) for name, one in value.items()}
    return value


def results(made: Any, leaf: StoredTensor) -> Any:
    """What an operator made of a leaf's `_real`: lazy where it lies there still, else loaded."""
    if isinstance(made, (tuple, list)):
        return type(made)(results(one, leaf) for one in made)
    if not isinstance(made, torch.Tensor):
        return made
    if made.untyped_storage()._cdata != leaf._real.untyped_storage()._cdata:
        count_of(leaf, made.nbytes)
        return made.to(leaf._place) if made.device == _CPU else made
    if made.is_conj() or made.is_neg():  # a lazy leaf has no bit for it
        count_of(leaf, nbytes_of(made))
        return made.resolve_conj().resolve_neg().to(leaf._place)
    return wrap(made, leaf._span, leaf._place)


def _apart(made: Any, storages: set[int]) -> Any:
    """Results with memory of their own: some operators return an argument, and their schemas don't say so."""
    if isinstance(made, (tuple, list)):
        return type(made)(_apart(one, storages) for one in made)
    if isinstance(made, torch.Tensor) and made.layout is torch.strided and not made.is_nested:
        try:
            storage = made.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # another wrapper: no memory, so none of ours
            return made
        return made.clone() if storage in storages else made
    return made


def plain_index(index: Any) -> Any:
    return _on_cpu(_replace(index, read))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    kind = type(value)
    return kind(_on_cpu(one) for one in value) if kind is tuple or kind is list else value


def index_leaf(leaf: StoredTensor, index: Any) -> Any:
    """`leaf[index]` for any index: lists, masks and tensors read their rows at once."""
    index = plain_index(index)
    bring_rows(leaf._span, leaf._real, index)
    return results(leaf._real[index], leaf)
