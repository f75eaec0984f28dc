"""What can be saved: objects that give and take a state dict, and two that memstore has for what doesn't."""

from __future__ import annotations

import inspect
import random
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from memstore import modes
from memstore.wording import an


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: modules, optimizers, learning-rate schedulers, and whatever has these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """The state: nested dicts, lists and tuples of tensors and plain objects."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes the state that `state_dict` gave."""
        ...


AppState = dict[str, Any]  # Statefuls by name


class StateDict(dict[str, Any]):
    """A dict that can be saved: for numbers, tensors and other values that aren't Statefuls by themselves.

    Example:
        >>> progress = StateDict(epoch=0, losses=[])
        >>> progress.load_state_dict({"epoch": 3})
        >>> progress
        {'epoch': 3, 'losses': []}
    """

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Sets the entries of `state_dict`; others stay."""
        self.update(state_dict)


_WORDS = 625  # of the Mersenne Twister, with its position


@modes.uncompiled_methods
class RNGState:
    """The random state of the process: of torch (CPU and CUDA), of Python's `random`, and of numpy's global generator.

    In an app state it is restored last, and `Snapshot.take` doesn't change it. So the random numbers after a restore
    are the same as those after the take.
    """

    def __repr__(self) -> str:
        return "memstore.RNGState()"

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "rng_state": torch.get_rng_state(),
            "python": _python_state(),
            "numpy": np.random.get_state(legacy=False),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Sets the states that are there; those of CUDA as far as there are devices."""
        torch.set_rng_state(state_dict["rng_state"].cpu())
        if "python" in state_dict:
            _set_python_state(state_dict["python"])
        if "numpy" in state_dict:
            np.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict and torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), state_dict["cuda"], strict=False):
                torch.cuda.set_rng_state(state.cpu(), device)


def _python_state() -> torch.Tensor:
    """The state of `random` as one tensor: version, words, and the number that `gauss` has left, if there is one."""
    version, words, gauss = random.getstate()
    left = [] if gauss is None else [int(np.float64(gauss).view(np.int64))]
    return torch.tensor([version, *words, *left], dtype=torch.int64, device="cpu")


def _set_python_state(state: Any) -> None:
    if isinstance(state, torch.Tensor):
        version, *words = state.tolist()
        gauss = float(np.int64(words.pop()).view(np.float64)) if len(words) > _WORDS else None
        random.setstate((version, tuple(words), gauss))
    else:  # of snapshots before memstore kept it so; torch makes lists of tuples
        version, words, gauss = state
        random.setstate((version, tuple(words), gauss))


def check_app_state(app_state: Any) -> AppState:
    """The app state; TypeError or ValueError for what is none."""
    if not isinstance(app_state, dict):
        raise TypeError(f"app_state is a dict of Statefuls by name, and not {an(type(app_state))}")
    checked = cast("dict[Any, Any]", app_state)
    for key, value in checked.items():
        if not isinstance(key, str) or not key or "\0" in key:
            raise TypeError(f"the names in app_state are texts that aren't empty, and not {key!r}")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"app_state has the name {key!r}: a lone surrogate is no Unicode text") from None
        if isinstance(value, type) and inspect.isfunction(inspect.getattr_static(value, "state_dict", None)):
            raise TypeError(f"app_state[{key!r}] is the class {value.__qualname__}: give an instance of it")
        if not isinstance(value, Stateful):
            raise TypeError(
                f"app_state[{key!r}] is {an(type(value))}, which has no state_dict and load_state_dict: wrap it "
                "in memstore.StateDict"
            )
    if len([value for value in checked.values() if isinstance(value, RNGState)]) > 1:
        raise ValueError("app_state has several RNGStates: there is one random state in a process")
    return checked
