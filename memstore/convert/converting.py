"""A conversion, step by step: opened, planned, written beside, read back and compared, and given its name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from dataclasses import dataclass

from memstore import modes
from memstore.convert.beside import already_there, folder_beside, publish
from memstore.convert.comparing import compare, take_apart
from memstore.convert.formats import FORMATS, WRITTEN, Format, check_source, checked, source_format, target_format
from memstore.convert.rules import Rules
from memstore.convert.sources import open_source
from memstore.convert.targets import draft_target
from memstore.errors import NotAStoreError, StoreFullError
from memstore.formats import Meter
from memstore.info import Progress

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion has done.

    Attributes:
        source_format, target_format: see FORMATS.
        tensors: how many were written.
        nbytes: of these.
    """

    source: str
    target: str
    source_format: Format
    target_format: Format
    tensors: int
    nbytes: int


@modes.put_aside()
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source_as: str | None = None,
    target_as: str | None = None,
    allow_pickle: bool = False,
    untie: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint in another format. The target appears whole, compared with the source, or not at all.

    Tensors go from file to file in pieces: the memory that it takes doesn't grow with their size.

    Args:
        source: a file or a folder. It must not change meanwhile.
        target: where nothing is; its folder is there.
        source_as, target_as: formats, of FORMATS. None: the source's is seen in its files; the target's by its
            suffix (`.safetensors`; `.pt`, `.pth`, `.bin`, `.ckpt`: torch), and is a snapshot without one. Any other
            suffix that starts with a letter needs `target_as`: it is likely mistyped.
        allow_pickle: objects that only pickle can read or write: that can run code, so trust who wrote the source.
        untie: tensors that share memory are stored one by one, where the target can't keep what they share.
        progress: called with bytes done and bytes in all; each tensor counts twice, written and compared.

    Raises:
        UnsupportedValueError: the target can't express some leaves (all are named), or the source needs pickle.
        AlreadyExistsError: there is something at `target`.
        CorruptionError: the source is damaged, or what was read back is not what was to be written.
        StoreFullError: no room.
        NotAStoreError, FormatVersionError, OSError: the source is none, of a newer version, or can't be read.
        ValueError: a format or suffix that isn't known, or a target in the source.

    Example:
        >>> import tempfile, torch
        >>> from memstore.convert import convert
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"weight": torch.ones(2, 3)}, f"{folder}/model.pt")
        >>> done = convert(f"{folder}/model.pt", f"{folder}/model.safetensors")
        >>> done.source_format, done.target_format, done.tensors, done.nbytes
        ('torch', 'safetensors', 1, 24)
    """
    rules = Rules(allow_pickle, untie)
    path, made = _paths(source, target)
    read_as = source_format(path) if source_as is None else checked(source_as, FORMATS)
    write_as = target_format(made) if target_as is None else checked(target_as, WRITTEN)
    if source_as is not None:
        check_source(path, read_as)
    found = open_source(path, read_as, rules)
    draft = draft_target(write_as, found, rules, made)
    wanted = found.with_value(draft.value)
    tensors = take_apart(draft.value, rules).tensors
    nbytes = sum(wanted.leaf(tensor).nbytes for tensor in tensors.values())
    meter = Meter(2 * nbytes, progress)
    with _naming_the_full(made, nbytes), folder_beside(made) as folder:
        name = os.path.basename(made)
        if draft.is_folder:
            os.mkdir(f"{folder}/{name}")
            draft.write(f"{folder}/{name}", name, meter)
        else:
            draft.write(folder, name, meter)
        compare(made, wanted, open_source(f"{folder}/{name}", write_as, rules), rules, meter)
        publish(f"{folder}/{name}", made)
    meter.finish()
    return Converted(path, made, read_as, write_as, len(tensors), nbytes)


def _paths(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> tuple[str, str]:
    path, made = _absolute(source), _absolute(target)
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", path)
    if os.path.lexists(made):
        raise already_there(made)
    parent = os.path.realpath(os.path.dirname(made))
    if not os.path.isdir(parent):
        raise NotAStoreError(f"{parent}, in which {os.path.basename(made)} is to be made, is no folder: make it first")
    inside = os.path.realpath(path)
    if parent == inside or parent.startswith(f"{inside}/"):
        raise ValueError(f"{made} lies in the source, which must not change: convert to a path outside of {path}")
    return path, f"{parent}/{os.path.basename(made)}"


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))


@contextlib.contextmanager
def _naming_the_full(target: str, nbytes: int) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"there is no room for {target}, whose tensors have {nbytes:,} bytes: free some, or convert to another "
                "file system; nothing is left of it",
                code=error.errno,
            ) from error
        raise
