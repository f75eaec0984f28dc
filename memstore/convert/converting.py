"""Conversion of a checkpoint, step by step: opened, planned, written beside, read back, compared, and given its name.

`convert` is the whole way, with its steps. `source_format` and `target_format` say which formats are meant,
`open_source` and `draft_target` choose the reader and the writer of a format. The target is made in a folder beside its
path (`folder_beside`), and appears whole or not at all (`publish_target`). A kill before that leaves the folder, which
nobody locks any more: the next conversion to the same target removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import io
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import xxhash

from memstore import _modes as modes
from memstore import structure
from memstore._arguments import flag
from memstore._info import Progress, shown_progress
from memstore._wording import an, check_new_folder, check_progress, is_flattened, of_no_place, parse_size
from memstore.convert.dcp import (
    DCP_METADATA,
    checkpoint_items,
    open_checkpoint,
    open_dcp,
    open_snapshot,
    write_own_checkpoint,
    write_snapshot,
    write_torch_checkpoint,
)
from memstore.convert.files import (
    check_memmap,
    draft_torch,
    open_memmap,
    open_safetensors,
    open_torch,
    safetensors_metadata,
    safetensors_tensors,
    write_huggingface,
    write_memmap,
    write_safetensors,
)
from memstore.convert.leaves import Rules, SourceValue, compare, take_apart
from memstore.convert.naming import (
    FlatItems,
    LeafRefusals,
    Why,
    nested,
    plain,
    refuse_pickles,
    shown_path,
    unread_by_torch,
    unstored_by_memstore,
)
from memstore.convert.torchsnapshot import TORCHSNAPSHOT_METADATA, open_torchsnapshot
from memstore.engine import Path, syscalls
from memstore.errors import (
    AlreadyExistsError,
    MemstoreError,
    NotAStoreError,
    ResourceLimitError,
    StoreFullError,
    UnsupportedValueError,
    error_of_lack,
    lacks_told,
)
from memstore.formats import ByteMeter, as_tensordict, file_format, sync_all
from memstore.snapshot import is_snapshot, load_manifest
from memstore.snapshot.buckets import bucket_options, is_url, path_or_url
from memstore.snapshot.copying import copy_snapshot, fetch_folder
from memstore.snapshot.stored import Stored
from memstore.structure import expanded_bytes

# --- Formats ---------------------------------------------------------------------------------------------------------


ConvertFormat = Literal[
    "dcp", "huggingface", "memmap", "memstore-dcp", "safetensors", "snapshot", "torch", "torchsnapshot"
]
FORMATS: tuple[ConvertFormat, ...] = get_args(ConvertFormat)
WRITTEN: tuple[ConvertFormat, ...] = tuple(name for name in FORMATS if name != "torchsnapshot")

_FILES: dict[str, ConvertFormat] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
_SUFFIX = re.compile(r"\.[A-Za-z]\w*")  # of a file; "step-1.5" and "llama-3.1-8B" have none
CHECKPOINT_VALUES = frozenset({"state", "bytes", "dcp"})  # of a snapshot that is a checkpoint of DCP


def checked(name: str, known: tuple[ConvertFormat, ...]) -> ConvertFormat:
    """Raises ValueError for what is no format, or none of those known here."""
    if name not in known:
        raise ValueError(f"{name!r} is no format here; {', '.join(known)} are")
    return cast("Any", name)


def source_format(path: str) -> ConvertFormat:
    """Returns which format a file or folder has.

    Raises:
        FileNotFoundError: a link leads to neither.
        UnsupportedValueError: it looks like none of them.
    """
    if not os.path.isdir(path):
        found = file_format(path, "say source_as= (of safetensors, torch)")
        if found == "npy":
            raise UnsupportedValueError(f"{path} is an array of numpy, which isn't converted: load it with numpy.load")
        return "huggingface" if path.endswith(".index.json") else found
    if is_snapshot(path):
        values = frozenset(value.key for value in load_manifest(os.path.abspath(path)).values)
        return "memstore-dcp" if values - {"wrapped"} == CHECKPOINT_VALUES else "snapshot"
    for name, format in ((DCP_METADATA, "dcp"), (TORCHSNAPSHOT_METADATA, "torchsnapshot")):
        if os.path.lexists(f"{path}/{name}"):
            return cast("Any", format)
    if os.path.lexists(f"{path}/memstore.json"):
        raise NotAStoreError(f"{path} is a store, and no checkpoint: export a key of it to a file, and convert that")
    try:
        found = file_format(path)
    except UnsupportedValueError:
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in os.listdir(path)):
            return "huggingface"  # of several files or indices: its reader says why it can't choose
        raise NotAStoreError(
            f"{path} is no checkpoint that is known: it has no {DCP_METADATA}, no {TORCHSNAPSHOT_METADATA}, no "
            "*.safetensors, no meta.json of TensorDict and is no snapshot of memstore; --from says what it is"
        ) from None
    return "memmap" if found == "memmap" else "huggingface"


def check_source(path: str, format: ConvertFormat) -> None:
    """Raises NotAStoreError for a path without what all of this format have, and says which format it looks like."""
    expected = _missing(path, format) if os.path.exists(path) else ""  # a link may lead to nothing
    if not expected:
        return
    try:
        advice = f"it looks like {source_format(path)!r}, so leave source_as= out"
    except (MemstoreError, OSError):
        advice = "check the path"
    raise NotAStoreError(f"{path} is not of the format {format!r}: expected {expected}, found {_kind(path)}; {advice}")


def _missing(path: str, format: ConvertFormat) -> str:
    """Returns what the format needs and the path lacks, "" for nothing. A file's reader says what is wrong with it."""
    marks: dict[ConvertFormat, str] = {
        "dcp": DCP_METADATA,
        "torchsnapshot": TORCHSNAPSHOT_METADATA,
        "memmap": "meta.json",
    }
    if format in marks:
        return "" if os.path.lexists(f"{path}/{marks[format]}") else f"a folder with {marks[format]}"
    if format in ("snapshot", "memstore-dcp"):
        return "" if is_snapshot(path) else "a folder with memstore_snapshot.json"
    if not os.path.isdir(path):
        return ""
    if format == "torch":
        return "a file of torch.save"
    has = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in os.listdir(path))
    return "" if has else "a file of safetensors, or a folder with *.safetensors"


