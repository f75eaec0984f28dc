"""Rows of TensorDicts and their relatives. Imported when there is one."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import TensorDict, TensorDictParams, is_non_tensor, is_tensorclass

from memstore.rows.gather import name

if TYPE_CHECKING:
    from memstore.rows.gather import Gather, Path


def plan_collection(gather: Gather, source: Any, out: Any, path: Path) -> Any:
    if not source.batch_size and not is_non_tensor(source):
        raise ValueError(f"{name(path)} is a {type(source).__qualname__} without a batch dimension: it has no rows")
    if is_non_tensor(source):
        return _other(gather, source, out, path)
    if is_tensorclass(source):
        inner = gather.plan(source._tensordict, None if out is None else out._tensordict, path)
        return type(source)._from_tensordict(inner, dict(source._non_tensordict or {})) if out is None else out
    if isinstance(source, TensorDictParams):
        return gather.plan(source._param_td, out, path)
    if type(source) is TensorDict:
        return _tensordict(gather, source, out, path)
    picked = source[gather.rows(source.batch_size[0], path)]  # of a lazy stack: members, as they are
    return picked.clone() if out is None else out.update_(picked)


def _tensordict(gather: Gather, source: TensorDict, out: Any, path: Path) -> Any:
    rows = gather.rows(source.batch_size[0], path)
    outs = gather.matching(source, out, path)
    entries = {
        key: gather.plan(value, outs._get_str(key, None) if out is not None else None, (*path, key))
        for key, value in source._tensordict.items()
    }
    if out is not None:
        return out
    names = source._td_dim_names
    return TensorDict._new_unsafe(
        entries,
        batch_size=(len(rows), *source.batch_size[1:]),
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
    raise ValueError(f"{name(path)} is no tensor, and out has other values there, which can't be filled")
