"""The class of a fake tensor outside of its mode: it says by itself what it is, and where.

It is a class of its own for each class of tensors: an instance of that one, under the same name. A tensor becomes of it
at the end of its mode, as lazy parameters become others: by assignment to `__class__`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


class FakeTensor:
    """What all these classes have. A torch function on one of them runs in a mode of its own.

    Attributes:
        run: by which; `mode.py` sets it.
        original: the class that the tensor had.
    """

    __slots__ = ()
    run: Run
    original: type[torch.Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeTensor.run(function, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = FakeTensor.run(torch.Tensor.__repr__, (type(self),), (self,), {})
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return FakeTensor.run(self.original.__deepcopy__, (type(self),), (self, memo), {})

    def set_(self, *args: Any, **options: Any) -> Any:
        return FakeTensor.run(torch.Tensor.set_, (type(self),), (self, *args), options)  # torch asks nobody

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FakeTensor.run(torch.Tensor.__reduce_ex__, (type(self),), (self, protocol), {})


def become_fake(tensor: torch.Tensor) -> None:
    """The tensor becomes of the class that says that it is fake."""
    cls = type(tensor)
    if not issubclass(cls, FakeTensor):
        tensor.__class__ = _fake_class(cls)


def original_class(cls: type[Any]) -> type[torch.Tensor]:
    return cls.original if issubclass(cls, FakeTensor) else cls


@functools.cache
def _fake_class(cls: Any) -> Any:
    def new(_: Any, *args: Any, **options: Any) -> Any:
        return cls(*args, **options)  # `type(parameter)(values)`, as loaders of weights do, makes what isn't fake

    names = {"original": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    names["__new__"] = new
    if hasattr(cls, "cls_to_become"):  # of a lazy one that gets its shape outside of the mode
        names["cls_to_become"] = _fake_class(cls.cls_to_become)
    return type(cls)(cls.__name__, (FakeTensor, cls), names)
