"""Values as files of other formats: safetensors (one, or the shards of a checkpoint), TensorDict's memmaps, torch.save.

export_value                  writes a whole stored value
write_tensor, write_tensors   write bare tensors, which may be lazy, as a `.npy`, a `.safetensors` or a file of
                              torch.save, piece by piece: what `memstore get -o` writes

What a format can't express is refused, naming the leaf, before its target is touched. Tensors are written by `write`
from the mapped entry, so a full disk is an error and the memory stays small.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from memstore import structure
from memstore._threads import between_forks
from memstore._wording import parse_size
from memstore.engine import Path
from memstore.errors import UnsupportedValueError, lack_of
from memstore.formats.files import ByteMeter, ExportFile, Progress, new_file, path_text, what_special
from memstore.formats.safetensors import why_not, write_checkpoint, write_safetensors
from memstore.structure import DTYPE_NAMES, NUMPY_DTYPES, modes

ExportFormat = Literal["safetensors", "memmap", "torch"]
EXPORT_FORMATS = ("safetensors", "memmap", "torch")
_WRITES = {  # a file of this suffix, which its readers expect to be of one format
    ".safetensors": "format='safetensors'",
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "format='torch'"),
    ".npy": "numpy.save(path, store.get(key))",
    ".npz": "numpy.savez(path, **store.get(key))",
}
_FOREIGN = frozenset(
    (".csv", ".gguf", ".h5", ".hdf5", ".json", ".msgpack", ".onnx", ".parquet", ".pickle", ".pkl", ".tar", ".tsv")
    + (".txt", ".yaml", ".yml", ".zip")
)


def check_export(path: str | os.PathLike[str], format: str, max_shard_size: int | str | None) -> tuple[str, int | None]:
    """Returns the path as text, and the limit in bytes."""
    if format not in EXPORT_FORMATS:
        raise ValueError(
            f"format is {', '.join(map(repr, EXPORT_FORMATS[:-1]))} or {EXPORT_FORMATS[-1]!r}, and not {format!r}"
        )
    if max_shard_size is not None and format != "safetensors":
        raise ValueError(f"max_shard_size is for format='safetensors', and not for {format!r}")
    name = path_text(path)
    suffix = os.path.splitext(name)[1]
    if suffix.lower() in _FOREIGN and not os.path.isdir(name):
        raise ValueError(
            f"{name}: memstore writes no {suffix} files: choose a path that ends with .safetensors, or with .pt and "
            "format='torch'"
        )
    writer = _WRITES.get(suffix.lower(), f"format={format!r}")
    if writer != f"format={format!r}" and not os.path.isdir(name):
        raise ValueError(f"{name}: {writer} writes {suffix} files, and format={format!r} doesn't")
    return name, None if max_shard_size is None else parse_size(max_shard_size)


def has_devices(description: bytes) -> bool:
    """Returns whether a stored value has tensors of other devices than the CPU, which an export reads without."""
    return any(found.device is not None for found in structure.plan_of(description).traits)


@modes.put_aside()
def export_value(
    key: str,
    description: bytes,
    value: Any,
    path: str,
    format: ExportFormat,
    *,
    limit: int | None,
    progress: Progress | None,
    durable: bool,
    allow_pickle: bool,
) -> None:
    """Writes `value`, which was got of an entry with this description, to `path`."""
    plan = structure.plan_of(description)
    meter = ByteMeter(structure.stored_bytes(plan), progress)
    try:
        if format == "safetensors":
            tensors = _named_tensors(plan, value)
            meter.total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            if limit is None and not os.path.isdir(path) and not path.endswith("/"):
                write_safetensors(os.path.abspath(path), tensors, meter, durable=durable)
            else:
                write_checkpoint(os.path.abspath(path), tensors, limit, meter, durable=durable)
        elif format == "memmap":
            with between_forks():
                from memstore.formats.memmap import write_memmap
            for name, tensor in structure.iter_tensors(value):
                _check_expanded(name, tensor)
            write_memmap(os.path.abspath(path), value, meter, durable=durable, allow_pickle=allow_pickle)
        else:
            with new_file(os.path.abspath(path), meter, durable=durable) as file:
                _export_torch(value, file)
    except UnsupportedValueError as error:
        error.key = key
        raise
    meter.finish()


def as_tensordict(value: Any) -> Any:
    """Returns the TensorDict that is exported for a value. Raises UnsupportedValueError for a leaf that has none."""
    with between_forks():
        from memstore.formats.memmap import as_collection
    return as_collection(value)


def make_memmap_folder(folder: str, source: Any, *, allow_pickle: bool) -> list[tuple[torch.Tensor, str]]:
    """Writes all of a TensorDict but the bytes of its tensors into an empty folder. Returns each with its file."""
    with between_forks():
        from memstore.formats.memmap import make_folder
    return make_folder(folder, source, allow_pickle=allow_pickle)


class _TorchSink:
    """A file for torch.save.

    An error waits until torch is done: raised within its C++, it and what it refers to would never be freed, and torch
    would raise another one instead.
    """

    def __init__(self, take: Callable[[memoryview], None]) -> None:
        self._take = take
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._take(view)
            except BaseException as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Does nothing: nothing is kept back."""


def save_torch(value: Any, take: Callable[[memoryview], None]) -> None:
    """Hands what torch.save writes to `take`, piece by piece.

    Raises:
        UnsupportedValueError: torch.save can't write it: one memory with two dtypes, or what can't be pickled.
        BaseException: what `take` has raised.
    """
    sink = _TorchSink(take)
    try:
        torch.save(value, sink)  # pyright: ignore[reportArgumentType]
    except (RuntimeError, AttributeError, TypeError) as error:
        if lack_of(error) is not None:
            raise
        raise UnsupportedValueError(f"torch.save can't write it: {error}") from error
    error, sink.error = sink.error, None
    if error is not None:
        raise error