def _kind(path: str) -> str:
    if not os.path.isdir(path):
        return "a file"
    names = sorted(os.listdir(path))
    return (
        f"a folder with {', '.join(map(repr, names[:3]))}{', ...' * (len(names) > 3)}" if names else "an empty folder"
    )


def checked_target(path: str, name: str) -> ConvertFormat:
    """Raises ValueError for what is no format, and for a path with the suffix of another one's files."""
    found = checked(name, WRITTEN)
    suffix = os.path.splitext(path)[1]
    if _FILES.get(suffix, found) != found:
        raise ValueError(
            f"{path} has the suffix of a {_FILES[suffix]} file, and the target format is {name!r}: leave target_as= "
            f"out for {_FILES[suffix]}, or choose another path"
        )
    return found


def target_format(path: str) -> ConvertFormat:
    """Returns the format that a new path is meant to have: by its suffix; a folder is a snapshot.

    Raises:
        ValueError: it has the suffix of a file, and no format has that.
    """
    suffix = os.path.splitext(path)[1]
    if suffix in _FILES:
        return _FILES[suffix]
    if not _SUFFIX.fullmatch(suffix):
        return "snapshot"
    near = difflib.get_close_matches(suffix.lower(), [*_FILES, *(f".{name}" for name in WRITTEN)], 1)
    named = f"say target_as= (of {', '.join(WRITTEN)})"
    if near and near[0] not in _FILES:
        advice = f"for a folder of this name say target_as={near[0][1:]!r}"
    elif near:
        advice = f"did you mean {near[0]!r}? For a folder, or another format, {named}"
    else:
        advice = f"files end with .safetensors, or .pt, .pth, .bin or .ckpt (torch); for others {named}"
    raise ValueError(f"no format has the suffix {suffix!r} of {path}: {advice}")


