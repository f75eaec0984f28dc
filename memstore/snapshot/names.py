"""Names: of tensors in a snapshot, and of its files. Pure; the writer's process uses it too."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

MANIFEST = "memstore_snapshot.json"
CLAIM = "memstore_snapshot.claim"  # has the id of the take that may use the plain names
INDEX = "model.safetensors.index.json"  # as transformers calls it
_FILE = re.compile(r"(model|state)(-[0-9]{5,7}-of-[0-9]{5,7})?(?:-([0-9a-f]{16}))?\.safetensors")
_TRACE = re.compile(r"memstore_snapshot\.([0-9a-f]{16})\.(?:claim|save|(?:part|failure)-[0-9]{1,9})")
_ID = re.compile(r"[0-9a-f]{16}")
_TORCH_MARK = re.compile(r"(__[0-9]+)?\.metadata")  # with a rank: of a save without collectives
_TORCH_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_TORCHSNAPSHOT_MARK = ".snapshot_metadata"


class OtherCheckpoint(NamedTuple):
    """A checkpoint of another library.

    Attributes:
        name: of the file by which it is recognised; whoever reads it begins with this file.
        kind: what it is, for errors.
        format: as `memstore convert` calls it.
    """

    name: str
    kind: str
    format: str

    @property
    def is_torchs(self) -> bool:
        return self.format == "dcp"


def is_id(text: str) -> bool:
    """Returns whether this may be the id of a take: 16 hexadecimal digits."""
    return _ID.fullmatch(text) is not None


def file_name(group: str, rank: int, world_size: int, take: str | None) -> str:
    """Returns the name of the file that a rank writes: "model.safetensors", "state-00002-of-00004.safetensors".

    Args:
        group: "model" or "state".
        take: the id of the take, where the plain name may be another one's; else None.
    """
    many = "" if world_size == 1 else f"-{rank + 1:05}-of-{world_size:05}"
    own = "" if take is None else f"-{take}"
    return f"{group}{many}{own}.safetensors"


def is_file_name(name: str) -> bool:
    return _FILE.fullmatch(name) is not None


def rank_of(name: str) -> int:
    """Returns the rank that has written a file of this name."""
    found = _FILE.fullmatch(name)
    return int(found[2].split("-")[1]) - 1 if found is not None and found[2] else 0


def id_of(name: str) -> str | None:
    """Returns the id in the name of a file of tensors, if there is one."""
    found = _FILE.fullmatch(name)
    return found[3] if found is not None else None


def part_name(take: str, rank: int) -> str:
    """Returns the name of the file in which a rank says what it wrote."""
    return f"memstore_snapshot.{take}.part-{rank}"


def failure_name(take: str, rank: int) -> str:
    """Returns the name of the file in which a rank says what has failed, when it can't tell the others otherwise."""
    return f"memstore_snapshot.{take}.failure-{rank}"


def claim_name(take: str) -> str:
    """Returns the name of the file by which a take says that files with its id are its own."""
    return f"memstore_snapshot.{take}.claim"


def save_name(save: str) -> str:
    """Returns the name of the file by which a save of planned files does so. Its ranks keep it during the save."""
    return f"memstore_snapshot.{save}.save"


def trace_of(name: str) -> str | None:
    """Returns the id of the take that left this file to say that it was here: a claim, a save, a part, a failure."""
    found = _TRACE.fullmatch(name)
    return None if found is None else found[1]


def take_of(name: str, claimant: str | None, traced: Set[str]) -> str | None:
    """Returns the id of the take that made a file of this name; None for files of others.

    Args:
        claimant: the id in the folder's claim.
        traced: the ids of takes that have left a trace. A user's file may be called as a take's.
    """
    trace = trace_of(name)
    if trace is not None:
        return trace
    file = _FILE.fullmatch(name)
    if file is not None and file[3] is not None:
        return file[3] if file[3] in traced else None
    return claimant if file is not None or name in (CLAIM, INDEX) else None


def local_path(path: Any) -> str:
    """Returns the absolute path of a folder. Raises TypeError or ValueError if it is none."""
    found = os.fspath(path) if isinstance(path, os.PathLike) else path  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(found, str) or not found or "\0" in found:
        raise TypeError(f"path is that of a folder, as text, and not {path!r:.100}")
    if "://" in found:
        scheme, _, rest = found.partition("://")
        if scheme not in ("file", "fs"):
            raise ValueError(f"{found!r}: snapshots are folders of a file system; there is no storage {scheme!r}")
        found = rest
    return os.path.abspath(found)


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Returns whether this is the folder of a snapshot."""
    return os.path.lexists(os.path.join(path, MANIFEST))


def others_in(folder: str) -> list[OtherCheckpoint]:
    """Returns the checkpoints of other libraries in a folder; each would be read by its library as if it were alone."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []  # what may not be listed can't be opened either, and that error says more
    found: list[OtherCheckpoint] = []
    for name in names:
        if _TORCH_MARK.fullmatch(name):
            other = OtherCheckpoint(name, "a checkpoint of torch.distributed.checkpoint", "dcp")
        elif name == _TORCHSNAPSHOT_MARK:
            other = OtherCheckpoint(name, "a snapshot of torchsnapshot", "torchsnapshot")
        else:
            continue
        if not os.path.isdir(os.path.join(folder, name)):
            found.append(other)
    return found


def is_torch_data(name: str) -> bool:
    """Returns whether torch's FileSystemWriter calls a file with tensors so."""
    return _TORCH_DATA.fullmatch(name) is not None


def path_of(parts: Sequence[str | int]) -> str:
    """Returns the path of a leaf: "model/layer.weight". A "/" in a key is written %2F, a "%" as %25."""
    path = "/".join(map(str, parts))
    if "%" in path or path.count("/") >= len(parts):
        return "/".join([str(part).replace("%", "%25").replace("/", "%2F") for part in parts])
    return path
