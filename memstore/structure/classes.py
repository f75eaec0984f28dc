"""Classes of stored objects, found by name, and their attributes; and pickles, which alone may run code.

A name, "module:qualname", is looked up only in modules that are imported already. A stored name must never be able to
import a module or run code, so neither `import` nor `getattr` is used: a module may have a `__getattr__`, a class a
descriptor.

A pickle can run any code when it is read. So `write_pickle` and `read_pickle` are for callers that were told
`allow_pickle=True`. `read_known_pickle` is for pickles of formats that others have made of them: it knows by name what
they may refer to, and nothing else is looked up. No other file imports pickle.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from memstore._compat import TENSORCLASS_MARK
from memstore.errors import UnsupportedValueError
from memstore.structure.refusals import MalformedError, RefusedError

# --- Classes ---------------------------------------------------------------------------------------------------------


def dotted(name: str) -> str:
    """Returns a class's name as messages show it: "module.Class"."""
    return name.replace(":", ".")


def short(name: str) -> str:
    """Returns a class's name without its module."""
    return name.rpartition(":")[2]


def class_name(kind: type) -> str:
    """Returns the name by which `find_class` finds `kind`.

    Raises RefusedError if it would find nothing, or another class.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    found = _look_up(name)
    if found is kind:
        return name
    if found is None:
        raise RefusedError(f"the class {name} can't be found by its name; define it at the top level of a module")
    raise RefusedError(f"there are two classes of the name {name}; the stored value couldn't tell which one it has")


def find_class(name: str, suits: Callable[[type], bool], what: str) -> Any:
    """Finds the class of a stored name.

    Args:
        suits: whether a class is of the kind that the value was stored as; `what` names this kind in the error.

    Raises UnsupportedValueError where there is no such class, MalformedError for what is not a name.
    """
    module, colon, _ = name.partition(":")
    if not colon:
        raise MalformedError(f"{name!r} is not the name of a class")
    found = _look_up(name)
    if found is None:
        advice = f"import the module {module!r}, which must define it, before the get"
        if module == "__main__":
            advice = "a script defined it: move it to a module that both import, and put the value again"
        raise UnsupportedValueError(f"the stored value has a {dotted(name)}, which this process doesn't know; {advice}")
    if not isinstance(found, type) or not suits(found):
        raise UnsupportedValueError(f"the stored value has a {dotted(name)}, but that is not {what} here")
    return found


def make_bare(kind: Any) -> Any:
    """Makes an instance of a class that `find_class` found, neither initialised nor filled."""
    try:
        return kind.__new__(kind)
    except Exception as error:  # the class's own code
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UnsupportedValueError(f"the stored value has a {name}, whose __new__ fails here: {error!r}") from error


def _look_up(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if isinstance(found, type):
            namespace = type.__dict__["__dict__"].__get__(found)
        elif isinstance(found, ModuleType):
            namespace = object.__getattribute__(found, "__dict__")
        else:
            return None
        found = namespace.get(part)
    return found


# --- Attributes of namespaces and dataclasses, past the code of their classes ----------------------------------------


NAMESPACES: dict[str, Any] = {"argparse": argparse.Namespace, "types": types.SimpleNamespace}


@functools.lru_cache(maxsize=512)
def slots_of(kind: type) -> dict[str, Any]:
    """Returns the descriptors of the slots of a class and of its bases, by their names."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    }


def read_attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes that are set, of the object's `__dict__` and of its slots."""
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
    """Returns the fields of a dataclass, in order."""
    return tuple(field.name for field in dataclasses.fields(kind))


def defines(kind: type, name: str) -> bool:
    """Returns whether the class or a base of it has the attribute. Unlike `hasattr`, it doesn't ask a metaclass."""
    return any(name in vars(base) for base in kind.__mro__)


def is_dataclass(kind: type) -> bool:
    """Returns whether it is a plain dataclass. A tensorclass is a dataclass too, but is stored otherwise."""
    return defines(kind, "__dataclass_fields__") and not defines(kind, TENSORCLASS_MARK)


def is_made_plainly(kind: type, base: Any) -> bool:
    """Returns whether `base.__new__` makes the objects of the class, and no code runs when one is deleted."""
    if defines(kind, "__del__"):
        return False
    try:
        base.__new__(kind)
    except TypeError:  # abstract, or with another layout in C
        return False
    return True


def shown_attributes(value: Any) -> Mapping[str, Any] | None:
    """Returns the attributes of a namespace or dataclass, for code that looks for tensors in a value; else None.

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
