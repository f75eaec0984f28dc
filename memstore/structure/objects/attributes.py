"""The attributes of plain objects (namespaces, dataclasses), read and written past the code of their classes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

NAMESPACES: dict[str, Any] = {"argparse": argparse.Namespace, "types": types.SimpleNamespace}


@functools.lru_cache(maxsize=512)
def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the slots of a class and of its bases, by their names."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }


def read_attributes(value: Any) -> dict[str, Any]:
    """The attributes that are set, of its `__dict__` and of its slots."""
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for name, slot in slots_of(type(value)).items():
        with contextlib.suppress(AttributeError):  # not set
            found[name] = slot.__get__(value)
    return found


def write_attributes(made: Any, attributes: Mapping[str, Any]) -> Any:
    """Gives attributes to an object that no caller has yet; its `__setattr__` doesn't run."""
    slots = slots_of(type(made))
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(made, value)
        else:
            object.__getattribute__(made, "__dict__")[name] = value
    return made


def field_names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass, in order."""
    return tuple(field.name for field in dataclasses.fields(kind))


def defines(kind: type, name: str) -> bool:
    """Whether the class or a base of it has the attribute. As `hasattr`, but a metaclass is not asked."""
    return any(name in vars(base) for base in kind.__mro__)


def is_dataclass(kind: type) -> bool:
    """Whether it is a plain dataclass. A tensorclass is a dataclass too, but is stored otherwise."""
    return defines(kind, "__dataclass_fields__") and not defines(kind, "_is_tensorclass")


def is_made_plainly(kind: type, base: Any) -> bool:
    """Whether `base.__new__` makes the objects of the class, and no code runs when one is deleted."""
    if defines(kind, "__del__"):
        return False
    try:
        base.__new__(kind)
    except TypeError:  # abstract, or with another layout in C
        return False
    return True


def shown_attributes(value: Any) -> Mapping[str, Any] | None:
    """The attributes of a namespace or dataclass, for code that looks for tensors in a value; None for other objects.

    A dict is the object's own, and changes it. Frozen objects and those with slots give a copy that can't be changed.
    """
    kind = type(value)
    if kind in (argparse.Namespace, types.SimpleNamespace):
        return vars(value)
    if not is_dataclass(kind):
        return None
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    if slots_of(kind) or getattr(parameters, "frozen", True):
        return types.MappingProxyType(read_attributes(value))
    return vars(value)
