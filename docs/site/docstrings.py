"""Docstrings, as the site shows them: an extension of Sphinx. In a terminal `help` shows them as they are.

1. `docs/views.md` becomes a link to that page.
2. What is in backticks and begins with a dot, as a suffix does, keeps the dot, which a link to a name would lose.
3. Awaited methods have the docstrings of the blocking ones. Their examples block, so the site leaves them out.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
SUFFIX = re.compile(r"(?<![^\s(])`(\.[^`\s]+)`(?!`)")
BEFORE_NAPOLEON = 400  # which makes fields of the sections; it comes at 500


def adapt(app: Sphinx, what: str, name: str, shown: Any, options: Any, lines: list[str]) -> None:
    if inspect.iscoroutinefunction(shown) and name.startswith("memstore.aio.") and "Example:" in lines:
        del lines[lines.index("Example:") :]  # the last section
    lines[:] = [SUFFIX.sub(r"``\1``", PAGE.sub(link, line)) for line in lines]


def link(found: re.Match[str]) -> str:
    return f":doc:`/{found[1]}`" if (DOCS / f"{found[1]}.md").exists() else found[0]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", adapt, priority=BEFORE_NAPOLEON)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
