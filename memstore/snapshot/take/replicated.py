"""Which tensors all ranks have alike: what the caller says by patterns, and what DistributedDataParallel implies."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch

from memstore.snapshot.stateful import AppState


def matches(path: str, globs: Iterable[str], rank: int) -> bool:
    """Patterns are of paths without a rank, as torchsnapshot has them; those of `get_manifest`'s do, too."""
    return any(fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(f"{rank}/{path}", glob) for glob in globs)


def is_replicating(value: Any) -> bool:
    return isinstance(value, torch.nn.parallel.DistributedDataParallel)


def inferred(app_state: AppState) -> list[str]:
    """The patterns of what DistributedDataParallel keeps equal on all ranks."""
    globs: list[str] = []
    for key, value in app_state.items():
        if is_replicating(value):
            ignored = set(getattr(value, "parameters_to_ignore", ()))
            if not ignored:
                globs.append(f"{_escaped(key)}/*")
                continue
            names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
            globs += [
                f"{_escaped(key)}/{_escaped(name)}"
                for name in names
                if name not in ignored and name.removeprefix("module.") not in ignored
            ]
    return globs


def _escaped(text: str) -> str:
    """A pattern that matches just this path."""
    escaped = text.replace("%", "%25").replace("/", "%2F")
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in escaped)
