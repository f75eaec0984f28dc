"""Devices by the names that stored values have of them. A process may lack the backend that another one had."""

from __future__ import annotations

import re

import torch

from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,4})?")


def read_device(name: str) -> torch.device | str:
    """The device, or its name where torch has none of it here. Raises MalformedError for what no device is called."""
    try:
        return torch.device(name)
    except RuntimeError:
        if _NAME.fullmatch(name):
            return name
        raise MalformedError(f"no device is called {name!r}") from None


def need_device(device: torch.device | str | None, instead: torch.device | None = None) -> torch.device | None:
    """What `read_device` read, where the device itself is needed, or the one that the caller asked for instead of it.

    Raises UnsupportedValueError.
    """
    if instead is not None:
        return instead
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise UnsupportedValueError(
                f"the value was put from the device {device!r}, which this process can't use ({error}); "
                "pass device='cpu', or import what registers it"
            ) from error
    return device


def to_device(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
    """As `Tensor.to`. Raises RuntimeError for a device that this process doesn't have."""
    try:
        return tensor.to(device, non_blocking=non_blocking)
    except NO_DEVICE as error:
        if has_device(device):
            raise
        raise lacks_device(device, error) from error


NO_DEVICE = (AssertionError, RuntimeError, ImportError)
"""What torch raises for a device that isn't there: it was built without, finds no driver, or lacks its module."""


def own_device(device: torch.device | str | None) -> torch.device | None:
    """The device. Raises RuntimeError for one that this process doesn't have, before anything is read for it."""
    found = None if device is None else torch.device(device)
    if has_device(found):
        return found
    raise RuntimeError(f"device='{found}': this process has no such device; without device= the tensors are on the CPU")


def has_device(device: torch.device | None) -> bool:
    """Whether this process has devices of this kind."""
    if device is None or device.type in ("cpu", "meta"):
        return True
    try:
        return bool(torch.get_device_module(device.type).is_available())
    except (RuntimeError, AttributeError):
        return False


def lacks_device(device: torch.device | None, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"device='{device}': this process has no such device ({error}); without device= the tensors are on the CPU"
    )
