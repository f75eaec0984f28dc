"""Real tensors that recorded operators were given. They have to be what they were when the operators run again.

Small ones are copied. Large ones must not change: a digest of their bytes tells whether they have, also by numpy or by
another process. Where bytes can't be had, torch's count of writes does.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
import xxhash

from memstore.errors import UnsupportedValueError

_COPIED = 64 << 10  # bytes


class Constant:
    """One of them. Until `keep` it is just itself, so that an operator that is not recorded can write it."""

    __slots__ = ("_is_kept", "_sign", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._is_kept = tensor, False
        self._sign: int | None = None  # None: nothing can change it; or nobody would know

    def keep(self) -> None:
        """The operator is recorded: values are those of now."""
        if self._tensor.is_meta or _is_plain(self._tensor) and self._tensor.nbytes <= _COPIED:
            self._tensor = self._tensor.detach().clone()
        else:
            self._is_kept, self._sign = True, _sign(self._tensor)

    def get(self, operator: Any) -> torch.Tensor:
        """The tensor.

        Raises:
            UnsupportedValueError: it isn't what it was, or nobody knows whether it is.
        """
        tensor = self._tensor
        if not self._is_kept:
            return tensor
        if self._sign is None:
            raise UnsupportedValueError(
                f"{operator} was given an inference tensor, whose changes can't be seen: give it a clone that was "
                "made outside of inference mode"
            )
        if _sign(tensor) != self._sign:
            raise UnsupportedValueError(
                f"{operator} was given a tensor of shape {tuple(tensor.shape)} that has been written since: "
                "materialize before that, or give it a clone"
            )
        return tensor


def _sign(tensor: torch.Tensor) -> int | None:
    """What is another number when the tensor has other values; None if there is no such."""
    if _is_plain(tensor) and tensor.device.type == "cpu":
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return xxhash.xxh3_64_intdigest(values.view(-1).view(torch.uint8).numpy().data)
    return None if tensor.is_inference() else tensor._version


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has bytes, as torch's own tensors and Parameters do."""
    is_torchs = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_torchs and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
