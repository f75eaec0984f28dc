"""Objects that only pickle can store. No other file imports pickle.

A pickle can run any code when it is read. So both functions are for callers that were told `allow_pickle=True`.
"""

from __future__ import annotations

import pickle
from typing import Any

from memstore.errors import UnsupportedValueError
from memstore.structure.checks import MalformedError


def write_pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def read_pickle(data: bytes) -> Any:
    """Raises MalformedError for bytes that are no pickle, UnsupportedValueError for one that can't be read here."""
    try:
        return pickle.loads(data)
    except (pickle.UnpicklingError, EOFError) as error:
        raise MalformedError(f"no pickle: {error}") from error
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # classes that this process lacks, and whatever their own code raises
        raise UnsupportedValueError(f"a leaf that was stored with pickle can't be read here: {error!r}") from error
