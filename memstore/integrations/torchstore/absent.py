"""Imports of what TorchStore has and memstore lacks: Python's own error names a module, and says nothing more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from memstore.integrations.torchstore.refusals import NoCounterpartImportError, without_counterpart

_PACKAGE = f"{__package__}."


class _Absent(MetaPathFinder):
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
    """From now on such an import says what takes the module's place."""
    if not any(isinstance(one, _Absent) for one in sys.meta_path):
        sys.meta_path.append(_Absent())
