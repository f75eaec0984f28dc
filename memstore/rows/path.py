"""Where a leaf stands in a value, for errors."""

from __future__ import annotations

import re
from typing import Any

Path = tuple[Any, ...]


def of_key(error: IndexError, key: str) -> IndexError:
    """An error of rows of a key's value, by its key."""
    return IndexError(
        re.sub("(of|for) value.*?, which", lambda found: f"{found[1]} {key!r}, which", str(error), count=1)
    )


def name_of(path: Path) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)
