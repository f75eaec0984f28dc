"""Steps that `torch.distributed.checkpoint` saves, with memstore's storage, and what torch's own writer has saved.

State dicts come by torch's own calls, by which an optimizer has the names of its model's parameters: so it can be
restored on another mesh, and by another program.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from memstore.errors import MemstoreError, StoreTimeoutError, UnsupportedValueError
from memstore.integrations import dcp
from memstore.integrations.dcp.calls import async_save_to_tiers
from memstore.snapshot import AppState, RNGState
from memstore.snapshot.buckets import is_url
from memstore.snapshot.increments import LATEST


class DcpBackend:
    """Checkpoints of `memstore.integrations.dcp`.

    Args:
        options: for a bucket.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def _options_of(self, path: str) -> dict[str, Any] | None:
        return self._options if is_url(path) else None

    def save(self, paths: Sequence[str], app_state: AppState, increment: bool) -> None:
        state = _state_dicts(app_state)
        for path in paths:
            base = LATEST if increment else None
            writer = dcp.StorageWriter(path, base=base, storage_options=self._options_of(path))
            with _tier_of(path, paths):
                dcp.save(state, storage_writer=writer)

    def start(self, paths: Sequence[str], app_state: AppState, increment: bool) -> _PendingDcp:
        base = LATEST if increment else None
        try:
            found = async_save_to_tiers(_state_dicts(app_state), paths, base=base, options=self._options_of)
        except CheckpointException as error:
            raise _as_memstores(error) from error
        return _PendingDcp(paths, found)


class _PendingDcp:
    def __init__(self, paths: Sequence[str], futures: Sequence[Future[Any]]) -> None:
        self._paths, self._futures = paths, futures

    def wait(self, timeout: float | None = None) -> object:
        deadline = None if timeout is None else time.monotonic() + timeout
        for path, future in zip(self._paths, self._futures, strict=True):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not wait_for([future], left).done:
                raise StoreTimeoutError(f"{path} isn't saved yet after {timeout:g} s: wait longer")
            with _tier_of(path, self._paths):
                future.result()
        return None

    def done(self) -> bool:
        return all(future.done() for future in self._futures)


@contextlib.contextmanager
def _tier_of(path: str, paths: Sequence[str]) -> Generator[None]:
    """Raises what fails in the last tier without torch's exception around it; of an earlier one it warns.

    torch tells an error on all ranks, so all of them go on alike.
    """
    try:
        yield
    except CheckpointException as error:
        found = _as_memstores(error)
        if path == paths[-1]:
            raise found from error
        warnings.warn(f"there is no checkpoint in {path}, but the last tier is written: {found}", RuntimeWarning, 4)


def restore(
    path: str, app_state: AppState, *, is_torchs: bool, allow_pickle: bool, options: dict[str, Any] | None = None
) -> None:
    """Restores a checkpoint. Every rank calls this.

    Args:
        is_torchs: whether torch's own writer saved it.
        options: for a bucket.

    Raises:
        UnsupportedValueError: it did, with pickle, and that isn't allowed.
        Exception: as of `dcp.load`, without torch's CheckpointException around it.
    """
    if is_torchs and not allow_pickle:
        raise UnsupportedValueError(
            f"{path} is a checkpoint that torch's own writer saved, with pickles, which can run code: give the manager "
            'storage_options={"allow_pickle": True} if you trust whoever saved it, or make a snapshot of it by '
            f"`memstore convert {path} NEW`"
        )
    reader: Any = FileSystemReader(path) if is_torchs else dcp.StorageReader(path, storage_options=options)
    try:
        state = _state_dicts(app_state)
        flat = _flat_modules(app_state, state, set(reader.read_metadata().state_dict_metadata))
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner() if is_torchs else None)
    except CheckpointException as error:
        raise _as_memstores(error) from error
    _load(app_state, state, flat)


# --- State dicts, by torch's calls -----------------------------------------------------------------------------------


def _state_dicts(app_state: AppState) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in app_state.items():
        module = _module_of(value, app_state)
        if isinstance(value, torch.nn.Module):
            found[key] = get_model_state_dict(value)
        elif module is not None:
            found[key] = get_optimizer_state_dict(module, value)
        else:
            found[key] = value.state_dict()
    return found


def _module_of(value: Any, app_state: AppState) -> torch.nn.Module | None:
    """Returns the module whose parameters an optimizer has; None for what is no optimizer, or that of no module."""
    if not isinstance(value, torch.optim.Optimizer):
        return None
    wanted = {id(parameter) for group in value.param_groups for parameter in group["params"]}
    for module in app_state.values():
        if isinstance(module, torch.nn.Module) and wanted <= {id(one) for one in module.parameters()}:
            return module
    return None


def _flat_modules(app_state: AppState, state: dict[str, Any], names: set[str]) -> dict[str, dict[str, Any]]:
    """Returns modules whose tensors stand without the module's name, as torchtitan saves them; `state` gets them so."""
    flat: dict[str, dict[str, Any]] = {}
    for key, value in app_state.items():
        own = list(state[key]) if isinstance(value, torch.nn.Module) else []
        if own and names.issuperset(own) and not any(name.startswith(f"{key}.") for name in names):
            flat[key] = state.pop(key)
    for tensors in flat.values():
        state.update(tensors)
    return flat


def _load(app_state: AppState, state: Mapping[str, Any], flat: Mapping[str, dict[str, Any]]) -> None:
    """Gives the objects what was loaded; the random state comes last, since others may draw numbers."""
    for key, value in sorted(app_state.items(), key=lambda item: isinstance(item[1], RNGState)):
        module = _module_of(value, app_state)
        loaded = {name: state[name] for name in flat[key]} if key in flat else state[key]
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, loaded)
        elif module is not None:
            set_optimizer_state_dict(module, value, loaded)
        else:
            value.load_state_dict(loaded)


def _as_memstores(error: CheckpointException) -> Exception:
    """Returns the first rank's error in the place of torch's, which is a BaseException."""
    for rank, (found, _) in sorted(error.failures.items()):
        if isinstance(found, MemstoreError | OSError | TypeError | ValueError):
            return found
        return MemstoreError(f"rank {rank}: {type(found).__name__}: {found}")
    return MemstoreError(str(error))