# --- The conversion --------------------------------------------------------------------------------------------------


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
    source_format: ConvertFormat
    target_format: ConvertFormat
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
    progress: Progress | bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
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
            True: a bar, if standard error is a terminal, else lines of the logger "memstore".
        storage_options: for a bucket, as of `memstore.Snapshot`, where `source` or `target` is a URL. A source may be
            of any format that is a folder, whose objects are all fetched; a target is a snapshot. It passes through a
            folder for temporary files (TMPDIR), which needs room for it.

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
    if not isinstance(progress, bool):
        check_progress(progress)
    bucket = bucket_options(storage_options)
    with contextlib.ExitStack() as stack:
        path, made = (_place(one, stack) for one in (source, target))
        if path.url and (is_snapshot(path.url, bucket) or not fetch_folder(path.url, path.local, bucket)):
            copy_snapshot(Stored(path.url, options=bucket), path.local, durable=False)
        if made.url:
            _check_bucket(made.url, target_as, bucket)
        done = _convert(path.local, made.local, source_as, target_as, allow_pickle, untie, max_expanded, progress)
        if made.url:
            copy_snapshot(Stored(made.local), made.url, options=bucket)
        return dataclasses.replace(done, source=path.url or done.source, target=made.url or done.target)


class _Place(NamedTuple):
    """A path that was given, or a URL and a path for the time of the conversion."""

    local: Any
    url: str = ""


def _place(given: Any, stack: contextlib.ExitStack) -> _Place:
    text: Any = os.fspath(cast("os.PathLike[str]", given)) if isinstance(given, os.PathLike) else given
    if not (isinstance(text, str) and ("://" in text or is_flattened(text))):
        return _Place(given)
    found = path_or_url(given)
    if not is_url(found):
        return _Place(found)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-convert-"))
    return _Place(f"{folder}/snapshot", found)


def _check_bucket(url: str, target_as: str | None, options: dict[str, Any]) -> None:
    """Raises ValueError or AlreadyExistsError before anything is written."""
    if target_as not in (None, "snapshot", "memstore-dcp"):
        raise ValueError(
            f"{url}: in a bucket lie snapshots (snapshot, memstore-dcp), and nothing as {target_as!r}: convert to a "
            "folder, and copy that"
        )
    if is_snapshot(url, options):
        raise already_there(url)


def _convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    source_as: str | None,
    target_as: str | None,
    allow_pickle: bool,
    untie: bool,
    max_expanded: int | str,
    progress: Progress | bool | None,
) -> Converted:
    rules = Rules(flag("allow_pickle", allow_pickle), flag("untie", untie), parse_size(max_expanded))
    path, made = _paths(source, target)
    with lacks_told(path):
        # 1. The source is opened: an ordinary value, of tensors over its mapped files.
        read_as = source_format(path) if source_as is None else checked(source_as, FORMATS)
        write_as = target_format(made) if target_as is None else checked_target(made, target_as)
        if source_as is not None:
            check_source(path, read_as)
        found = open_source(path, read_as, rules)
        try:
            structure.check_nesting(found.value)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"{path}: {error.message}") from None
        # 2. The target is drafted. What it can't express is refused now, when nothing is written yet.
        draft = draft_target(write_as, found, rules, made)
        wanted = found.with_value(draft.value)
        tensors = take_apart(draft.value, rules).tensors
        _check_expanded(path, wanted, tensors, rules)
    nbytes = sum(wanted.leaf(tensor).nbytes for tensor in tensors.values())
    meter = ByteMeter(2 * nbytes, shown_progress(progress, "converting"))
    with _naming_lacks(made, nbytes), folder_beside(made) as folder:
        # 3. It is written in a folder beside its path. Killed, here and in 4: the folder stays for the next conversion.
        name = os.path.basename(made)
        if draft.is_folder:
            os.mkdir(f"{folder}/{name}")
            draft.write(f"{folder}/{name}", name, meter)
        else:
            draft.write(folder, name, meter)
        # 4. It is read back as a source of its format, and compared.
        written = open_source(f"{folder}/{name}", write_as, rules)
        compare(made, wanted, draft.metadata, written, rules, meter)
        # 5. It gets its name. Killed after that: the whole target, and the folder, empty or with the same file.
        publish_target(f"{folder}/{name}", made)
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


