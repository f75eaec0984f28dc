"""Objects that only pickle can store. No other file imports pickle.

A pickle can run any code when it is read. So `write_pickle` and `read_pickle` are for callers that were told
`allow_pickle=True`. `read_known_pickle` is for pickles of formats that others have made of them: it knows by name what
they may refer to, and nothing else is looked up.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError


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
    """What a pickle has that refers to nothing but what `find` knows.

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
