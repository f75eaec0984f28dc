"""A conversion, step by step: opened, planned, written beside, read back and compared, and given its name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch

from memstore import modes, structure
from memstore.arguments import flag
from memstore.convert.beside import already_there, folder_beside, publish
from memstore.convert.comparing import compare, take_apart
from memstore.convert.formats import (
    FORMATS,
    Format,
    check_source,
    checked,
    checked_target,
    source_format,
    target_format,
)
from memstore.convert.leaves import Found
from memstore.convert.naming import shown_path
from memstore.convert.rules import Rules
from memstore.convert.sources import open_source
from memstore.convert.targets import draft_target
from memstore.engine import Path
from memstore.errors import (
    NotAStoreError,
    ResourceLimitError,
    StoreFullError,
    UnsupportedValueError,
    error_of_lack,
    lacks_told,
)
from memstore.formats import Meter
from memstore.info import Progress
from memstore.structure import expanded_bytes
from memstore.wording import an, check_new_folder, check_progress, of_no_place, parse_size


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion. Made by `convert`.

    Attributes:
        source: the path of the source, absolute.
        target: the path of the target, absolute.
        source_format: one of FORMATS.
        target_format: one of WRITTEN.
        tensors: how many tensors were written.
        nbytes: the size of these tensors.
    """

    source: str
    target: str
    source_format: Format
    target_format: Format
    tensors: int
    nbytes: int


