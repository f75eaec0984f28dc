"""Containers whose modules are imported only once a value or a description has one: those of tensordict.

It takes a second to import tensordict, and values without its containers don't need it. The walk and the reader of
trees ask here for these modules, and so need not know them: they stand on a higher floor.
"""

from __future__ import annotations

from collections.abc import Callable

_loaders: list[Callable[[], None]] = []


def loads_containers(load: Callable[[], None]) -> Callable[[], None]:
    """Decorator: the function imports modules that register containers. It is called each time one is looked for."""
    _loaders.append(load)
    return load


def load_late_containers() -> None:
    for load in _loaders:
        load()
