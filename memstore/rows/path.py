"""Where a leaf stands in a value, for errors."""

from __future__ import annotations

from typing import Any

Path = tuple[Any, ...]


def name_of(path: Path) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)
