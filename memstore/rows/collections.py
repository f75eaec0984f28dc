"""Rows of TensorDicts and their relatives. Imported when there is one."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictParams, is_non_tensor, is_tensorclass

from memstore.rows.gather import Gather
from memstore.rows.path import Path, name_of
from memstore.rows.targets import matching
from memstore.wording import an

Plan = Callable[[Gather, Any, Any, Path], Any]  # plans an entry of a collection: see `walk.plan`


def plan_collection(gather: Gather, source: Any, out: Any, path: Path, plan: Plan) -> Any:
    if not source.batch_size and not is_non_tensor(source):
        raise ValueError(f"{name_of(path)} is {an(type(source))} without a batch dimension: it has no rows")
    if is_non_tensor(source):
        return _other(gather, source, out, path)
    if is_tensorclass(source):
        inner = plan(gather, source._tensordict, None if out is None else out._tensordict, path)
        return type(source)._from_tensordict(inner, dict(source._non_tensordict or {})) if out is None else out
    if isinstance(source, TensorDictParams):
        return plan(gather, source._param_td, out, path)
    if type(source) is TensorDict:
        return _tensordict(gather, source, out, path, plan)
    picked = source[gather.rows(source.batch_size[0], path)]  # of a lazy stack: members, as they are
    return picked.clone() if out is None else out.update_(picked)


def _tensordict(gather: Gather, source: TensorDict, out: Any, path: Path, plan: Plan) -> Any:
    rows = gather.rows(source.batch_size[0], path)
    outs = matching(source, out, path)
    entries = {
        key: plan(gather, value, outs._get_str(key, None) if out is not None else None, (*path, key))
        for key, value in source._tensordict.items()
    }
    if out is not None:
        return out
    names = source._td_dim_names
    return TensorDict._new_unsafe(
        entries,
        batch_size=torch.Size((len(rows), *source.batch_size[1:])),
        device=gather.device or source.device,
        names=None if names is None else list(names),
        nested=False,
    )


def _other(gather: Gather, source: Any, out: Any, path: Path) -> Any:
    """Leaves that are no tensors: one value for all rows, or one for each."""
    if not source.batch_size:
        return source if out is None else out
    rows = source[gather.rows(source.batch_size[0], path)]
    if out is None or out.tolist() == rows.tolist():
        return rows if out is None else out
    raise ValueError(f"{name_of(path)} is no tensor, and out has other values there, which can't be filled")
