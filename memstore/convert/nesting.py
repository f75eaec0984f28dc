"""State dicts as torch.distributed.checkpoint has them: items by flat names, and the path that each name stands for.

As torch does it: dicts are taken apart, and lists that have a tensor or a dict somewhere; another list is one item, and
so is whatever else there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch

from memstore.convert.naming import Refusals, entries, has_tensors
from memstore.engine import Path
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.wording import an_instance, short

_FEW = 1024  # entries that a list may have, however few items a checkpoint has


class Flat(NamedTuple):
    """A state dict by flat names.

    Attributes:
        items: tensors, and other values, by name.
        paths: the keys and numbers that lead to each.
    """

    items: dict[str, Any]
    paths: dict[str, Path]


def flattened(value: Any, refusals: Refusals) -> Flat:
    """What a checkpoint has of a value. What would come back as another value is refused."""
    items: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    if not isinstance(value, dict):
        refusals.add((), f"{an_instance(value)}, and a checkpoint is a dict")
        return Flat(items, paths)
    for path, entry in entries(value, refusals, is_leaf=_is_item):
        name = ".".join(map(str, path))
        if name in items:
            refusals.add(path, f"another leaf is called {name!r} as well when names are joined by dots")
        elif isinstance(entry, dict):
            refusals.add(path, "a dict without entries, which leaves no trace")
        elif isinstance(entry, tuple) and has_tensors(entry):
            refusals.add(path, "a tuple with tensors, which would be pickled whole")
        else:
            items[name], paths[name] = entry, path
    return Flat(items, paths)


def _is_item(value: Any) -> bool:
    """Whether a list or a tuple is one item."""
    if isinstance(value, tuple):
        return True
    return not any(
        isinstance(entry, torch.Tensor | Mapping) or (isinstance(entry, list) and not _is_item(entry))
        for entry in cast("list[Any]", value)
    )


def nested(items: Mapping[str, Any], paths: Any, source: str) -> Any:
    """The state dict of these items.

    Args:
        paths: the planner's data of a checkpoint; None: the names are the keys.
        source: the checkpoint, for errors.
    """
    if paths is None:
        return dict(items)
    if not isinstance(paths, Mapping):
        raise UnsupportedValueError(f"{source} was saved by a planner whose data is unknown: {an_instance(paths)}")
    known = cast("Mapping[Any, Any]", paths)
    most = max(2 * len(items), _FEW)
    root: dict[Any, Any] = {}
    names = [name for name in known if name in items]  # in the order of the state dict, which the items need not have
    for name in dict.fromkeys([*names, *items]):
        path: Any = known.get(name, (name,))
        steps = cast("tuple[Any, ...]", path)
        fits = isinstance(path, tuple) and bool(steps) and isinstance(steps[0], str)
        if not fits or not all(type(step) is str or (type(step) is int and 0 <= step < most) for step in steps):
            _damaged(source, f"the item {short(name)} has the path {path!r:.200}")
        _set(root, steps, items[name], source)
    return root


def _set(root: Any, steps: tuple[Any, ...], item: Any, source: str) -> None:
    at: Any = root
    inner: Any
    for step, following in zip(steps[:-1], steps[1:], strict=True):
        inner = _entry(at, step)
        if inner is None:
            inner = {} if type(following) is str else []
            _put(at, step, inner)
        elif type(inner) is not (dict if type(following) is str else list):
            _damaged(source, f"the path {steps!r:.200} leads into an item")
        at = cast("Any", inner)
    if _entry(at, steps[-1]) is not None:
        _damaged(source, f"two items have the path {steps!r:.200}")
    _put(at, steps[-1], item)


def _entry(container: Any, step: Any) -> Any:
    if isinstance(container, dict):
        return cast("dict[Any, Any]", container).get(step)
    return container[step] if step < len(container) else None


def _put(container: Any, step: Any, value: Any) -> None:
    if isinstance(container, list):
        items = cast("list[Any]", container)
        items.extend([None] * (step + 1 - len(items)))
    container[step] = value


def _damaged(source: str, detail: str) -> NoReturn:
    raise CorruptionError(path=source, detail=detail)
