"""Tensors, which may be lazy, as a file: `.npy`, `.safetensors`, or one of torch.save.

It is written piece by piece, whole or not at all.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.formats.export import save_torch
from memstore.formats.output import Meter, NewFile, Progress, new_file
from memstore.formats.safetensors import why_not, write_safetensors
from memstore.structure import DTYPE_NAMES, NUMPY_DTYPES


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
    meter = Meter(tensor.numel() * tensor.itemsize, progress)
    if ending == ".safetensors":
        reason = why_not(name, tensor)
        if reason:
            raise UnsupportedValueError(f"{name}: {reason}, which safetensors hasn't: write a .pt")
        write_safetensors(target, {name: tensor}, meter, durable=False)
    elif ending == ".npy":
        header = _npy_header(name, tensor)
        with new_file(target, meter, durable=False) as file:
            _write_npy(file, header, tensor)
    elif ending in (".pt", ".pth"):
        with new_file(target, meter, durable=False) as file:
            save_torch(tensor, file)
    else:
        raise ValueError(f"a tensor is written as .npy, .safetensors or .pt, and not as {ending!r}")
    meter.finish()


def write_tensors(path: str, tensors: Mapping[Path, torch.Tensor], progress: Progress | None = None) -> None:
    """Writes tensors, which may be lazy: into a .safetensors by their names joined by dots, else as nested dicts.

    Raises:
        UnsupportedValueError: safetensors hasn't a dtype, or two have one name there. Nothing was written.
        AlreadyExistsError: a folder is there.
    """
    meter = Meter(sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()), progress)
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
            save_torch(_nested(tensors), file)
    meter.finish()


def _nested(tensors: Mapping[Path, torch.Tensor]) -> Any:
    """In dicts, by the parts of their names."""
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


def _write_npy(file: NewFile, header: bytes, tensor: torch.Tensor) -> None:
    file.write_uncounted(header)
    file.write_tensor(tensor)
