"""Errors of this package: for calls that have no meaning in memstore, or that come too early.

explain_absent_modules    imports of what TorchStore has and memstore lacks say so, too: Python's own error names a
                          module, and says nothing more
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from memstore.errors import KeyNotFoundError, MemstoreError, NotAStoreError

_ALIKE = 0.8  # a typo; less would take TorchStore's StorageVolume for our ControllerStorageVolumes


class NoCounterpartError(MemstoreError, NotImplementedError, AttributeError):
    """The error of a part of TorchStore that memstore lacks (volumes, controllers, transports).

    The message says what replaces it.
    """


class NoCounterpartImportError(MemstoreError, NotImplementedError, ImportError):
    """An import of a name or a module of TorchStore that memstore lacks. The message says what replaces it."""


class NotInitializedError(NotAStoreError, RuntimeError):
    """No process has called `initialize` for a store of this name, or it was shut down."""


class AlreadyInitializedError(MemstoreError, RuntimeError):
    """A store of this name exists, and the process that initialized it is alive."""


class StateDictNotFoundError(KeyNotFoundError, RuntimeError):
    """There is no state dict under this key. It is also a RuntimeError, as in TorchStore."""


def no_counterpart(owner: str, name: str, known: Sequence[str] = ()) -> NoCounterpartError:
    return NoCounterpartError(without_counterpart(owner, name, known))


def without_counterpart(owner: str, name: str, known: Sequence[str] = ()) -> str:
    """Says of a name that isn't here that one of the known ones is meant, if it is like it."""
    likely = difflib.get_close_matches(name, known, 1, _ALIKE)
    if likely:
        return f"{owner} has no {name!r}: did you mean {likely[0]!r}?"
    return (
        f"{owner} has no {name!r} in memstore: values lie in files that every process of the host maps, so there are "
        "no volumes, controllers or transports to ask. docs/coming-from/torchstore.md says what takes their place"
    )


# --- Imports ---------------------------------------------------------------------------------------------------------


_PACKAGE = f"{__package__}."


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
            raise NoCounterpartImportError(without_counterpart(f"module {owner}", name, known))
        return None


def explain_absent_modules() -> None:
    """Makes such an import say, from now on, what takes the module's place."""
    if not any(isinstance(one, _AbsentModules) for one in sys.meta_path):
        sys.meta_path.append(_AbsentModules())
