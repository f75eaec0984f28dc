"""The tensors of a nested value by name, and a folder of them for Hugging Face's readers.

named_weights   the names, which are the same for a state_dict that was put and for what save_model has stored
export_hf       the folder
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memstore import structure
from memstore._info import Progress
from memstore._threads import between_forks
from memstore._wording import an_instance
from memstore.engine import Path, Record, decode_external
from memstore.errors import UnsupportedValueError
from memstore.store.model_fit import saved_weights
from memstore.structure import modes
from memstore.view import StoredTensor, bytes_shown

if TYPE_CHECKING:
    from memstore.formats import WholeFile

_WITHOUT_TENSORS: tuple[type, ...] = (str, bytes, int, float, complex, np.ndarray, type(None))


@modes.uncompiled
def named_weights(
    key: str, value: Any, prefix: str, names: Callable[[str], str | None] | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a value by their names, joined with dots. Raises what `iter_weights` raises of names."""
    weights = saved_weights(value)
    if weights is not None and any(name.startswith(prefix) for name in weights):
        value = weights
    found: dict[str, torch.Tensor] = {}
    origins: dict[str, Path] = {}
    tensors = [(".".join(map(str, path)), path, tensor) for path, tensor in structure.iter_tensors(value)]
    if isinstance(value, _WITHOUT_TENSORS):
        raise UnsupportedValueError(
            f"the value of {key!r} is {an_instance(value)}, and has no tensors to name", key=key
        )
    chosen = [one for one in tensors if one[0].startswith(prefix)]
    if tensors and not chosen:
        raise ValueError(f"no tensor of {key!r} has a name that starts with {prefix!r}: the first is {tensors[0][0]!r}")
    for stored, path, tensor in chosen:
        name: Any = stored[len(prefix) :]
        if names is not None:
            name = names(name)
            if name is None:
                continue
            if not isinstance(name, str):
                raise TypeError(f"names({stored[len(prefix) :]!r}) returned {name!r}: it returns a name, or None")
        if name in found:
            raise _one_name(key, name, origins[name], path)
        found[name], origins[name] = tensor, path
    return found


def _one_name(key: str, name: str, *paths: Path) -> ValueError:
    one, other = ("".join(f"[{part!r}]" for part in path) for path in paths)
    are_alike = len({".".join(map(str, path)) for path in paths}) == 1
    advice = (
        "no mapping of names can tell them apart: get the key, and take them by its own keys"
        if are_alike
        else "names= may rename one of them, or leave it out by returning None"
    )
    return ValueError(f"two tensors of {key!r} would be called {name!r}: {one} and {other}; {advice}")


@modes.put_aside()
def export_hf(
    key: str,
    record: Record,
    value: Any,
    target: str,
    *,
    config: Any,
    limit: int | None,
    dtype: torch.dtype | None,
    prefix: str,
    link: bool,
    progress: Progress | None,
    durable: bool,
) -> None:
    """Writes the folder of a model. Raises what `Store.export_hf` raises.

    Args:
        record: of the version.
        value: its view.
        target, limit: as `formats.check_export` returns them.
    """
    with between_forks():
        from memstore import formats

    beside = formats.beside_weights(config, dtype)
    tensors = named_weights(key, value, prefix, None)
    if formats.ties_weights(beside):  # a loader ties them again; else each name has its own bytes
        first: dict[Hashable, str] = {}
        places = {name: bytes_shown(leaf) if isinstance(leaf, StoredTensor) else name for name, leaf in tensors.items()}
        tensors = {name: leaf for name, leaf in tensors.items() if first.setdefault(places[name], name) == name}
    if not tensors:
        raise UnsupportedValueError(f"the value of {key!r} has no tensors to be written", key=key)
    for name, leaf in tensors.items():
        special = None if isinstance(leaf, StoredTensor) else formats.what_special(leaf)
        reason = f"it is {special}" if special else formats.why_not(name, formats.as_written(leaf, dtype))
        if reason:
            raise UnsupportedValueError(f"{name}: {reason}, which safetensors hasn't: export as 'torch'", key=key)
    whole: list[WholeFile] = []
    if record.adopted is not None and record.hosts is None and dtype is None and not prefix:
        whole = formats.whole_files(decode_external(record.adopted), tensors, link=link)
    as_written = [formats.as_written(leaf, dtype) for leaf in tensors.values()]
    meter = formats.ByteMeter(sum(leaf.numel() * leaf.itemsize for leaf in as_written), progress)
    formats.write_checkpoint(target, tensors, limit, meter, durable=durable, dtype=dtype, beside=beside, whole=whole)
    meter.finish()
