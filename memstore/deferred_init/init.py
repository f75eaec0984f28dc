"""deferred_init, is_deferred, materialize_tensor; and the recording of one call of deferred_init."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from memstore._wording import an
from memstore.deferred_init.events import Event, Past, generator_of, next_draw, now, those_in
from memstore.deferred_init.replay import compute, skip, values_of
from memstore.deferred_init.slots import slots_of
from memstore.deferred_init.tensors import is_deferred_tensor, materialize, note_new_parameters, note_wrapper
from memstore.errors import UnsupportedValueError
from memstore.fake import Mark, Session, TensorRef, in_session
from memstore.structure import modes

# --- What a user calls -----------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


@modes.uncompiled
def deferred_init(module_fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Makes a module whose tensors take no memory yet. Operations on them are recorded, and replayed later.

    A replay gives the same bits as the constructor would have given now, random numbers included, in whichever order
    parts are materialized. Nothing is drawn from torch's generators, but they get new seeds, so random numbers that are
    drawn afterwards don't depend on the module.

    If the constructor reads values, the operations on which they depend are replayed at once.

    Args:
        module_fn: the module's class, or any callable that makes the module.
        args: the positional arguments of `module_fn`.
        kwargs: its keyword arguments.

    Returns:
        The result of `module_fn`. Tensors that existed before aren't changed.

    Raises:
        UnsupportedValueError: an operator can't be recorded; the message names it.
        TypeError: `module_fn` is a module.
        Exception: whatever `module_fn` raises.

    Example:
        >>> import torch
        >>> from memstore.deferred_init import deferred_init, is_deferred, materialize_module
        >>> model = deferred_init(torch.nn.Linear, 4, 2)
        >>> model.weight
        Parameter containing:
        tensor(..., size=(2, 4), requires_grad=True, fake=True)
        >>> materialize_module(model)
        Materialized(0 found, 2 replayed)
        >>> is_deferred(model), model(torch.ones(4)).shape
        (False, torch.Size([2]))
    """
    made: Any = module_fn  # anybody's
    if isinstance(made, torch.nn.Module):
        name = type(made).__qualname__
        raise TypeError(
            f"module_fn makes a module, and this {name} is made already: give its class and its arguments, as in "
            f"deferred_init({name}, ...)"
        )
    note_new_parameters()
    with in_session(Session(Recording())) as session:
        result = module_fn(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            for one in _tensors_of(result):
                session.note(one)
                note_wrapper(one)
    return result


@modes.uncompiled
def is_deferred(obj: torch.Tensor | torch.nn.Module) -> bool:
    """Whether a tensor, or a tensor of a module, is deferred.

    Args:
        obj: a tensor or a module.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(obj, torch.Tensor):
        return is_deferred_tensor(obj)
    found: Any = obj  # anybody's
    if isinstance(found, torch.nn.Module):
        return any(is_deferred_tensor(one) for one in _tensors_of(found))
    raise ValueError(f"a tensor or a module is needed, and this is {an(type(obj))}")


@modes.uncompiled
def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the real tensor for a deferred one, of the same class and with the same attributes.

    The deferred one stays as it is. A second call returns the same result, until `materialize_module` makes the
    deferred one real itself; both share their memory then. Tensors that share memory share it in their results.

    Args:
        tensor: a deferred tensor. A real tensor is returned as it is.

    Raises:
        UnsupportedValueError: it can't be replayed; the message names the operator, and says why.
        TypeError: it is no tensor.
    """
    given: Any = tensor
    if not isinstance(given, torch.Tensor):
        instead = ": materialize_module takes modules" if isinstance(given, torch.nn.Module) else ""
        raise TypeError(f"materialize_tensor takes a tensor, and not {an(type(given))}{instead}")
    return materialize([tensor])[0]


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a module and its descendants, or a tensor itself."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return [slot.tensor for module in value.modules() for slot in slots_of(module)]
    return []


# --- Recording -------------------------------------------------------------------------------------------------------


class Recording:
    """A recorder (see `memstore.fake`), which keeps what it hears in the pasts of the tensors' storages."""

    def __init__(self) -> None:
        self.streams = 0

    def new_history(self) -> Past:
        return Past(Recording)

    def begin(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Event:
        event = Event(operator, args, options)
        if event.is_random:
            event.draw = next_draw(self, _generator(args, options), event, skip)
        return event

    def commit(self, event: Event, made: Sequence[tuple[int, TensorRef]], written: Sequence[Mark]) -> None:
        event.made = tuple(made)
        event.keep()
        for mark in written:
            past = mark.history
            if isinstance(past, Past) and past.is_over:
                raise UnsupportedValueError(
                    f"{event.operator} would write a deferred tensor that was materialized before: write into what "
                    "materialize_tensor returned"
                )
        for mark in written:
            if isinstance(mark.history, Past):
                mark.history.writes += 1
        event.moment = now()
        for mark in dict.fromkeys([*(ref.mark for _, ref in made), *written]):
            if isinstance(mark.history, Past):
                mark.history.events.append(event)

    def compute(self, event: Event) -> Any:
        return compute(event)

    def run_real(self, event: Event) -> Any:
        result = compute(event)
        assert event.draw is not None, "it draws"
        event.draw.stream.fix(event.draw.number + 1)
        return result

    def values(self, ref: TensorRef) -> torch.Tensor:
        return values_of(ref)


def _generator(args: Sequence[Any], options: Mapping[str, Any]) -> torch.Generator:
    """Returns the generator that an operator with these arguments draws from."""
    given = options.get("generator")
    if given is not None:
        return given
    device = options.get("device")
    if device is None:
        refs = list(those_in((*args, *options.values()), TensorRef))
        devices = [one.device for one in args if isinstance(one, torch.Tensor)]
        device = refs[0].mark.device if refs else next(iter(devices), torch.device("cpu"))
    with modes.put_aside():
        return generator_of(device)
