"""Leaves of a value by name, and what a format can't express: all of it is collected, then refused at once.

`entries` gives the leaves of dicts, lists and tuples by path. `flattened` and `nested` give them the flat names that
torch.distributed.checkpoint has. `refuse_pickles` finds the leaves that a target could have only as pickles.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple, NoReturn, cast

import torch

from memstore import structure
from memstore._threads import between_forks
from memstore._wording import an_instance, listed, short
from memstore.engine import Path
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.formats import what_special
from memstore.structure import RefusedError, Walk

# --- Names and refusals ----------------------------------------------------------------------------------------------


class LeafRefusals:
    """The leaves of a value that a format can't express.

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
        shown = listed([f"{shown_path(path)}: {why}" for path, why in self._found])
        count = "1 leaf" if len(self._found) == 1 else f"{len(self._found):,} leaves"
        raise UnsupportedValueError(
            f"{self._target} can't express {count} of the source, and nothing was written:{shown}"
        )


def shown_path(path: Path) -> str:
    return "value" + "".join(f"[{part!r}]" for part in path)


class NamedLeaf(NamedTuple):
    """A leaf, or a container without entries."""

    path: Path
    value: Any


def entries(
    value: Any, refusals: LeafRefusals, *, is_leaf: Callable[[Any], bool] = lambda _: False, path: Path = ()
) -> Iterator[NamedLeaf]:
    """Yields the leaves of dicts, lists and tuples in one another, as `plain` makes them.

    Keys that are no texts are refused.

    Args:
        is_leaf: whether a list is taken as one leaf.
        path: of the value.
    """
    if type(value) in (dict, OrderedDict) and value:
        for key, entry in value.items():
            if type(key) is not str:
                refusals.add((*path, repr(key)), f"its key {key!r:.60} is {an_instance(key)} and no text")
                continue
            yield from entries(entry, refusals, is_leaf=is_leaf, path=(*path, key))
    elif type(value) in (list, tuple) and value and not is_leaf(value):
        for i, entry in enumerate(value):
            yield from entries(entry, refusals, is_leaf=is_leaf, path=(*path, i))
    else:
        yield NamedLeaf(path, value)


def plain(value: Any, refusals: LeafRefusals, path: Path = ()) -> Any:
    """Returns TensorDicts as dicts, and what is in their NonTensorData. (Other containers stay what they are.)"""
    kind = cast("Any", type(value))  # pyright: ignore[reportUnknownArgumentType]
    make = cast("Callable[[Any], Any]", kind)
    if kind in (dict, OrderedDict):
        pairs = cast("dict[Any, Any]", value).items()
        found = make((key, plain(entry, refusals, (*path, part_of(key)))) for key, entry in pairs)
        if hasattr(value, "__dict__"):  # of a module's state dict: `_metadata`
            found.__dict__.update(value.__dict__)
        return found
    if kind in (list, tuple):
        items = cast("list[Any]", value)
        return make(plain(entry, refusals, (*path, i)) for i, entry in enumerate(items))
    if is_collection(value):
        opened = opened_collection(value)
        if opened is None:
            refusals.add(path, f"a {kind.__qualname__}")
        return plain(opened, refusals, path)
    return value


def part_of(key: Any) -> str | int:
    """Returns a key as a path has it."""
    return key if type(key) in (str, int) else repr(key)


def has_tensors(value: Any) -> bool:
    """Returns whether there is a tensor in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(has_tensors, cast("Mapping[Any, Any]", value).values()))
    return isinstance(value, list | tuple) and any(map(has_tensors, cast("list[Any]", value)))


class OverlapCheck:
    """The tensors of a value that share memory with one another.

    Args:
        untie: they are stored one by one, and no refusal.
    """

    def __init__(self, refusals: LeafRefusals, *, untie: bool) -> None:
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
    """Says what a tensor is beyond its elements: sparse, jagged, quantized. None for most."""
    found = what_special(tensor)
    if found is None and tensor.is_quantized:
        found = f"a quantized tensor of {tensor.dtype}"
    return found


# --- TensorDicts, as other formats than theirs can have them: dicts, without batch sizes -----------------------------


def is_collection(value: Any) -> bool:
    """Returns whether it is a TensorDict, a tensorclass or the like: none is, as long as nobody has imported them."""
    if "tensordict" not in sys.modules:
        return False
    with between_forks():
        from tensordict import is_tensor_collection
    return is_tensor_collection(value)


def opened_collection(value: Any) -> Any:
    """Returns a collection as a dict of its entries, or its object; None for one that is more than that."""
    with between_forks():
        from tensordict import NonTensorData, NonTensorStack, TensorDict
    if type(value) is NonTensorData:
        return value.data
    if type(value) is NonTensorStack:
        return value.tolist()
    if type(value) is TensorDict:
        return dict(value.items())  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return None


# --- Flat names ------------------------------------------------------------------------------------------------------
# State dicts as torch.distributed.checkpoint has them: items by flat names, and the path that each name stands for.
#
# As torch does it: dicts are taken apart, and lists that have a tensor or a dict somewhere; another list is one item,
# and so is whatever else there is.


_FEW = 1024  # entries that a list may have, however few items a checkpoint has


class FlatItems(NamedTuple):
    """A state dict by flat names.

    Attributes:
        items: tensors, and other values, by name.
        paths: the keys and numbers that lead to each.
    """

    items: dict[str, Any]
    paths: dict[str, Path]


def flattened(value: Any, refusals: LeafRefusals) -> FlatItems:
    """Returns what a checkpoint has of a value. What would come back as another value is refused."""
    items: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    if not isinstance(value, dict):
        refusals.add((), f"{an_instance(value)}, and a checkpoint is a dict")
        return FlatItems(items, paths)
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
    return FlatItems(items, paths)


def _is_item(value: Any) -> bool:
    """Returns whether a list or a tuple is one item."""
    if isinstance(value, tuple):
        return True
    return not any(
        isinstance(entry, torch.Tensor | Mapping) or (isinstance(entry, list) and not _is_item(entry))
        for entry in cast("list[Any]", value)
    )


def nested(items: Mapping[str, Any], paths: Any, source: str) -> Any:
    """Makes the state dict of these items.

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
        _set_item(root, steps, items[name], source)
    return root


