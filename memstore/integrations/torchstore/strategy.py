"""TorchStore's strategies, and the errors of what else memstore lacks.

A strategy chooses the storage volume of a put. In memstore a process puts into its host's files, which is what
LocalRankStrategy and HostStrategy mean. On one host the others mean the same; for a mesh of other hosts they are
refused. As in TorchStore, every process finds what was put.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memstore.errors import MemstoreError
from memstore.integrations.torchstore.transport import TransportType

# --- What has no counterpart -----------------------------------------------------------------------------------------


_ALIKE = 0.8  # a typo; less would take TorchStore's StorageVolume for our ControllerStorageVolumes
_PACKAGE = f"{__package__}."


class NoCounterpartError(MemstoreError, NotImplementedError, AttributeError):
    """The error of a part of TorchStore that memstore lacks (volumes, controllers, transports).

    The message says what replaces it.
    """


class NoCounterpartImportError(MemstoreError, NotImplementedError, ImportError):
    """An import of a name or a module of TorchStore that memstore lacks. The message says what replaces it."""


def no_counterpart(owner: str, name: str, known: Sequence[str] = ()) -> NoCounterpartError:
    """Returns the error for a name that isn't here. If it is like one of the known ones, that is meant."""
    return NoCounterpartError(_without_counterpart(owner, name, known))


def _without_counterpart(owner: str, name: str, known: Sequence[str] = ()) -> str:
    likely = difflib.get_close_matches(name, known, 1, _ALIKE)
    if likely:
        return f"{owner} has no {name!r}: did you mean {likely[0]!r}?"
    return (
        f"{owner} has no {name!r} in memstore: values lie in files that every process of the host maps, so there are "
        "no volumes, controllers or transports to ask. docs/coming-from/torchstore.md says what takes their place"
    )


class _AbsentModules(MetaPathFinder):
    """The last finder: it is asked for modules of this package that no other finder has found.

    `from package import name` asks for a module of that name, too, if the package has no such attribute.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        owner, _, name = fullname.rpartition(".")
        if fullname.startswith(_PACKAGE) and not name.startswith("__"):
            known: Sequence[str] = getattr(sys.modules.get(owner), "__all__", ())
            raise NoCounterpartImportError(_without_counterpart(f"module {owner}", name, known))
        return None


def explain_absent_modules() -> None:
    """Makes imports of what TorchStore has and memstore lacks say, from now on, what takes its place.

    Python's own error names a module, and says nothing more.
    """
    if not any(isinstance(one, _AbsentModules) for one in sys.meta_path):
        sys.meta_path.append(_AbsentModules())


# --- Strategies ------------------------------------------------------------------------------------------------------


class TorchStoreStrategy:
    """The base class. On one host you may derive from it, but `get_volume_id` and `get_client_id` are never called.

    Args:
        default_transport_type: accepted without effect.
    """

    def __init__(self, default_transport_type: TransportType = TransportType.Unset) -> None:
        self.default_transport_type = default_transport_type

    def __getattr__(self, name: str) -> Any:
        raise no_counterpart(type(self).__name__, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class HostStrategy(TorchStoreStrategy):
    """One volume per host, which is what memstore does in any case."""


class LocalRankStrategy(TorchStoreStrategy):
    """One volume per rank in TorchStore. A rank's values lie on its host, here too."""


class ControllerStorageVolumes(TorchStoreStrategy):
    """One volume for all processes in TorchStore. It is refused for a mesh on other hosts than the controller's."""


_CHOOSERS = ("get_volume_id", "get_client_id")


def check_across_hosts(strategy: TorchStoreStrategy | None) -> None:
    """Raises NoCounterpartError for a strategy by which a value would lie on another host than the one that put it."""
    own = [name for name in _CHOOSERS if any(name in vars(kind) for kind in type(strategy).__mro__)]
    if isinstance(strategy, ControllerStorageVolumes) or own:
        what = f"its own {' and '.join(own)}" if own else "one volume, on the controller's host"
        raise NoCounterpartError(
            f"{type(strategy).__name__} has {what}: on several hosts a value lies here on the host that put it, and "
            "others fetch it when they get it. Give LocalRankStrategy() or HostStrategy(), which mean that, or none; "
            "on one host all strategies are the same"
        )
