"""What to put instead of an object that can't be stored. allow_pickle=True is named only where it works."""

from __future__ import annotations

import array
import io
import random
import threading
import types
import weakref
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import numpy as np
import torch

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
    """The reason, for an object that only pickle could store, with what to put instead."""
    kind = type_name(type(value))
    instead = alternative(value)
    if instead:
        return f"an object of type {kind}: {instead}"
    if isinstance(value, (dict, list, tuple)):
        return f"a {kind}, a subclass of a builtin container, which only allow_pickle=True can store"
    return f"an object of type {kind}, which only allow_pickle=True can store"


def alternative(value: Any) -> str | None:
    """What to put instead, where that is better than pickle, or where pickle can't store the object."""
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
