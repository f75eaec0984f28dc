"""Where a module's weights may come from, as a table of tensors by name: nothing is read before it is used.

a path of a snapshot, a Snapshot    its view: lazy leaves over the mapped files
a path of safetensors               a file, a folder of Hugging Face's, its index: tensors over the mapped files
a view, a state dict                as it is; dicts in dicts have names with dots
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memstore.engine import has_settings
from memstore.errors import NotAStoreError, StructureMismatchError, UnsupportedValueError
from memstore.formats import file_format, load_files
from memstore.snapshot import Snapshot, is_snapshot
from memstore.view import Source, StoredTensor, own_leaf
from memstore.wording import an, short

_SOURCES_OF = (("state_dict", "state_dict()"), ("view", "view(key)"))  # a module's, a store's


class Table:
    """The tensors of a source by the names that a module has for them.

    Args:
        source: one of those above.
        names: of each tensor of the module, all its names.

    Attributes:
        title: what errors call it.
        prefix: what stands before the module's names in the source's; see `_prefix`.

    Raises:
        StructureMismatchError: the source has none of these names, or it isn't clear which of its parts has them.
        NotAStoreError: there is nothing at the path.
        UnsupportedValueError, CorruptionError: it is of no known format, or damaged.
        TypeError: it is no source.
    """

    def __init__(self, source: Any, names: Sequence[Sequence[str]]) -> None:
        self.title, value = _opened(source)
        self._tensors = dict(_flat("", value))
        self.prefix = _prefix(self.title, self._tensors, names)
        self._sources: dict[Source, Source | None] = {}

    def find(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self.prefix + name)

    def get(self, name: str) -> torch.Tensor:
        """A tensor that `find` has found."""
        return self._tensors[self.prefix + name]

    def take(self, name: str) -> torch.Tensor:
        """A tensor, where it lies if it can be had there; what is written to it, no other sees."""
        found = self.get(name)
        if isinstance(found, StoredTensor):
            return own_leaf(found, self._sources)
        if found.is_inference() and not torch.is_inference_mode_enabled():
            return found.detach().clone()  # which can be trained
        return found.detach()


def _opened(source: Any) -> tuple[str, Any]:
    """What errors call it, and its value."""
    if isinstance(source, Snapshot):
        return f"the snapshot {source.path}", source.view()
    if isinstance(source, (str, os.PathLike)):
        path: str = os.path.abspath(os.fspath(source))  # pyright: ignore[reportAssignmentType]
        if is_snapshot(path):
            return f"the snapshot {path}", Snapshot(path).view()
        if not os.path.exists(path):
            hint = "" if os.path.splitext(path)[1] else "; of a store's key give store.view(key)"
            raise NotAStoreError(f"there is no snapshot, file or folder at {path}{hint}")
        return path, load_files("source", path, _format_of(path), allow_pickle=False)
    if isinstance(source, Mapping) or hasattr(source, "batch_size"):
        return f"the {type(source).__name__}", source
    instead = next((f": its {call} is one" for name, call in _SOURCES_OF if callable(getattr(source, name, None))), "")
    raise TypeError(f"source is a Snapshot, a view, a state dict or a path, and not {an(type(source))}{instead}")


def _format_of(path: str) -> Any:
    if has_settings(path):
        raise UnsupportedValueError(
            f"{path} is a store: give the view of one of its keys, memstore.open(path).view(key)"
        )
    try:
        return file_format(path)
    except UnsupportedValueError:
        kinds = "no snapshot, and no folder with safetensors"
        what = kinds if os.path.isdir(path) else "no file of safetensors or torch"
        raise UnsupportedValueError(f"{path} is {what}: check the path") from None


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by their names, joined by dots. What is no tensor is left out."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping) or hasattr(value, "batch_size"):
        for name, one in value.items():  # type: ignore[attr-defined]
            if isinstance(name, str):
                yield from _flat(f"{prefix}.{name}" if prefix else name, one)


def _prefix(title: str, tensors: Mapping[str, Any], names: Sequence[Sequence[str]]) -> str:
    """What stands before the module's names in those of the source.

    1. A prefix that all its names have, or none: the one by which most of the module's are found.
    2. Else the one part of the source that has all of the module's tensors, if no other part has any.
    3. Else it is an error: weights of another module would fit too.
    """
    wanted = {name: number for number, group in enumerate(names) for name in group}
    common = _common(list(tensors))
    best = max(common, key=lambda prefix: sum(prefix + name in tensors for name in wanted))
    if not wanted or any(best + name in tensors for name in wanted):
        return best
    parts = _parts(tensors, wanted)
    whole = [prefix for prefix, found in parts.items() if len(found) == len(names)]
    if len(whole) == 1 and all(prefix.startswith(whole[0]) for prefix in parts):
        return whole[0]
    if parts:
        likely = sorted(parts, key=lambda prefix: -len(parts[prefix]))
        listed = ", ".join(f"{short(one[:-1])} ({len(parts[one])} of {len(names)})" for one in likely[:8])
        raise StructureMismatchError(
            f"{title} has weights of the module's names in {len(likely)} of its parts: {listed}"
            f"{', ...' if len(likely) > 8 else ''}. Say which part is the module's: give that part alone, as a view or "
            "a dict with the module's own names; or materialize the whole module, and choose the part with check_fn"
        )
    theirs = ", ".join(short(name) for name in list(tensors)[:3]) or "no tensors"
    raise StructureMismatchError(
        f"{title} has none of the module's {len(names)} weights: it has {theirs}, and the module "
        f"{', '.join(map(short, list(wanted)[:3]))}; name the part of it that is the module's"
    )


def _common(names: Sequence[str]) -> list[str]:
    """The prefixes that all names have, each to a dot; "" is the first."""
    first, last = (min(names), max(names)) if names else ("", "")  # what these share, all between them do
    shared = os.path.commonprefix([first, last])
    return ["", *(shared[: at + 1] for at, one in enumerate(shared) if one == ".")]


def _parts(tensors: Iterable[str], wanted: Mapping[str, int]) -> dict[str, set[int]]:
    """The prefixes under which a source has names, and the numbers of the tensors whose they are."""
    found: dict[str, set[int]] = {}
    for name in tensors:
        for at, one in enumerate(name):
            number = wanted.get(name[at + 1 :]) if one == "." else None
            if number is not None:
                found.setdefault(name[: at + 1], set()).add(number)
    return found
