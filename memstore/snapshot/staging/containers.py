"""How much memory this process may have by its control groups, which is how containers and job schedulers bound it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def container_limits(groups: Path = _GROUPS, root: Path = _ROOT) -> list[int]:
    """The limits in bytes, of this process's group and of those above it; none where nothing is limited.

    Args:
        groups: which groups the process is in, as the kernel lists them.
        root: where the groups are mounted, as a whole or from the container's own on.
    """
    limits: list[int] = []
    with contextlib.suppress(OSError):  # no control groups
        for line in groups.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                limits += _limits_of(root, group, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits_of(root / "memory", group, "memory.limit_in_bytes")
    return limits


def _limits_of(mounted: Path, group: str, file: str) -> list[int]:
    own = mounted / group.strip("/")
    limits: list[int] = []
    for folder in (own, *own.parents):
        if folder.is_relative_to(mounted):
            with contextlib.suppress(OSError, ValueError):  # the root has no such file; "max" is no limit
                limits.append(int((folder / file).read_text()))
    return limits
