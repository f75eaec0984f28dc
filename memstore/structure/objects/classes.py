"""Classes by name, "module:qualname". A name is looked up only in modules that are imported already.

A stored name must never be able to import a module or run code, so neither `import` nor `getattr` is used: a module may
have a `__getattr__`, a class a descriptor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError
from memstore.structure.refusals import RefusedError


def dotted(name: str) -> str:
    """A class's name as messages show it: "module.Class"."""
    return name.replace(":", ".")


def short(name: str) -> str:
    """A class's name without its module."""
    return name.rpartition(":")[2]


def class_name(kind: type) -> str:
    """The name by which `find_class` finds `kind`; RefusedError if it would find nothing, or another class."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    found = _look_up(name)
    if found is kind:
        return name
    if found is None:
        raise RefusedError(f"the class {name} can't be found by its name; define it at the top level of a module")
    raise RefusedError(f"there are two classes of the name {name}; the stored value couldn't tell which one it has")


def find_class(name: str, suits: Callable[[type], bool], what: str) -> Any:
    """The class of a stored name.

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
    """An instance of a class that `find_class` found, neither initialised nor filled."""
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
