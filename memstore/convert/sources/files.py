"""Formats that a Store attaches too: their own readers check and map them."""

from __future__ import annotations

import os

from memstore.convert.leaves import Found
from memstore.convert.rules import Rules
from memstore.engine import opened, syscalls
from memstore.errors import UnsupportedValueError
from memstore.formats import is_legacy, load_files

_MOST_LOADED = 256 << 20  # bytes of a file that can't be mapped


def open_torch(path: str, rules: Rules) -> Found:
    """A file of torch.save."""
    with opened(os.path.realpath(path)) as (fd, found):
        if found.st_size > _MOST_LOADED and is_legacy(syscalls.read_at(fd, 64, 0)):
            raise UnsupportedValueError(
                f"{path} has torch.save's format before torch 1.6, which is loaded whole, and {found.st_size:,} bytes: "
                "load it with torch.load where there is the memory, and save it anew"
            )
    return Found(load_files("", path, "torch", allow_pickle=rules.allow_pickle))


def open_safetensors(path: str, rules: Rules) -> Found:
    """A file of safetensors, a folder of Hugging Face, or the index in one."""
    return Found(load_files("", path, "safetensors", allow_pickle=rules.allow_pickle))


def open_memmap(path: str, rules: Rules) -> Found:
    """A folder of TensorDict.memmap."""
    return Found(load_files("", path, "memmap", allow_pickle=rules.allow_pickle))
