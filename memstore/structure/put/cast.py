"""dtype= of a put: which leaves it concerns. They are the ones that a get's dtype= converts: see get/storage.py."""

from __future__ import annotations

import functools
from typing import Any

import torch

from memstore.engine import Path
from memstore.structure.put.planning import unsupported
from memstore.structure.tensors import modes
from memstore.structure.tree import TensorNode, Tree, compile_tree, leaf_names
from memstore.structure.walk import Facts
from memstore.wording import an


def check_dtype(dtype: Any) -> None:
    """Raises TypeError for what no floating leaf can be stored as."""
    if not isinstance(dtype, torch.dtype):
        given = f"{dtype!r}, {an(type(dtype))}"
        raise TypeError(f"dtype={given}: a put casts to a torch.dtype, as torch.bfloat16")
    if not dtype.is_floating_point:
        raise TypeError(
            f"dtype={dtype}: a put casts the floating leaves only, and to a real floating dtype, as torch.bfloat16; "
            "convert other leaves before you put them"
        )


def stored_dtypes(tree: Tree, facts: Facts, dtype: torch.dtype | None, below: Path = ()) -> tuple[torch.dtype, ...]:
    """The dtypes that the leaves are stored as. Raises UnsupportedValueError for a leaf that torch can't cast so.

    Args:
        below: only leaves whose names start so are cast.
    """
    if dtype is None:
        return facts.dtypes
    root, reader = compile_tree(tree)
    kept = reader.fixed
    if below:
        names = (name for name, node in leaf_names(root) if isinstance(node, TensorNode))
        kept = kept | {i for i, name in enumerate(names) if name[: len(below)] != below}
    stored = list(facts.dtypes)
    for i, found in enumerate(facts.dtypes):
        if found is not dtype and found.is_floating_point and i not in kept:
            if not _can_cast(found, dtype):
                raise unsupported(tree, i, f"torch can't convert {found} to {dtype}; put it without dtype=")
            stored[i] = dtype
    return tuple(stored)


@functools.cache
def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    with modes.put_aside():
        try:
            torch.empty(1, dtype=source, device="cpu").to(target)
        except (RuntimeError, NotImplementedError):
            return False
    return True
