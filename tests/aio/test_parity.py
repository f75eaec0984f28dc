"""Each method of Store has its awaited twin, called in the same way: who adds one to Store adds it here."""

from __future__ import annotations

import gc
import inspect

import pytest

import memstore
import memstore.aio
from memstore.aio import AsyncStore

# What tasks call in place of the methods that Python calls by itself. Those that can't be awaited have no twin.
TWINS = {
    "__contains__": "contains",
    "__len__": "count",
    "__iter__": "__aiter__",
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
    "__getitem__": "get",
    "__setitem__": "put",
    "__delitem__": "delete",
    "__reduce__": "__reduce__",
    "__repr__": "__repr__",
    "__init__": "__init__",
}


def methods(kind: type) -> set[str]:
    """Those that the class, or a part of it, defines."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("memstore")]
    return {name for one in ours for name, value in vars(one).items() if inspect.isfunction(value)}


PUBLIC = sorted(name for name in methods(memstore.Store) if not name.startswith("_"))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_method_has_a_twin_with_the_same_arguments(name: str) -> None:
    theirs = inspect.signature(getattr(memstore.Store, name)).parameters
    ours = inspect.signature(getattr(AsyncStore, name)).parameters
    assert list(ours.values()) == list(theirs.values())
    awaits = inspect.isasyncgenfunction if name in ("items", "values") else inspect.iscoroutinefunction
    assert name == "keys" or awaits(getattr(AsyncStore, name))


def test_what_python_calls_has_a_twin() -> None:
    special = {name for name in methods(memstore.Store) if name.startswith("__")}
    special.remove("__bool__")  # what has no length is true by itself
    assert special <= set(TWINS)
    assert {TWINS[name] for name in special} <= methods(AsyncStore) | {"__init__"}


def test_stores_are_opened_with_the_same_arguments() -> None:
    theirs = inspect.signature(memstore.open).parameters
    assert list(inspect.signature(memstore.aio.open).parameters.values()) == list(theirs.values())


def test_the_text_is_that_of_the_method() -> None:
    assert AsyncStore.put.__doc__ == memstore.Store.put.__doc__
    assert AsyncStore.wait.__doc__ == memstore.Store.wait.__doc__


@pytest.mark.parametrize("name", ["get", "put", "version", "view"])
def test_a_call_that_nobody_awaits_is_named_as_it_was_called(name: str) -> None:
    store = memstore.aio.open("/nowhere")  # which opens nothing
    with pytest.warns(RuntimeWarning, match=rf"coroutine 'AsyncStore\.{name}' was never awaited"):
        getattr(store, name)("policy")
        gc.collect()
