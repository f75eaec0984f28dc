"""Classes of the kinds that people store: dataclasses, enumerations, outputs of models, quantized weights.

transformers and torchao aren't installed here; what is here has the same shape.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TypedTensorDict

ran: list[str] = []  # code of these classes that ran

# -- dataclasses -----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    lr: float
    name: str = "adam"
    betas: tuple[float, float] = (0.9, 0.99)
    extra: Any = None
    computed: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        ran.append("Config.__post_init__")


@dataclass
class Child(Config):
    weight: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any
    n: int = 3


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = field(init=False)  # not set by anybody


@dataclass(frozen=True, slots=True)
class FrozenSlotted(Frozen):
    z: Any = None


class Undecorated(Config):
    """A subclass that isn't decorated has the same fields."""


@dataclass
class Careful:
    x: Any

    def __setattr__(self, name: str, value: Any) -> None:
        ran.append("Careful.__setattr__")
        object.__setattr__(self, name, value)


@dataclass
class Outer:
    @dataclass
    class Inner:
        x: Any

    inner: Any


@dataclass
class WithFinalizer:
    x: Any

    def __del__(self) -> None:
        ran.append("WithFinalizer.__del__")


@dataclass
class Module(torch.nn.Module):
    size: int = 3


# -- enumerations ----------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "r"
    GREEN = ("g", 1)
    ALSO_RED = "r"  # noqa: PIE796


class Level(enum.IntEnum):
    LOW = 1


class Text(str, enum.Enum):
    A = "a"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    ALL = 3


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Pair(tuple, enum.Enum):
    ZERO = (0, 0)


# -- mappings --------------------------------------------------------------------------------------------------------


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As transformers': its items are its fields that aren't None, and attributes too."""

    def __init_subclass__(cls) -> None:
        cls.known = True  # type: ignore[attr-defined]

    def __post_init__(self) -> None:
        ran.append("ModelOutput.__post_init__")
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value is not None:
                self[one.name] = value

    def __delitem__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no deletion")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no update")

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class Output(ModelOutput):
    last_hidden_state: Any = None
    hidden_states: Any = None
    attentions: Any = None


class BatchEncoding(UserDict):  # type: ignore[type-arg]
    """As transformers'."""

    def __init__(self, data: Any = None, encoding: Any = None, n_sequences: int | None = None) -> None:
        ran.append("BatchEncoding.__init__")
        super().__init__(data)
        self._encodings = encoding
        self._n_sequences = n_sequences

    def __getattr__(self, item: str) -> Any:
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None

    def __getstate__(self) -> Any:
        return {"data": self.data, "encodings": self._encodings, "n_sequences": self._n_sequences}

    def __setstate__(self, state: Any) -> None:
        self.data, self._encodings, self._n_sequences = state["data"], state["encodings"], state["n_sequences"]


class AttributeDict(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        ran.append("AttributeDict.__setitem__")
        super().__setitem__(key, value)


class SlottedDict(dict):  # type: ignore[type-arg]
    __slots__ = ("note",)


# -- tuples ----------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    loss: Any
    note: str = ""


class Sequence(Step):
    """As a PackedSequence: a subclass of a namedtuple."""

    def __new__(cls, *args: Any) -> Sequence:
        ran.append("Sequence.__new__")
        return super().__new__(cls, *args)


# -- tensors ---------------------------------------------------------------------------------------------------------


class Int8Weight(torch.Tensor):
    """As torchao's: integers and a scale for each row, which claim to be one tensor of floats."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, config: Any = None, dtype: Any = None) -> Int8Weight:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=dtype or scale.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, config: Any = None, dtype: Any = None) -> None:
        self.values_int8, self.scale, self.config = values, scale, config

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_int8", "scale"], [self.config, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> Int8Weight:
        return cls(inner["values_int8"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values_int8, args[0].scale, args[0].config, args[0].dtype)
        raise NotImplementedError(f"{func}")

    def __repr__(self, **_: Any) -> str:
        return f"Int8Weight({tuple(self.shape)})"

    @classmethod
    def of(cls, weight: torch.Tensor, config: Any = None) -> Int8Weight:
        scale = weight.abs().amax(1) / 127
        return cls((weight / scale[:, None]).round().to(torch.int8), scale, config, weight.dtype)


class Int4Weight(Int8Weight):
    """A class that inherits the protocol."""


class Half(torch.Tensor):
    """A subclass that has half of the protocol."""

    def __tensor_flatten__(self) -> Any:
        ran.append("Half.__tensor_flatten__")
        return [], None


# -- tensordict ------------------------------------------------------------------------------------------------------


class State(TypedTensorDict):
    x: torch.Tensor
    y: torch.Tensor


class Deeper(State):
    z: torch.Tensor


# -- tensors whose classes have operators of their own, and say nothing of what they are made of -----------------------


class Opaque(torch.Tensor):
    """A subclass whose elements lie in memory, and whose class has no operators."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{func}")

    def __repr__(self, **_: Any) -> str:
        return "Opaque()"


class Wrapper(torch.Tensor):
    """A subclass without memory, which doesn't name the tensor that it has. What comes of it is of its class again."""

    def __new__(cls, held: torch.Tensor) -> Wrapper:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(one.held if isinstance(one, cls) else one for one in args), **(kwargs or {})))

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}()"


class Copier(Wrapper):
    """A wrapper of which a plain tensor comes that is a copy."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.held.clone() if isinstance(one, cls) else one for one in args), **(kwargs or {}))
