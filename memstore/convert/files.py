"""Files of safetensors, of torch.save, and memmaps of TensorDict: how they are opened, and how they are written.

A Store attaches these formats too: their own readers check and map them.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Generator, Mapping
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch.serialization import get_safe_globals  # pyright: ignore[reportUnknownVariableType]

from memstore import structure
from memstore._wording import an, an_instance
from memstore.convert.leaves import AssembledFile, BoxedTensor, Rules, SourceValue, take_apart
from memstore.convert.naming import LeafRefusals, OverlapCheck, entries, has_tensors, plain, special
from memstore.engine import METADATA, PLAIN_METADATA, opened, syscalls
from memstore.errors import UnsupportedValueError
from memstore.formats import (
    INDEX,
    ByteMeter,
    are_sizes,
    find_in_folder,
    header_of,
    index_of,
    is_legacy,
    load_files,
    make_memmap_folder,
    parse_value,
    read_metadata,
    save_torch,
    shard_names,
    shards_of,
    why_not,
)
from memstore.sharding import whole

# --- Opening ---------------------------------------------------------------------------------------------------------


_SHARDING_INFO = "DCP_SHARDING_INFO"  # in the metadata: where the tensors of a file start in the whole ones
_MOST_LOADED = 256 << 20  # bytes of a file that can't be mapped


def open_torch(path: str, rules: Rules) -> SourceValue:
    """Opens a file of torch.save."""
    with opened(os.path.realpath(path)) as (fd, found):
        if found.st_size > _MOST_LOADED and is_legacy(syscalls.read_at(fd, 64, 0)):
            raise UnsupportedValueError(
                f"{path} has torch.save's format before torch 1.6, which is loaded whole, and {found.st_size:,} bytes: "
                "load it with torch.load where there is the memory, and save it anew"
            )
    return SourceValue(load_files("", path, "torch", allow_pickle=rules.allow_pickle))


def open_safetensors(path: str, rules: Rules) -> SourceValue:
    """Opens a file of safetensors, a folder of Hugging Face, or the index in one.

    Raises:
        UnsupportedValueError: the files are parts of tensors; or a folder has several files, and no index.
    """
    try:
        first = find_in_folder(path) if os.path.isdir(path) else path
    except UnsupportedValueError as error:  # several files, and no index
        for name in sorted(os.listdir(path)):
            if name.endswith(".safetensors"):
                _check_whole(read_metadata(f"{path}/{name}"), listed=False)
        raise UnsupportedValueError(error.message.replace("attach one", "convert one")) from error
    value = load_files("", path, "safetensors", allow_pickle=rules.allow_pickle)
    metadata = read_metadata(first or path)
    _check_whole(metadata, listed=(first or path).endswith(".json"))
    torchs = (_SHARDING_INFO, "DCP_VERSION")  # says that these may be parts, and they are whole
    kept = {file: {name: text for name, text in said.items() if name not in torchs} for file, said in metadata.items()}
    return SourceValue(value, metadata=kept)


def _check_whole(metadata: Mapping[str, Mapping[str, str]], *, listed: bool) -> None:
    """Raises UnsupportedValueError for files with the parts of tensors that a rank had.

    torch's HuggingFaceStorageWriter says of each tensor where its part starts, and nowhere how large the whole is: the
    first part alone looks like a whole tensor. But where ranks write their parts, there is no index.

    Args:
        metadata: of each file, by its path.
        listed: whether an index lists the files.
    """
    for path, said in metadata.items():
        if _SHARDING_INFO in said and not (
            listed and _all_start_at_zero(parse_value(path, said[_SHARDING_INFO].encode()))
        ):
            raise UnsupportedValueError(
                f"{path} has parts of tensors, as each rank saves its own with torch's HuggingFaceStorageWriter "
                f"({_SHARDING_INFO}), and no file says how large the whole tensors are: save them with "
                "enable_consolidation=True and convert that, or load them with torch's HuggingFaceStorageReader. If "
                "the tensors are whole, convert the folder with their index"
            )


def _all_start_at_zero(places: Any) -> bool:
    """Returns whether all tensors start at 0, by `{"saved_offsets": [...]}` of each name."""
    if not isinstance(places, dict):
        return False
    known = cast("dict[str, Any]", places)
    starts: list[Any] = [
        cast("dict[str, Any]", place).get("saved_offsets") for place in known.values() if isinstance(place, dict)
    ]
    return bool(known) and len(starts) == len(known) and all(are_sizes(start) and not any(start) for start in starts)


def open_memmap(path: str, rules: Rules) -> SourceValue:
    """Opens a folder of TensorDict.memmap."""
    return SourceValue(load_files("", path, "memmap", allow_pickle=rules.allow_pickle))


# --- Files of safetensors, and Hugging Face's folders of several: tensors by name, and nothing else ------------------


_SHARD_SIZE = 5 * 10**9  # bytes: what transformers, too, puts into a file by default


def safetensors_tensors(found: SourceValue, rules: Rules, refusals: LeafRefusals) -> dict[str, torch.Tensor]:
    """Returns the tensors by their names, those in dicts and lists joined by dots."""
    tensors: dict[str, torch.Tensor] = {}
    sharing = OverlapCheck(refusals, untie=rules.untie)
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


def safetensors_metadata(found: SourceValue, refusals: LeafRefusals) -> dict[str, str]:
    """Returns what each file says of itself: what the source's files say, and that its tensors are torch's.

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