def _export_torch(value: Any, file: ExportFile) -> None:
    """Writes as torch.save does. Raises UnsupportedValueError, which names the leaf if it can."""
    for path, tensor in structure.iter_tensors(value):
        if tensor.dtype in structure.traits.WITHOUT_COPY:
            raise UnsupportedValueError(
                f"{structure.render_path(path)}: torch.save has no storage of {tensor.dtype}: put its "
                "view(torch.uint8), and export that"
            )
    save_torch(value, file.write)


def _named_tensors(plan: structure.Plan, value: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors by their names joined with dots: safetensors has nothing else. Tied ones come twice."""
    for name in plan.object_names:
        if "__dict__" not in name:  # what a Module keeps beside its state_dict
            _refuse(name, "it is no tensor")
    found: dict[str, torch.Tensor] = {}
    paths: set[Path] = set()
    for path, tensor in structure.iter_tensors(value):
        name = ".".join(map(str, path)) or "tensor"
        if name in found:
            _refuse(path, f"another tensor is called {name!r} as well when names are joined by dots")
        special = what_special(tensor)
        _check_expanded(path, tensor)
        reason = f"it is {special}" if special else why_not(name, tensor)
        if reason:
            _refuse(path, reason)
        found[name] = tensor
        paths.add(path)
    for leaf in plan.leaves:
        if leaf.name not in paths:
            _refuse(leaf.name, "it is a numpy array, or a part of no plain tensor")
    return found


def _check_expanded(path: Path, tensor: torch.Tensor) -> None:
    reason = structure.traits.why_too_expanded(tensor)
    if reason:
        raise UnsupportedValueError(f"{structure.render_path(path)}: {reason}: format='torch' keeps it as it is")


def _refuse(path: Path, why: str) -> None:
    raise UnsupportedValueError(
        f"{structure.render_path(path)}: {why}, and safetensors has nothing for it; export as 'torch'"
    )


# --- Bare tensors ----------------------------------------------------------------------------------------------------


def write_tensor(path: str, name: str, tensor: torch.Tensor, progress: Progress | None = None) -> None:
    """Writes a tensor in the format that the ending of `path` names, in place of a file that is there.

    Args:
        path: ends with .npy, .safetensors, .pt or .pth.
        name: what safetensors calls it.
        tensor: a dense one, which may be lazy.
        progress: called with the bytes done and those in all.

    Raises:
        UnsupportedValueError: the format hasn't its dtype. Nothing was written.
        AlreadyExistsError: a folder is there.
        ValueError: another ending.
    """
    ending, target = os.path.splitext(path)[1], os.path.abspath(path)
    meter = ByteMeter(tensor.numel() * tensor.itemsize, progress)
    if ending == ".safetensors":
        reason = why_not(name, tensor)
        if reason:
            raise UnsupportedValueError(f"{name}: {reason}, which safetensors hasn't: write a .pt")
        write_safetensors(target, {name: tensor}, meter, durable=False)
    elif ending == ".npy":
        header = _npy_header(name, tensor)
        with new_file(target, meter, durable=False) as file:
            file.write_uncounted(header)
            file.write_tensor(tensor)
    elif ending in (".pt", ".pth"):
        with new_file(target, meter, durable=False) as file:
            _export_torch(tensor, file)
    else:
        raise ValueError(f"a tensor is written as .npy, .safetensors or .pt, and not as {ending!r}")
    meter.finish()


def write_tensors(path: str, tensors: Mapping[Path, torch.Tensor], progress: Progress | None = None) -> None:
    """Writes tensors, which may be lazy: into a .safetensors by their names joined by dots, else as nested dicts.

    Raises:
        UnsupportedValueError: safetensors hasn't a dtype, or two have one name there. Nothing was written.
        AlreadyExistsError: a folder is there.
    """
    meter = ByteMeter(sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()), progress)
    if os.path.splitext(path)[1] == ".safetensors":
        named = {".".join(map(str, name)) or "tensor": tensor for name, tensor in tensors.items()}
        refused = {name: why_not(name, tensor) for name, tensor in named.items()}
        reason = next((f"{name}: {why}, which safetensors hasn't" for name, why in refused.items() if why), "")
        if len(named) < len(tensors):
            reason = "two tensors have one name, when names are joined by dots as safetensors has them"
        if reason:
            raise UnsupportedValueError(f"{reason}: write a .pt")
        write_safetensors(os.path.abspath(path), named, meter, durable=False)
    else:
        with new_file(os.path.abspath(path), meter, durable=False) as file:
            _export_torch(_nested(tensors), file)
    meter.finish()


def _nested(tensors: Mapping[Path, torch.Tensor]) -> Any:
    """Puts tensors into dicts, by the parts of their names."""
    value: dict[str | int, Any] = {}
    for name, tensor in tensors.items():
        if not name:
            return tensor
        inner = value
        for part in name[:-1]:
            inner = inner.setdefault(part, {})
        inner[name[-1]] = tensor
    return value


def _npy_header(name: str, tensor: torch.Tensor) -> bytes:
    dtype = NUMPY_DTYPES.get(DTYPE_NAMES[tensor.dtype])
    if dtype is None:
        raise UnsupportedValueError(f"{name}: it is of {tensor.dtype}, which numpy hasn't: write a .safetensors or .pt")
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(tensor.shape)}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()
