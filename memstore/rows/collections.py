"""Rows of TensorDicts and their relatives. Imported when there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictParams, is_non_tensor, is_tensorclass

from memstore._compat import (
    entries_of,
    inner_tensordict,
    new_tensordict,
    params_inner,
    tensorclass_like,
    tensordict_parts,
)
from memstore._wording import an
from memstore.errors import StructureMismatchError
from memstore.rows.gather import Gather, Path, entry_of, matching, name_of

Plan = Callable[[Gather, Any, Any, Path], Any]  # plans an entry of a collection: see `reading.plan`


def plan_collection(gather: Gather, source: Any, out: Any, path: Path, plan: Plan) -> Any:
    if not source.batch_size and not is_non_tensor(source):
        raise ValueError(f"{name_of(path)} is {an(type(source))} without a batch dimension: it has no rows")
    if is_non_tensor(source):
        return _other(gather, source, out, path)
    if is_tensorclass(source):
        into = inner_tensordict(out) if is_tensorclass(type(out)) else out
        inner = plan(gather, inner_tensordict(source), into, path)
        return tensorclass_like(source, inner) if out is None else out
    if isinstance(source, TensorDictParams):
        return plan(gather, params_inner(source), out, path)
    if type(source) is TensorDict:
        return _tensordict(gather, source, out, path, plan)
    return _made_when_asked(gather, source, out, path, plan)


def _tensordict(gather: Gather, source: TensorDict, out: Any, path: Path, plan: Plan) -> Any:
    rows = gather.rows(source.batch_size[0], path)
    outs = matching(source, out, path)
    entries = {
        key: plan(gather, value, entry_of(value, outs, key, path), (*path, key))
        for key, value in entries_of(source).items()
    }
    if out is not None:
        return out
    names = tensordict_parts(source).names
    return new_tensordict(
        TensorDict,
        entries,
        torch.Size((len(rows), *source.batch_size[1:])),
        device=gather.device or source.device,
        names=None if names is None else list(names),
        nested=False,
    )


def _made_when_asked(gather: Gather, source: Any, out: Any, path: Path, plan: Plan) -> Any:
    """Plans a lazy stack, or another container that makes its entries when it is asked for them."""
    picked = source[gather.rows(source.batch_size[0], path)]  # of a lazy stack: members, as they are
    if out is None:
        return picked.clone()
    if isinstance(picked, LazyStackedTensorDict) and isinstance(out, LazyStackedTensorDict):
        return _stack(gather, picked, out, path, plan)
    plan(gather.of_picked(), TensorDict(dict(picked.items()), picked.batch_size), out, path)
    return out


def _stack(
    gather: Gather, picked: LazyStackedTensorDict, out: LazyStackedTensorDict, path: Path, plan: Plan
) -> LazyStackedTensorDict:
    """Plans a stack from members to members, each as a batch of one row."""
    members, outs = picked.tensordicts, out.tensordicts
    if (picked.stack_dim, len(members)) != (out.stack_dim, len(outs)):
        found = f"a stack of {len(outs)} along dimension {out.stack_dim}"
        takes = f"{len(members)} along {picked.stack_dim}"
        raise StructureMismatchError(f"{name_of(path)} of out is {found}, and takes one of {takes}")
    whole = gather.of_picked()
    for one, other in zip(members, outs, strict=True):
        keys = [key for key in _keys_of_others(one) if key in _keys_of_others(other)]
        if keys:
            gather.add_later(partial(other.update_, one.select(*keys)))
            one, other = one.exclude(*keys), other.exclude(*keys)
        plan(whole, one.unsqueeze(0), other.unsqueeze(0), path)
    return out


def _keys_of_others(member: Any) -> list[Any]:
    """Returns the keys of the leaves of a stack's member that are no tensors, nested ones too."""
    return [key for key, value in member.items(True, True, is_leaf=_is_leaf) if is_non_tensor(value)]


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, (torch.Tensor, NonTensorData)) or is_non_tensor(kind)


def _other(gather: Gather, source: Any, out: Any, path: Path) -> Any:
    """Leaves that are no tensors: one value for all rows, or one for each."""
    if not source.batch_size:
        return source if out is None else out
    rows = source[gather.rows(source.batch_size[0], path)]
    if out is None:
        return rows
    given = out.tolist() if hasattr(out, "tolist") else out
    if given == rows.tolist() or (isinstance(rows, NonTensorData) and given == rows.data):
        return out
    raise StructureMismatchError(f"{name_of(path)} is no tensor, and out has other values there: they can't be filled")