def write_safetensors(
    found: SourceValue,
    tensors: dict[str, torch.Tensor],
    metadata: Mapping[str, str],
    folder: str,
    name: str,
    meter: ByteMeter,
) -> None:
    """Writes one file."""
    header, order = header_of(tensors, metadata)
    file = AssembledFile()
    file.add(header)
    for tensor in order:
        file.add_leaf(found.leaf(tensors[tensor]))
    file.write(folder, name, meter)


def write_huggingface(
    found: SourceValue,
    tensors: dict[str, torch.Tensor],
    metadata: Mapping[str, str],
    folder: str,
    name: str,
    meter: ByteMeter,
) -> None:
    """Writes `model.safetensors`, or files of up to 5 GB and their index."""
    shards = shards_of(tensors, _SHARD_SIZE)
    names = shard_names(len(shards))
    for file, shard in zip(names, shards, strict=True):
        write_safetensors(found, shard, metadata, folder, file, meter)
    if len(shards) > 1:
        listed = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        index = AssembledFile()
        index.add(index_of(listed, sum(found.leaf(tensor).nbytes for tensor in tensors.values())))
        index.write(folder, INDEX, meter)


# --- Writing files of torch.save -------------------------------------------------------------------------------------
# What torch.save writes, without its bytes passing through it: torch says which storage is to lie where.
#
# torch.save is given a file that keeps what is short, and notes where torch hands over a storage. (torch computes no
# checksums meanwhile, so it doesn't read them: as with `torch.serialization.set_crc32_options(False)`, the zip's own
# checksums are left out, which torch.load never looks at.)


def draft_torch(found: SourceValue, value: Any, rules: Rules) -> AssembledFile:
    """Makes the file that torch.save makes of a value. Raises UnsupportedValueError for what it can't write."""
    for path, tensor in structure.iter_tensors(value):
        if tensor.dtype in structure.traits.WITHOUT_COPY:
            raise UnsupportedValueError(
                f"{structure.render_path(path)}: torch.save has no storage of {tensor.dtype}: convert to another format"
            )
        if structure.is_wrapper(type(tensor)) and not rules.allow_pickle and not _loads_safely(type(tensor)):
            raise UnsupportedValueError(
                f"{structure.render_path(path)}: torch.load reads {an(type(tensor))} only with pickle: convert it with "
                "allow_pickle=True if you trust the file, or add the class by torch.serialization.add_safe_globals"
            )
    file, storages = AssembledFile(), _storages(found, value, rules)

    def take(view: memoryview) -> None:
        address = int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
        leaf = storages.get((address, len(view)))
        if leaf is None:
            file.add(bytes(view))
        else:
            file.add_leaf(leaf)

    with _without_checksums():
        save_torch(value, take)
    return file


def _loads_safely(kind: type) -> bool:
    known: list[Any] = list(get_safe_globals())  # pyright: ignore[reportUnknownArgumentType]
    return any(one is kind or (isinstance(one, tuple) and one[0] is kind) for one in known)


def _storages(found: SourceValue, value: Any, rules: Rules) -> dict[tuple[int, int], BoxedTensor]:
    """Returns what storages have, by address and size in bytes."""
    storages: dict[tuple[int, int], BoxedTensor] = {}
    for tensor in take_apart(value, rules).tensors.values():
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key in storages:
            continue
        if found.is_stand_in(tensor):
            storages[key] = found.leaf(tensor)
        else:
            flat = structure.over(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
            storages[key] = BoxedTensor(torch.uint8, flat.shape, ((whole(flat.shape), flat),))
    return storages


@contextlib.contextmanager
def _without_checksums() -> Generator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# --- Writing memmaps -------------------------------------------------------------------------------------------------


def check_memmap(found: SourceValue, rules: Rules, refusals: LeafRefusals) -> None:
    """Adds what a TensorDict can't have. (Of TensorDicts, tensorclasses and stacks, tensordict itself knows.)"""
    sharing = OverlapCheck(refusals, untie=rules.untie)
    shown: Any = plain(found.value, LeafRefusals("memmap"))
    if type(shown) not in (dict, OrderedDict, NoneType):
        refusals.add((), f"{an_instance(shown)}, and a TensorDict is a dict")
        return
    entry: Any
    for path, entry in entries(shown, refusals, is_leaf=lambda _: True):
        if isinstance(entry, list | tuple) and has_tensors(entry):
            refusals.add(path, f"a {'list' if isinstance(entry, list) else 'tuple'} with tensors in it")
        elif isinstance(entry, torch.Tensor):
            reason = special(entry)
            if reason:
                refusals.add(path, reason)
            else:
                sharing.add(path, entry)
    sharing.check()


def write_memmap(found: SourceValue, source: Any, rules: Rules, folder: str, name: str, meter: ByteMeter) -> None:
    """Writes the TensorDict `source`, which the value is."""
    try:
        places = make_memmap_folder(folder, source, allow_pickle=rules.allow_pickle)
    except UnsupportedValueError as error:
        text = error.message.replace("open the store with allow_pickle=True", "convert it with allow_pickle=True")
        raise UnsupportedValueError(text) from error
    for tensor, path in places:
        syscalls.unlink(path)  # tensordict has made it, with holes
        file = AssembledFile()
        file.add_leaf(found.leaf(tensor))
        file.write(os.path.dirname(path), os.path.basename(path), meter)
