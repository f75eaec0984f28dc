"""Imports of what TorchStore has and memstore lacks: Python's own error names a module, and says nothing more."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from memstore.integrations.torchstore.refusals import NoCounterpartImportError, without_counterpart

_PACKAGE = f"{__package__}."
_ALIKE = 0.8  # a typo; less would take TorchStore's StorageVolume for our ControllerStorageVolumes


class _Absent(MetaPathFinder):
    """The last finder: it is asked for modules of this package that no other finder has found.

    `from package import name` asks for a module of that name, too, if the package has no such attribute.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        owner, _, name = fullname.rpartition(".")
        if fullname.startswith(_PACKAGE) and not name.startswith("__"):
            raise NoCounterpartImportError(_advice(owner, name))
        return None


def _advice(owner: str, name: str) -> str:
    there = getattr(sys.modules.get(owner), "__all__", ())
    near = difflib.get_close_matches(name, there, 1, _ALIKE)
    if near:
        return f"module {owner} has no {name!r}: did you mean {near[0]!r}?"
    return without_counterpart(f"module {owner}", name)


def explain_absent_modules() -> None:
    """From now on such an import says what takes the module's place."""
    if not any(isinstance(one, _Absent) for one in sys.meta_path):
        sys.meta_path.append(_Absent())