def _check_expanded(path: str, found: SourceValue, tensors: Mapping[Path, torch.Tensor], rules: Rules) -> None:
    """Refuses expanded tensors before anything is written: hours may go by until a disk is full of one number."""
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
    """Makes errors of a lack name the target, and not what is written beside it."""
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


# --- Readers ---------------------------------------------------------------------------------------------------------


_READERS: dict[ConvertFormat, Callable[[str, Rules], SourceValue]] = {
    "dcp": open_dcp,
    "huggingface": open_safetensors,
    "memmap": open_memmap,
    "memstore-dcp": open_checkpoint,
    "safetensors": open_safetensors,
    "snapshot": open_snapshot,
    "torch": open_torch,
    "torchsnapshot": open_torchsnapshot,
}


def open_source(path: str, format: ConvertFormat, rules: Rules) -> SourceValue:
    """Opens what is at a path.

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


# --- Writers ---------------------------------------------------------------------------------------------------------
# Which writer a format has. What the format can't express is refused before anything is written.


class TargetDraft(NamedTuple):
    """A target that is about to be written.

    Attributes:
        value: what a reader of the format has to find.
        is_folder: whether it is a folder, and no file.
        write: writes it. Called with the folder that is it, or that it is to be in, and with its name there.
        metadata: of each file, if the format has such texts beside its tensors.
    """

    value: Any
    is_folder: bool
    write: Callable[[str, str, ByteMeter], None]
    metadata: Mapping[str, str] = {}


def draft_target(format: ConvertFormat, found: SourceValue, rules: Rules, target: str) -> TargetDraft:
    """Drafts what is written of a value.

    Args:
        target: where it is going to be.

    Raises:
        UnsupportedValueError: the format can't express some leaves; it names them.
    """
    refusals = LeafRefusals(format)
    draft = _DRAFTS[format](found, rules, refusals, target)
    refusals.check()
    return draft


def _draft_safetensors(
    is_folder: bool, found: SourceValue, rules: Rules, refusals: LeafRefusals, target: str
) -> TargetDraft:
    tensors = safetensors_tensors(found, rules, refusals)
    metadata = safetensors_metadata(found, refusals)
    write = write_huggingface if is_folder else write_safetensors
    return TargetDraft(tensors, is_folder, partial(write, found, tensors, metadata), metadata)


def _draft_torch(found: SourceValue, rules: Rules, refusals: LeafRefusals, target: str) -> TargetDraft:
    value = plain(found.value, refusals)
    if not rules.allow_pickle:
        refuse_pickles((), value, unread_by_torch, refusals)
    refusals.check()
    return TargetDraft(value, False, draft_torch(found, value, rules).write)


def _draft_dcp(found: SourceValue, rules: Rules, refusals: LeafRefusals, target: str) -> TargetDraft:
    flat = checkpoint_items(found, rules, refusals)
    if not rules.allow_pickle:
        _refuse_items(flat, unread_by_torch, refusals)
    refusals.check()
    write = partial(write_torch_checkpoint, found, flat, rules, target)
    return TargetDraft(nested(flat.items, flat.paths, target), True, write)


def _draft_memstore_dcp(found: SourceValue, rules: Rules, refusals: LeafRefusals, target: str) -> TargetDraft:
    flat = checkpoint_items(found, rules, refusals)
    objects = {name: item for name, item in flat.items.items() if type(item) is not io.BytesIO}  # which is kept
    _refuse_items(FlatItems(objects, flat.paths), unstored_by_memstore, refusals)  # memstore's planner never pickles
    refusals.check()
    write = partial(write_own_checkpoint, found, flat, target)
    return TargetDraft(nested(flat.items, flat.paths, target), True, write)


def _refuse_items(flat: FlatItems, why: Why, refusals: LeafRefusals) -> None:
    for name, item in flat.items.items():
        refuse_pickles(flat.paths[name], item, why, refusals)


def _draft_memmap(found: SourceValue, rules: Rules, refusals: LeafRefusals, target: str) -> TargetDraft:
    check_memmap(found, rules, refusals)
    refusals.check()
    source = as_tensordict(found.value)
    return TargetDraft(source, True, partial(write_memmap, found, source, rules))


def _draft_snapshot(found: SourceValue, rules: Rules, refusals: LeafRefusals, target: str) -> TargetDraft:
    if not rules.allow_pickle:
        refuse_pickles((), found.value, unstored_by_memstore, refusals)
        refusals.check()
    return TargetDraft(found.value, True, partial(write_snapshot, found, rules))


_DRAFTS: dict[ConvertFormat, Callable[[SourceValue, Rules, LeafRefusals, str], TargetDraft]] = {
    "dcp": _draft_dcp,
    "huggingface": partial(_draft_safetensors, True),
    "memmap": _draft_memmap,
    "memstore-dcp": _draft_memstore_dcp,
    "safetensors": partial(_draft_safetensors, False),
    "snapshot": _draft_snapshot,
    "torch": _draft_torch,
}


# --- The place beside the target -------------------------------------------------------------------------------------


_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK)


@contextlib.contextmanager
def folder_beside(target: str) -> Generator[str]:
    """Yields a new folder on the target's file system, which is gone afterwards. Its lock says that it is in use."""
    parent = os.path.dirname(target)
    # of fixed length, whatever the target is called
    prefix = f".memstore-convert.{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.basename(target)))}."
    _remove_leftovers(parent, prefix)
    folder, fd = _make_folder(parent, prefix)
    try:
        yield folder
    finally:
        _remove_folder(folder)
        syscalls.close(fd)  # and with it goes the lock
        if os.path.lexists(folder):  # there was no descriptor left to look into it
            _remove_folder(folder)


