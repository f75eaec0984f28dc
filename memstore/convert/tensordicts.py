"""TensorDicts, as other formats than theirs can have them: dicts, without batch sizes."""

from __future__ import annotations

import sys
from typing import Any

from memstore.late_imports import between_forks


def is_collection(value: Any) -> bool:
    """Whether it is a TensorDict, a tensorclass or of their like: none is, as long as nobody has imported them."""
    if "tensordict" not in sys.modules:
        return False
    with between_forks():
        from tensordict import is_tensor_collection
    return is_tensor_collection(value)


def opened(value: Any) -> Any:
    """A collection as a dict of its entries, or what it has that is no tensor; None for one that is more than that."""
    with between_forks():
        from tensordict import NonTensorData, NonTensorStack, TensorDict
    if type(value) is NonTensorData:
        return value.data
    if type(value) is NonTensorStack:
        return value.tolist()
    if type(value) is TensorDict:
        return dict(value.items())  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return None
