"""Which reader a format has."""

from __future__ import annotations

from collections.abc import Callable

from memstore.convert.formats import Format
from memstore.convert.leaves import Found
from memstore.convert.rules import Rules
from memstore.convert.sources.dcp import open_dcp
from memstore.convert.sources.files import open_memmap, open_safetensors, open_torch
from memstore.convert.sources.snapshots import open_checkpoint, open_snapshot
from memstore.convert.sources.torchsnapshot import open_torchsnapshot
from memstore.errors import UnsupportedValueError

_READERS: dict[Format, Callable[[str, Rules], Found]] = {
    "dcp": open_dcp,
    "huggingface": open_safetensors,
    "memmap": open_memmap,
    "memstore-dcp": open_checkpoint,
    "safetensors": open_safetensors,
    "snapshot": open_snapshot,
    "torch": open_torch,
    "torchsnapshot": open_torchsnapshot,
}


def open_source(path: str, format: Format, rules: Rules) -> Found:
    """What is at a path.

    Raises:
        UnsupportedValueError: it needs pickle, and that isn't allowed; or has what no target can have.
        CorruptionError, FormatVersionError: it is damaged, or of a newer version.
        NotAStoreError, OSError: it is none of this format, or can't be read.
    """
    try:
        return _READERS[format](path, rules)
    except UnsupportedValueError as error:
        text = error.message.replace("leave format= out", "leave source_as= out")
        if not rules.allow_pickle:
            text = text.replace("open the store with allow_pickle=True", "convert it with allow_pickle=True")
        if text == error.message:
            raise
        raise UnsupportedValueError(text) from error
