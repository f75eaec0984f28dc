"""Objects beside the tensors that torch.save has written: read in torch's safe way, unless pickle is allowed."""

from __future__ import annotations

import io
from typing import Any

import torch

from memstore.convert.rules import Rules
from memstore.errors import ResourceLimitError, UnsupportedValueError, lacks_told
from memstore.wording import first_line


def load_object(what: str, data: bytes, rules: Rules) -> Any:
    """What torch.save has written.

    Args:
        what: is read, for errors.

    Raises:
        UnsupportedValueError: only pickle can read it, or it is damaged.
    """
    try:
        with lacks_told(what):
            return torch.load(io.BytesIO(data), weights_only=not rules.allow_pickle, map_location="cpu")
    except ResourceLimitError:
        raise
    except Exception as error:  # torch documents none of those that it raises for foreign bytes
        detail = first_line(error)
        hint = (
            ""
            if rules.allow_pickle
            else ", which can run code: convert it with allow_pickle=True if you trust who saved it"
        )
        raise UnsupportedValueError(
            f"{what} can't be read{' without pickle' if hint else ''} ({detail:.200}){hint}"
        ) from error
