"""Objects that only pickle can store, and what to put instead of them. No other file imports pickle.

A pickle can run any code when it is read. So `write_pickle` and `read_pickle` are for callers that were told
`allow_pickle=True`. `read_known_pickle` is for pickles of formats that others have made of them: it knows by name what
they may refer to, and nothing else is looked up. `why_refused` names allow_pickle=True only where it works.
"""

from __future__ import annotations

import array
import io
import pickle
import random
import threading
import types
import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import numpy as np
import torch

from memstore.errors import UnsupportedValueError
from memstore.structure.refusals import MalformedError

# --- Pickles ---------------------------------------------------------------------------------------------------------


def write_pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def read_pickle(data: bytes) -> Any:
    """Raises MalformedError for bytes that are no pickle, UnsupportedValueError for one that can't be read here."""
    try:
        return pickle.loads(data)
    except (pickle.UnpicklingError, EOFError) as error:
        raise MalformedError(f"no pickle: {error}") from error
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # classes that this process lacks, and whatever their own code raises
        raise UnsupportedValueError(f"a leaf that was stored with pickle can't be read here: {error!r}") from error


def read_known_pickle(
    data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Reads a pickle that refers to nothing but what `find` knows.

    Args:
        find: gives what a module and a name in it stand for; None: it is unknown. Calls of it, and its `__setstate__`,
            must be harmless whatever they are given.
        persistent: gives what an id stands for that the pickle has in the place of an object.

    Raises:
        UnsupportedValueError: it refers to something else; the message has its name.
        MalformedError: it is no pickle, or makes no sense.
    """
    try:
        return _KnownUnpickler(data, find, persistent).load()
    except (UnsupportedValueError, MemoryError):
        raise
    except Exception as error:  # of the pickle's opcodes, with whatever arguments
        raise MalformedError(f"no pickle that makes sense: {type(error).__name__}: {error}") from error


class _KnownUnpickler(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """The unpickler in Python: that in C takes gigabytes for eight bytes that say where to remember a number."""

    # A bytearray takes as much memory as the pickle says that it has; nothing that is known has one.
    dispatch = {  # pyright: ignore[reportUnannotatedClassAttribute]
        code: load
        for code, load in pickle._Unpickler.dispatch.items()  # pyright: ignore[reportPrivateUsage]
        if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, data: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._find, self._persistent = find, persistent

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(module, name)
        if found is None:
            raise UnsupportedValueError(f"it refers to {module:.100}.{name:.100}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise MalformedError("an object that is stored elsewhere")
        return self._persistent(pid)


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