def _remove_folder(folder: str) -> None:
    """Removes the folder, if that is possible. An empty one takes no descriptor."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    shutil.rmtree(folder, ignore_errors=True)


def publish_target(made: str, target: str) -> None:
    """Gives what was made its name. Raises AlreadyExistsError if there is something by now, which stays as it is."""
    try:
        if os.path.isdir(made):
            sync_all(made)
            if os.path.lexists(target):  # an empty folder, which would be replaced
                raise FileExistsError(errno.EEXIST, "it is there", target)
            syscalls.rename(made, target)
        else:
            _link(made, target)
    except OSError as error:
        if error.errno in _THERE:
            raise already_there(target) from None
        raise
    syscalls.sync_folder(os.path.dirname(target))


def already_there(target: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"{target} is there already: convert to another path, or remove it")


def _link(made: str, target: str) -> None:
    """Links a file: unlike a rename, that never takes the place of something."""
    try:
        syscalls.link(made, target)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(target):
            raise
        syscalls.rename(made, target)


def _make_folder(parent: str, prefix: str) -> tuple[str, int]:
    while True:
        folder = f"{parent}/{prefix}{uuid.uuid4().hex}"
        syscalls.make_folder(folder, 0o700)
        try:
            fd = syscalls.open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # somebody has taken it for a leftover
        except BaseException:
            os.rmdir(folder)
            raise
        if syscalls.lock_exclusive(fd) and os.path.isdir(folder):
            return folder, fd
        syscalls.close(fd)


def _remove_leftovers(parent: str, prefix: str) -> None:
    """Removes the folders that nobody locks. Those that can't be removed harm nobody."""
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{32}")
    for name in os.listdir(parent):
        if not pattern.fullmatch(name):
            continue
        folder = f"{parent}/{name}"
        with contextlib.suppress(OSError), syscalls.file_open(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            if syscalls.lock_exclusive(fd):
                shutil.rmtree(folder, ignore_errors=True)
