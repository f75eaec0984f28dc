"""Where a module's weights may come from, as a table of tensors by name: nothing is read before it is used.

a path of a snapshot, a Snapshot    its view: lazy leaves over the mapped files
a path of safetensors               a file, a folder of Hugging Face's, its index: tensors over the mapped files
a view, a state dict                as it is; dicts in dicts have names with dots
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from memstore.errors import NotAStoreError, StructureMismatchError
from memstore.formats import load_files
from memstore.snapshot import Snapshot, is_snapshot
from memstore.view import Source, StoredTensor, own_leaf
from memstore.wording import an, short


class Table:
    """The tensors of a source by the names that a module has for them.

    Args:
        source: one of those above.
        names: those of the module. What stands before them in all names of the source (`model.`) is left out.

    Raises:
        StructureMismatchError: the source has none of these names.
        NotAStoreError: there is nothing at the path.
        UnsupportedValueError, CorruptionError: it is of no known format, or damaged.
        TypeError: it is no source.
    """

    def __init__(self, source: Any, names: Sequence[str]) -> None:
        self.title, value = _opened(source)
        self._tensors = dict(_flat("", value))
        self._prefix = _prefix(self._tensors, names)
        self._sources: dict[Source, Source | None] = {}
        if names and not any(self._prefix + name in self._tensors for name in names):
            theirs = ", ".join(short(name) for name in list(self._tensors)[:3]) or "no tensors"
            raise StructureMismatchError(
                f"{self.title} has none of the module's {len(names)} weights: it has {theirs}, and the module "
                f"{', '.join(map(short, names[:3]))}; name the part of it that is the module's"
            )

    def find(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self._prefix + name)

    def get(self, name: str) -> torch.Tensor:
        """A tensor that `find` has found."""
        return self._tensors[self._prefix + name]

    def take(self, name: str) -> torch.Tensor:
        """A tensor, where it lies if it can be had there; what is written to it, no other sees."""
        found = self.get(name)
        return own_leaf(found, self._sources) if isinstance(found, StoredTensor) else found.detach()


def _opened(source: Any) -> tuple[str, Any]:
    """What errors call it, and its value."""
    if isinstance(source, Snapshot):
        return f"the snapshot {source.path}", source.view()
    if isinstance(source, (str, os.PathLike)):
        path: str = os.path.abspath(os.fspath(source))  # pyright: ignore[reportAssignmentType]
        if is_snapshot(path):
            return f"the snapshot {path}", Snapshot(path).view()
        if not os.path.exists(path):
            raise NotAStoreError(f"there is no snapshot, file or folder at {path}")
        return path, load_files("source", path, None, allow_pickle=False)
    if isinstance(source, Mapping) or hasattr(source, "batch_size"):
        return f"the {type(source).__name__}", source
    raise TypeError(f"source is a Snapshot, a view, a state dict or a path, and not {an(type(source))}")


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by their names, joined by dots. What is no tensor is left out."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping) or hasattr(value, "batch_size"):
        for name, one in value.items():  # type: ignore[attr-defined]
            if isinstance(name, str):
                yield from _flat(f"{prefix}.{name}" if prefix else name, one)


def _prefix(tensors: Mapping[str, Any], names: Sequence[str]) -> str:
    """What stands before the module's names: "", or the first word of the source's; the one by which most are found."""
    firsts = dict.fromkeys(f"{name.partition('.')[0]}." for name in tensors if "." in name)
    return max(["", *firsts], key=lambda prefix: sum(prefix + name in tensors for name in names))
