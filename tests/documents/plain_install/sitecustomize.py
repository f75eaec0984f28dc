"""Hides what a plain installation wouldn't have brought, in every Python process that a reader of a page starts.

With this folder on PYTHONPATH each interpreter imports this file at its start. INSTALLED has what may be found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

INSTALLED = {*sys.stdlib_module_names, *os.environ["INSTALLED"].split()}


class PlainInstallation(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and fullname not in INSTALLED and not fullname.startswith("_sysconfigdata"):
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [PlainInstallation if finder is PathFinder else finder for finder in sys.meta_path]
