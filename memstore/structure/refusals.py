"""Refusals: stored bytes that no put wrote (MalformedError), and values that can't be stored (RefusedError).

`why_refused` names allow_pickle=True only where it works.
"""

from __future__ import annotations

import array
import io
import random
import threading
import types
import weakref
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

import numpy as np
import torch

# --- Checks of bytes that may come from a hostile file ---------------------------------------------------------------


class MalformedError(Exception):
    """A description or an object that no put wrote. It becomes a CorruptionError where the bytes are known."""


def require(condition: bool, complaint: str) -> None:
    """Raises MalformedError unless the condition holds. No assert statement: those go away under -O."""
    if not condition:
        raise MalformedError(complaint)


def as_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise MalformedError("an array is expected, but something else is there")
    return value


def unpack(payload: list[Any], *types: type | tuple[type, ...]) -> list[Any]:
    """Returns the payload, once it is known to have exactly these types."""
    require(
        len(payload) == len(types)
        and all(
            type(item) in (kind if type(kind) is tuple else (kind,)) for item, kind in zip(payload, types, strict=True)
        ),
        "a node whose fields are not those of its kind",
    )
    return payload


def sizes(value: Any) -> tuple[int, ...]:
    """Reads a shape: integers from 0 to 2**63 - 1."""
    require(
        type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value), "a malformed shape"
    )
    return tuple(value)


# --- Values that can't be stored: the reason, and the path of the part -----------------------------------------------


class RefusedError(Exception):
    """A part of the value can't be stored. Each container above adds its key to `path`: so the message names the leaf.

    Becomes an UnsupportedValueError where the value is known.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[Any] = []  # innermost first

    def message(self) -> str:
        return f"{render_path(reversed(self.path))}: {self.reason}"


class TooDeepError(RefusedError):
    """More levels than allowed. The containers above are collected, so that the message can tell a cycle from depth."""

    def __init__(self, levels: int) -> None:
        super().__init__(f"more than {levels} levels of containers")
        self.containers: list[Any] = []

    def message(self) -> str:
        containers, path = self.containers[::-1], self.path[::-1]  # outermost first
        seen: dict[int, int] = {}
        for level, container in enumerate(containers):
            first = seen.setdefault(id(container), level)
            if first != level:
                return f"{render_path(path[:level])}: a container that contains itself: {render_path(path[:first])}"
        return f"{render_path(path[:3])}...: {self.reason}"


class SharedTooOftenError(RefusedError):
    """Containers that are shared on level after level: a value of a few lines, whose tree has almost no end."""

    def __init__(self, entries: int) -> None:
        super().__init__(
            f"containers that stand in so many places that their entries, counted for each place, are more than "
            f"{entries:,}; put what is shared under a key of its own, and store that key in the places"
        )

    def message(self) -> str:
        return f"{render_path(self.path[::-1][:3])}{'...' if len(self.path) > 3 else ''}: {self.reason}"


def render_path(path: Iterable[Any]) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)


# --- What to put instead ---------------------------------------------------------------------------------------------


_OF_THIS_PROCESS = "it is a part of this process, and can't be stored; put what another process makes it of"
_ITERATOR = "what it yields is not there yet; put list(...) of it"
_NAMELESS = "it can't be found by its name (a lambda, or defined in a function)"
_AT_THE_TOP = "define it at the top level of a module"

# The first that fits is taken: an open file is an iterator too.
_INSTEAD: tuple[tuple[tuple[type, ...], str], ...] = (
    ((torch.nn.Module, torch.optim.Optimizer), "put its state_dict()"),
    ((torch.Generator, np.random.RandomState), "put its get_state()"),
    ((np.random.Generator,), "put its bit_generator.state"),
    ((np.random.BitGenerator,), "put its state"),
    ((random.Random,), "put its getstate()"),
    ((memoryview,), "put bytes(...) of it"),
    ((array.array,), "put numpy.array(...) of it"),
    ((types.MappingProxyType,), "put dict(...) of it"),
    ((KeysView, ValuesView, ItemsView), "put list(...) of it"),
    ((types.ModuleType,), "put its name"),
    ((io.IOBase, threading.Thread, type(threading.Lock()), type(threading.RLock()), weakref.ref), _OF_THIS_PROCESS),
    ((types.FrameType, types.TracebackType, types.CodeType, types.CoroutineType), _OF_THIS_PROCESS),
    ((Iterator, types.AsyncGeneratorType), _ITERATOR),
)


_OF_OURS = {  # by their classes' names: their rooms stand above this one
    "Store": "put its root",
    "AsyncStore": "put its root",
    "Ref": "put its key, or what its get() returns",
    "Snapshot": "put its path",
    "Dataset": "put its key, which open_dataset takes",
    "ReplayBuffer": "put its key, which ReplayBuffer takes",
    "StoreDataset": "put its key",
}


def why_refused(value: Any) -> str:
    """Says why an object that only pickle could store is refused, and what to put instead."""
    kind = type_name(type(value))
    instead = alternative(value)
    if instead:
        return f"an object of type {kind}: {instead}"
    if isinstance(value, (dict, list, tuple)):
        return f"a {kind}, a subclass of a builtin container, which only allow_pickle=True can store"
    return f"an object of type {kind}, which only allow_pickle=True can store"


def alternative(value: Any) -> str | None:
    """Says what to put instead, where that is better than pickle, or where pickle can't store the object."""
    for kinds, text in _INSTEAD:
        if isinstance(value, kinds):
            return text
    if callable(getattr(type(value), "state_dict", None)):  # a scheduler, a GradScaler, a sampler
        return "put its state_dict()"
    kind = type(value)
    if kind.__name__ in _OF_OURS and str(kind.__module__).startswith("memstore."):
        return _OF_OURS[kind.__name__]
    if hasattr(kind, "__dlpack__"):
        return "put torch.from_dlpack(...) of it"
    if hasattr(kind, "__array__"):
        return "put numpy.asarray(...) of it"
    named: Any = value if isinstance(value, (type, types.FunctionType)) else type(value)
    if "<locals>" in named.__qualname__ or "<lambda>" in named.__qualname__:
        if named is value:
            return f"{_NAMELESS}: put what it is made of, or {_AT_THE_TOP} and use allow_pickle=True"
        return f"its class: {_NAMELESS}; {_AT_THE_TOP}"
    return None


def type_name(kind: type) -> str:
    module = getattr(kind, "__module__", "builtins")  # a class that was made in no module has none
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
