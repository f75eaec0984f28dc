"""Files of safetensors, and Hugging Face's folders of several: tensors by name, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from memstore.convert.leaves import Found
from memstore.convert.naming import Refusals, Sharing, entries, plain, special
from memstore.convert.rules import Rules
from memstore.convert.targets.parts import NewFile
from memstore.engine import METADATA, PLAIN_METADATA
from memstore.formats import INDEX, Meter, header_of, index_of, shard_names, shards_of, why_not

_SHARD = 5 * 10**9  # bytes: what transformers, too, puts into a file by default


def tensors_of(found: Found, rules: Rules, refusals: Refusals) -> dict[str, torch.Tensor]:
    """The tensors by their names, those in dicts and lists joined by dots."""
    tensors: dict[str, torch.Tensor] = {}
    sharing = Sharing(refusals, untie=rules.untie)
    for path, entry in entries(plain(found.value, refusals), refusals):
        name = ".".join(map(str, path)) or "tensor"
        if not isinstance(entry, torch.Tensor):
            kind: Any = type(entry)  # pyright: ignore[reportUnknownVariableType]
            what = "an empty " if kind in (dict, OrderedDict, list, tuple) else ""
            refusals.add(path, f"{what}{kind.__name__}, and no tensor")
            continue
        reason = special(entry) or why_not(name, entry)
        if name in tensors:
            reason = f"another tensor is called {name!r} as well when names are joined by dots"
        if reason:
            refusals.add(path, reason)
            continue
        tensors[name] = entry
        sharing.add(path, entry)
    sharing.check()
    return tensors


def metadata_of(found: Found, refusals: Refusals) -> dict[str, str]:
    """What each file says of itself: what the files of the source say, and that its tensors are torch's.

    Files of the source that say different things under one name are refused: no file of the target could say both.
    """
    metadata: dict[str, str] = {}
    for said in found.metadata.values():
        for name, text in said.items():
            if metadata.setdefault(name, text) != text:
                refusals.add(
                    (METADATA, name),
                    "the files of the source have different texts here; --to torch first, and the result to this "
                    "format, leaves them out",
                )
    return {**PLAIN_METADATA, **metadata}


def write_file(
    found: Found, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str], folder: str, name: str, meter: Meter
) -> None:
    """One file."""
    header, order = header_of(tensors, metadata)
    file = NewFile()
    file.add(header)
    for tensor in order:
        file.add_leaf(found.leaf(tensors[tensor]))
    file.write(folder, name, meter)


def write_folder(
    found: Found, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str], folder: str, name: str, meter: Meter
) -> None:
    """`model.safetensors`, or files of up to 5 GB and their index."""
    shards = shards_of(tensors, _SHARD)
    names = shard_names(len(shards))
    for file, shard in zip(names, shards, strict=True):
        write_file(found, shard, metadata, folder, file, meter)
    if len(shards) > 1:
        listed = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        index = NewFile()
        index.add(index_of(listed, sum(found.leaf(tensor).nbytes for tensor in tensors.values())))
        index.write(folder, INDEX, meter)
