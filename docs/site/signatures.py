"""Classes that users don't call are shown without arguments: an extension of Sphinx.

These are errors, lazy tensors, what a store tells of itself, and what other calls make, as its docstring says.
"""

from __future__ import annotations

from typing import Any

import torch
from sphinx.application import Sphinx


def leave_out(
    app: Sphinx, what: str, name: str, shown: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """The signature of a class, where it has to be replaced."""
    return ("", None) if signature and isinstance(shown, type) and is_made_by_others(shown) else None


def is_made_by_others(shown: type) -> bool:
    is_told = shown.__module__ == "memstore.info" or "Made by `" in (shown.__doc__ or "")
    return is_told or issubclass(shown, BaseException | torch.Tensor)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-signature", leave_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
