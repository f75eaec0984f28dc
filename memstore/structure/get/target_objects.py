"""The leaves of a target that are no tensors: where they stand, and how they are set."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from memstore.engine import Path
from memstore.structure.objects import shown_attributes
from memstore.structure.refusals import render_path
from memstore.structure.tree import name_of

Setting = Callable[[], None]
_ABSENT = (LookupError, TypeError, AttributeError, StopIteration)  # raised where a target has no such entry


def plan_settings(
    target: Any,
    names: Sequence[Path],
    values: Sequence[Any],
    present: set[Path],
    strict: bool,
    differences: list[str],
    *,
    may_lack: bool = False,
) -> list[Setting]:
    """The functions that set the values, to be called later; what can't be set is added to `differences`.

    `may_lack`: the target need not have all that is stored.
    """
    settings: list[Setting] = []
    for name, value in zip(names, values, strict=True):
        if name not in present:
            if strict and not may_lack and not is_optional(name):
                differences.append(f"{render_path(name)}: an object is stored, but there is none in out")
            continue
        setting, current = _setting(target, name, value)
        if setting is not None:
            settings.append(setting)
        elif not _equal(current, value):
            differences.append(
                f"{render_path(name)}: {value!r:.80} is stored, but the object there can't be set in place"
            )
    if strict:
        extra = sorted((name for name in present - set(names) if not is_optional(name)), key=repr)
        differences += [f"{render_path(name)}: an object in out, but none is stored" for name in extra]
    return settings


def choose_objects(target: Any, names: Sequence[Path], stored: Mapping[Path, Any], differences: list[str]) -> list[Any]:
    """The value for each name: the stored one, or where there is none the target's own."""
    chosen: list[Any] = []
    for name in names:
        try:
            chosen.append(stored[name] if name in stored else _value_at(target, name))
        except _ABSENT:
            differences.append(f"{render_path(name)}: not stored, and can't be taken from like")
    return chosen


def entries_at(target: Any, names: Iterable[Path]) -> dict[int, Any]:
    """What a target has at these names, by ids, which are theirs while it is kept."""
    found: dict[int, Any] = {}
    for name in names:
        with suppress(*_ABSENT):
            value = _value_at(target, name)
            found[id(value)] = value
    return found


def _value_at(target: Any, name: Path) -> Any:
    for step in name:
        target = _entry(target, step)
    return _unboxed(target)


def _unboxed(current: Any) -> Any:
    fields = getattr(current, "_non_tensordict", None)
    if fields is not None and "data" in fields:
        return fields["data"]
    members = getattr(current, "tensordicts", None)
    return current if members is None else list(map(_unboxed, members))


def is_optional(name: Path) -> bool:
    """Attributes of an OrderedDict, like the versions in a state_dict: a target may lack them, or have its own."""
    return "__dict__" in name


def _setting(target: Any, name: Path, value: Any) -> tuple[Setting | None, Any]:
    """What sets `value` at `name`, or None where what holds it can't be changed; and what is there now."""
    if not name:
        return _boxed(target, value), target
    above = target
    for step in name[:-1]:
        above = _entry(above, step)
    holder = _holder(above, name[-1])
    if isinstance(holder, (dict, list, deque)):
        key: Any = _key(holder, name[-1]) if isinstance(holder, dict) else name[-1]
        current = holder[key]
        if _is_box(current):
            return _boxed(current, value), current
        return lambda: holder.__setitem__(key, value), current
    return None, _entry(above, name[-1])


def _holder(container: Any, name: str | int) -> Any:
    """The dict or sequence that has the entry `name` of a container."""
    if hasattr(container, "_param_td"):
        return _holder(container._param_td, name)
    fields = getattr(container, "_non_tensordict", None)
    if fields is not None and "_is_non_tensor" in fields:  # a NonTensorData; what it holds has no name of its own
        return _holder(fields["data"], name)
    if fields is not None:  # a tensorclass
        return fields if name in fields else _holder(container._tensordict, name)
    if isinstance(container, dict):
        if name == "__dict__" and name not in container and hasattr(container, "__dict__"):
            return {"__dict__": vars(container)}
        return container
    if isinstance(container, UserDict):
        return container.data
    attributes = shown_attributes(container)
    if attributes is not None:
        return attributes
    return getattr(container, "_tensordict", getattr(container, "tensordicts", container))


def _entry(container: Any, name: str | int) -> Any:
    holder = _holder(container, name)
    return holder[_key(holder, name) if isinstance(holder, dict) else name]


def _key(holder: dict[Any, Any], name: str | int) -> Any:
    """The key that is called `name`: itself, or one that is no str or int and called by its repr."""
    if type(name) is str and name in holder:
        return name
    return next(key for key in holder if name_of(key) == name and isinstance(key, bool) == isinstance(name, bool))


def _is_box(current: Any) -> bool:
    return hasattr(current, "_non_tensordict") or hasattr(current, "tensordicts")


def _boxed(current: Any, value: Any) -> Setting | None:
    """What sets the value of a NonTensorData or MetaData, or those of a stack of them that has as many members."""
    fields = getattr(current, "_non_tensordict", None)
    if fields is not None and "data" in fields:
        return lambda: fields.__setitem__("data", value)
    members = getattr(current, "tensordicts", None)
    if members is None or not isinstance(value, list) or len(members) != len(value):
        return None
    settings = [_boxed(member, entry) for member, entry in zip(members, value, strict=True)]
    if None in settings:
        return None

    def set_all() -> None:
        for setting in settings:
            if setting is not None:
                setting()

    return set_all


def _equal(current: Any, value: Any) -> bool:
    try:
        return type(current) is type(value) and bool(current == value)
    except Exception:  # numpy arrays, and what __eq__ raises for values of other types: then they differ
        return False
