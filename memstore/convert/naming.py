"""The leaves of a value by name, and what a format can't express: all of it is collected, then refused at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch

from memstore.convert import tensordicts
from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.formats import what_special
from memstore.wording import an_instance

_MOST_NAMED = 20  # of the leaves that are refused


class Refusals:
    """What of a value a format can't express.

    Args:
        target: the format, as an error calls it.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._found: list[tuple[Path, str]] = []

    def add(self, path: Path, why: str) -> None:
        self._found.append((path, why))

    def check(self) -> None:
        """Raises UnsupportedValueError if there are any; it names the leaves, and why."""
        if not self._found:
            return
        shown = [f"  {shown_path(path)}: {why}" for path, why in self._found[:_MOST_NAMED]]
        if len(self._found) > _MOST_NAMED:
            shown.append(f"  and {len(self._found) - _MOST_NAMED:,} more")
        count = "1 leaf" if len(self._found) == 1 else f"{len(self._found):,} leaves"
        raise UnsupportedValueError(
            f"{self._target} can't express {count} of the source, and nothing was written:\n" + "\n".join(shown)
        )


def shown_path(path: Path) -> str:
    return "value" + "".join(f"[{part!r}]" for part in path)


class Entry(NamedTuple):
    """A leaf, or a container without entries."""

    path: Path
    value: Any


def entries(value: Any, refusals: Refusals, *, is_leaf: Callable[[Any], bool] = lambda _: False) -> Iterator[Entry]:
    """The leaves of dicts, lists and tuples in one another, as `plain` makes them.

    Keys that are no texts are refused.

    Args:
        is_leaf: whether a list is taken as one leaf.
    """
    yield from _entries((), value, refusals, is_leaf)


def _entries(path: Path, value: Any, refusals: Refusals, is_leaf: Callable[[Any], bool]) -> Iterator[Entry]:
    if type(value) in (dict, OrderedDict) and value:
        for key, entry in value.items():
            if type(key) is not str:
                refusals.add((*path, repr(key)), f"its key {key!r:.60} is {an_instance(key)} and no text")
                continue
            yield from _entries((*path, key), entry, refusals, is_leaf)
    elif type(value) in (list, tuple) and value and not is_leaf(value):
        for i, entry in enumerate(value):
            yield from _entries((*path, i), entry, refusals, is_leaf)
    else:
        yield Entry(path, value)


def plain(value: Any, refusals: Refusals) -> Any:
    """TensorDicts as dicts, and what is in their NonTensorData. (Other containers stay what they are.)"""
    return _plain((), value, refusals)


def _plain(path: Path, value: Any, refusals: Refusals) -> Any:
    kind = cast("Any", type(value))  # pyright: ignore[reportUnknownArgumentType]
    make = cast("Callable[[Any], Any]", kind)
    if kind in (dict, OrderedDict):
        entries = cast("dict[Any, Any]", value).items()
        found = make((key, _plain((*path, part_of(key)), entry, refusals)) for key, entry in entries)
        if hasattr(value, "__dict__"):  # of a module's state dict: `_metadata`
            found.__dict__.update(value.__dict__)
        return found
    if kind in (list, tuple):
        items = cast("list[Any]", value)
        return make(_plain((*path, i), entry, refusals) for i, entry in enumerate(items))
    if tensordicts.is_collection(value):
        opened = tensordicts.opened(value)
        if opened is None:
            refusals.add(path, f"a {kind.__qualname__}")
        return _plain(path, opened, refusals)
    return value


def part_of(key: Any) -> str | int:
    """A key, as a path has it."""
    return key if type(key) in (str, int) else repr(key)


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(has_tensors, cast("Mapping[Any, Any]", value).values()))
    return isinstance(value, list | tuple) and any(map(has_tensors, cast("list[Any]", value)))


class Sharing:
    """Finds tensors that share memory with one another.

    Args:
        untie: they are stored one by one, and no refusal.
    """

    def __init__(self, refusals: Refusals, *, untie: bool) -> None:
        self._refusals, self._untie = refusals, untie
        self._spans: list[tuple[int, int, Path]] = []

    def add(self, path: Path, tensor: torch.Tensor) -> None:
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * step for size, step in steps)
            self._spans.append((tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize, path))

    def check(self) -> None:
        """Adds what shares memory to the refusals."""
        if self._untie:
            return
        end, last = 0, cast("Path", ())
        for start, stop, path in sorted(self._spans, key=lambda span: span[:2]):
            if start < end:
                self._refusals.add(
                    path, f"it shares memory with {shown_path(last)}; --untie stores each of them by itself"
                )
            if stop > end:
                end, last = stop, path


def special(tensor: torch.Tensor) -> str | None:
    """What a tensor is more than its elements: sparse, jagged, quantized. None for most."""
    found = what_special(tensor)
    if found is None and tensor.is_quantized:
        found = f"a quantized tensor of {tensor.dtype}"
    return found