@modes.put_aside()
@modes.uncompiled
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source_as: str | None = None,
    target_as: str | None = None,
    allow_pickle: bool = False,
    untie: bool = False,
    max_expanded: int | str = "16GiB",
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint in another format. The target is compared with the source before it appears.

    If anything fails, there is no target. Tensors are copied from file to file in pieces, so the memory that this takes
    doesn't grow with their size.

    Args:
        source: a file or a folder. It must not change during the conversion.
        target: a path at which nothing exists yet, in a folder that exists.
        source_as: the source's format, one of FORMATS. None: it is found from its files.
        target_as: the target's format, one of WRITTEN. None: it follows from the suffix of `target`: safetensors for
            ``.safetensors``, torch for ``.pt``, ``.pth``, ``.bin`` and ``.ckpt``, a snapshot if there is none. Any
            other suffix that starts with a letter is refused, since it may be mistyped; so is a format that doesn't
            have the target's suffix.
        allow_pickle: allow objects that only pickle can read or write. Unpickling can run code, so allow it only if you
            trust the source.
        untie: if the target can't keep shared memory, store each of the tensors that share it separately.
        max_expanded: bytes, or text ("64GiB"), that all tensors together may take in the target beyond those that they
            have in the source. A file of a kilobyte can have a tensor of any size, if it is expanded.
        progress: called with the bytes done and the total; each tensor counts twice, for writing and for comparing.

    Raises:
        UnsupportedValueError: the target can't express some leaves (all are named), the source needs pickle, contains
            itself, nests more than 200 levels deep, or is expanded beyond `max_expanded`.
        AlreadyExistsError: something exists at `target`.
        CorruptionError: the source is damaged, or reading the target back gave other bytes.
        StoreFullError: there isn't enough space.
        ResourceLimitError: files, memory or threads are lacking, or the target is larger than a file may be.
        NotAStoreError, FormatVersionError, OSError: the source isn't a checkpoint, is of a newer version, or can't be
            read.
        ValueError: a format or suffix is unknown, the target is inside the source, or it is a new folder "~".

    Example:
        >>> import tempfile, torch
        >>> from memstore.convert import convert
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"weight": torch.ones(2, 3)}, f"{folder}/model.pt")
        >>> done = convert(f"{folder}/model.pt", f"{folder}/model.safetensors")
        >>> done.source_format, done.target_format, done.tensors, done.nbytes
        ('torch', 'safetensors', 1, 24)
    """
    check_progress(progress)
    rules = Rules(flag("allow_pickle", allow_pickle), flag("untie", untie), parse_size(max_expanded))
    path, made = _paths(source, target)
    with lacks_told(path):
        read_as = source_format(path) if source_as is None else checked(source_as, FORMATS)
        write_as = target_format(made) if target_as is None else checked_target(made, target_as)
        if source_as is not None:
            check_source(path, read_as)
        found = open_source(path, read_as, rules)
        _check_nesting(path, found.value)
        draft = draft_target(write_as, found, rules, made)
        wanted = found.with_value(draft.value)
        tensors = take_apart(draft.value, rules).tensors
        _check_expanded(path, wanted, tensors, rules)
    nbytes = sum(wanted.leaf(tensor).nbytes for tensor in tensors.values())
    meter = Meter(2 * nbytes, progress)
    with _naming_lacks(made, nbytes), folder_beside(made) as folder:
        name = os.path.basename(made)
        if draft.is_folder:
            os.mkdir(f"{folder}/{name}")
            draft.write(f"{folder}/{name}", name, meter)
        else:
            draft.write(folder, name, meter)
        written = open_source(f"{folder}/{name}", write_as, rules)
        compare(made, wanted, draft.metadata, written, rules, meter)
        publish(f"{folder}/{name}", made)
    meter.finish()
    return Converted(path, made, read_as, write_as, len(tensors), nbytes)


def _paths(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> tuple[str, str]:
    path, made = _absolute(source), _absolute(target)
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, f"there is no such file or folder{of_no_place(path)}", path)
    if os.path.lexists(made):
        raise already_there(made)
    parent = os.path.realpath(os.path.dirname(made))
    if not os.path.isdir(parent):
        what = of_no_place(parent) or ": make it first"
        raise NotAStoreError(f"{parent}, in which {os.path.basename(made)} is to be made, is no folder{what}")
    check_new_folder(made)
    inside = os.path.realpath(path)
    if parent == inside or parent.startswith(f"{inside}/"):
        raise ValueError(f"{made} lies in the source, which must not change: convert to a path outside of {path}")
    return path, f"{parent}/{os.path.basename(made)}"


def _absolute(path: str | os.PathLike[str]) -> str:
    try:
        return os.path.abspath(os.fspath(path))
    except TypeError:
        what = an(type(path))
        raise TypeError(f"convert takes the path of a checkpoint and that of the new one, and not {what}") from None


def _check_nesting(path: str, value: object) -> None:
    try:
        structure.check_nesting(value)
    except structure.RefusedError as error:
        raise UnsupportedValueError(f"{path}: {error.message()}") from None


def _check_expanded(path: str, found: Found, tensors: Mapping[Path, torch.Tensor], rules: Rules) -> None:
    """Before anything is written: hours may go by until a disk is full of one number."""
    more = {name: sum(expanded_bytes(part) for _, part in found.leaf(one).boxes) for name, one in tensors.items()}
    if sum(more.values()) <= rules.max_expanded:
        return
    name = max(more, key=lambda one: more[one])
    nbytes = found.leaf(tensors[name]).nbytes
    raise UnsupportedValueError(
        f"{path}: {shown_path(name)} is expanded: its elements take {nbytes:,} bytes, and lie in "
        f"{nbytes - more[name]:,}. The target would have {sum(more.values()):,} bytes more than the source, "
        f"and max_expanded is {rules.max_expanded:,}: allow more if you trust the source"
    )


@contextlib.contextmanager
def _naming_lacks(target: str, nbytes: int) -> Generator[None]:
    """Errors of a lack name the target, and not what is written beside it."""
    try:
        with lacks_told(target):
            yield
    except StoreFullError as error:
        raise StoreFullError(
            f"there is no room for {target}, whose tensors have {nbytes:,} bytes: free some, or convert to another "
            "file system; nothing is left of it",
            code=error.errno,
        ) from error
    except ResourceLimitError as error:
        cause = error.__cause__
        named = None if cause is None else error_of_lack(cause, target)
        raise named or error from cause
