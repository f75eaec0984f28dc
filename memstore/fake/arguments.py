"""Arguments of operators: as refs for a recorder, on meta tensors for shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from memstore.fake.marks import META, Mark, map_tensors, mark_of, meta_twin, ref_of, tensors_in

Options = Mapping[str, Any]


def as_ref(tensor: torch.Tensor) -> Any:
    mark = mark_of(tensor)
    return tensor if mark is None else ref_of(tensor, mark)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else meta_twin(tensor)


def map_options(change: Callable[[torch.Tensor], Any], options: Options) -> dict[str, Any]:
    return {name: map_tensors(change, one) for name, one in options.items()}


def on_meta(options: Options, *, makes: bool = False) -> dict[str, Any]:
    """Options for the same on meta tensors, which are not pinned, and draw nothing."""
    changed = {name: one for name, one in options.items() if name != "pin_memory"}
    if makes or changed.get("device") is not None:
        changed["device"] = META
    if changed.get("generator") is not None:
        changed["generator"] = None
    return changed


def with_arguments(result: Any, written: list[torch.Tensor]) -> Any:
    """In place operators computed on values return those, in place of their fake arguments."""
    if not written:
        return result
    found = list(tensors_in((result,)))
    if len(found) != len(written) or all(one.is_meta for one in found):
        return result
    by_id = {id(one): fake for one, fake in zip(found, written, strict=True)}
    return map_tensors(lambda one: by_id[id(one)], result)


def leaves_meta(tensor: torch.Tensor, options: Options) -> bool:
    """Whether it is a plain meta tensor, and one like it is asked for elsewhere: `to_empty`, `skip_init`."""
    asked = options.get("device")
    return tensor.is_meta and asked is not None and asked.type != "meta"


def with_index(device: torch.device) -> torch.device:
    """The device itself: "cuda" is the one that is current in this process. CUDA isn't initialized for that."""
    index = cast("int | None", device.index)  # torch says that it is never None
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def device_of(tensors: Sequence[torch.Tensor], marks: Sequence[Mark | None]) -> torch.device:
    """The device of what an operator makes of these, of which some are fake. A number on the CPU goes to the others."""
    first: torch.device | None = None
    for one, mark in zip(tensors, marks, strict=True):
        if mark is not None:
            if mark.device.type != "cpu" or one.dim():
                return mark.device
            first = first or mark.device
    assert first is not None, "one is fake"
    return first


def is_about_meta(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error)
