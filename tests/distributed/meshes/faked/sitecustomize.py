"""Found by interpreters of workers in whose environment a test has named something that is to be otherwise there."""

from __future__ import annotations

import importlib.abc
import os
import sys


class _Without(importlib.abc.MetaPathFinder):
    """As where memstore isn't installed."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] == "memstore":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


if "FAKE_NO_MEMSTORE" in os.environ:
    sys.meta_path.insert(0, _Without())
if "FAKE_VERSION" in os.environ:
    import memstore._version

    memstore._version.__version__ = os.environ["FAKE_VERSION"]
    import memstore.distributed.meshes.messages as messages

    messages.VERSION += 1