def _set_item(root: Any, steps: tuple[Any, ...], item: Any, source: str) -> None:
    at: Any = root
    inner: Any
    for step, following in zip(steps[:-1], steps[1:], strict=True):
        inner = _item_at(at, step)
        if inner is None:
            inner = {} if type(following) is str else []
            _put_item(at, step, inner)
        elif type(inner) is not (dict if type(following) is str else list):
            _damaged(source, f"the path {steps!r:.200} leads into an item")
        at = cast("Any", inner)
    if _item_at(at, steps[-1]) is not None:
        _damaged(source, f"two items have the path {steps!r:.200}")
    _put_item(at, steps[-1], item)


def _item_at(container: Any, step: Any) -> Any:
    if isinstance(container, dict):
        return cast("dict[Any, Any]", container).get(step)
    return container[step] if step < len(container) else None


def _put_item(container: Any, step: Any, value: Any) -> None:
    if isinstance(container, list):
        items = cast("list[Any]", container)
        items.extend([None] * (step + 1 - len(items)))
    container[step] = value


def _damaged(source: str, detail: str) -> NoReturn:
    raise CorruptionError(path=source, detail=detail)


# --- Pickles ---------------------------------------------------------------------------------------------------------
# Leaves that a target could have only as pickles: all of them are refused by name, before anything is written.
#
# torch.save pickles whatever it is given, and torch.load reads only few types of it in its safe mode (`weights_only`).
# memstore stores more types, but not all. So what one side has the other may lack: an array of numpy is an entry for
# memstore, and a pickle for torch.


Why = Callable[[Any], str | None]
"""Says why a leaf would be a pickle; None: it isn't one."""

_READ_BY_TORCH = frozenset(
    {NoneType, bool, float, complex, str, bytes, bytearray, torch.Size, torch.device, torch.dtype, torch.layout}
)
_WITH_ITEMS = frozenset({tuple, set, Counter})  # of which torch reads what their items are
_STORED_BY_MEMSTORE = frozenset({NoneType, bool, int, float, bytes})  # whatever their values
_MOST_BITS = 2039  # of an int: more bits have an opcode that torch's safe mode lacks


def refuse_pickles(path: Path, value: Any, why: Why, refusals: LeafRefusals) -> None:
    """Adds the leaves that would be pickles.

    Args:
        path: of the value, for their names.
        value: dicts, lists and tuples in one another, and leaves; whatever else there is counts as a leaf.
    """
    kind = cast("Any", type(value))  # pyright: ignore[reportUnknownArgumentType]
    if kind in (dict, OrderedDict):
        for key, entry in cast("dict[Any, Any]", value).items():
            reason = why(key)
            if reason is None:
                refuse_pickles((*path, part_of(key)), entry, why, refusals)
            else:
                refusals.add((*path, part_of(key)), f"its key is {reason}")
        for name, entry in getattr(value, "__dict__", {}).items():  # of a module's state dict: `_metadata`
            refuse_pickles((*path, str(name)), entry, why, refusals)
    elif kind in (list, tuple):
        for i, entry in enumerate(cast("list[Any]", value)):
            refuse_pickles((*path, i), entry, why, refusals)
    else:
        reason = why(value)
        if reason is not None:
            refusals.add(path, reason)


def unread_by_torch(leaf: Any) -> str | None:
    """Says why torch.load doesn't read a leaf with `weights_only=True`."""
    kind = cast("Any", type(leaf))
    if kind in _READ_BY_TORCH or isinstance(leaf, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
        return None
    if kind is int:
        few = leaf.bit_length() <= _MOST_BITS
        return None if few else f"an int of more than {_MOST_BITS:,} bits, which torch.load reads only as a pickle"
    if kind in _WITH_ITEMS:
        return next((reason for reason in map(unread_by_torch, leaf) if reason is not None), None)
    if kind in torch.serialization.get_safe_globals():  # pyright: ignore[reportUnknownMemberType]
        return None
    return (
        f"of the class {kind.__module__}.{kind.__qualname__}, which torch.load reads only as a pickle; "
        "allow_pickle=True writes it"
    )


def unstored_by_memstore(leaf: Any) -> str | None:
    """Says why memstore's formats don't store a leaf without pickle."""
    kind = cast("Any", type(leaf))
    if kind in _STORED_BY_MEMSTORE or (kind is str and leaf.isascii()) or isinstance(leaf, torch.Tensor):
        return None
    try:
        structure.take_apart(leaf, lambda careful: Walk(False, careful))
    except RefusedError as error:
        inside = "".join(f"[{key!r}]" for key in reversed(error.path))
        return f"{error.reason} (at {inside} in it)" if inside else error.reason
    return None
