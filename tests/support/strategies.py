"""Hypothesis strategies: nested values as memstore stores them, and the tensors, keys and objects in them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import datetime
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)

_ZONES = st.sampled_from([None, datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-3), "here")])

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def keys(*, only_text: bool = False) -> st.SearchStrategy[Any]:
    """Keys of dicts, also those that Python holds equal to others (1, True, 1.0) and those that look like paths."""
    names = st.one_of(text, st.sampled_from(["a", "b", "a/b", "..", "meta", "a.b", "", "🔑", "__metadata__"]))
    if only_text:
        return names
    numbers = st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False))
    return st.one_of(names, numbers, st.none(), st.binary(max_size=4), st.tuples(names, st.integers()))


def atoms() -> st.SearchStrategy[Any]:
    """Leaves that are no tensors."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        text,
        st.binary(max_size=16),
        st.sampled_from([torch.float16, torch.device("cuda:3"), torch.Size([2, 3]), torch.strided, ..., range(3), b""]),
        st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x"), np.datetime64("2020-01-01")]),
        st.frozensets(st.integers(), max_size=3),
        st.one_of(st.datetimes(timezones=_ZONES), st.times(timezones=_ZONES), st.dates(), st.timedeltas()),
        st.one_of(st.decimals(), st.fractions(), st.uuids(), st.sampled_from(uuid.SafeUUID)),
        st.sampled_from([Path("/a/b"), PurePosixPath("../é"), datetime.timezone.utc]),
    )


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass of an imported module."""

    first: Any
    second: Any = None


def holders(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers beside lists, tuples and dicts."""
    lists, named = st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return st.one_of(
        st.builds(deque, lists, st.sampled_from([None, 3, 9])),
        st.dictionaries(keys(), inner, max_size=3).map(_counter),
        st.builds(Record, inner, inner),
        named.map(lambda entries: Namespace(**entries)),
        named.map(lambda entries: SimpleNamespace(**entries)),
    )


def _counter(entries: dict[Any, Any]) -> Counter[Any]:
    made: Counter[Any] = Counter()
    dict.update(made, entries)  # Counter's own adds
    return made


def objects() -> st.SearchStrategy[Any]:
    """Nested values without tensors."""
    return st.recursive(
        atoms(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys(), inner, max_size=3),
            st.dictionaries(keys(), inner, max_size=3).map(OrderedDict),
            holders(inner),
        ),
        max_leaves=8,
    )


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any bits that the dtype has: NaN, infinities and subnormals among them."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Tensors of every dtype, contiguous or not; some Parameters, some Buffers, some that require grad."""
    sizes = draw(shapes) if shape is None else (*shape, *draw(st.lists(st.integers(0, 3), max_size=2)))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = random_bits(sizes, dtype, draw(st.integers(0, 1 << 32)))
    if shape is None and dtype.itemsize > 0:
        tensor = draw(st.sampled_from(_LAYOUTS))(tensor)
    kind = draw(st.sampled_from(["tensor"] * 5 + ["grad", "parameter", "buffer"]))
    differentiable = dtype.is_floating_point or dtype.is_complex
    if kind == "grad" and differentiable:
        return tensor.detach().requires_grad_()
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=differentiable)
    return torch.nn.Buffer(tensor, persistent=draw(st.booleans())) if kind == "buffer" else tensor


_LAYOUTS = [
    lambda tensor: tensor,
    lambda tensor: tensor,
    lambda tensor: tensor.transpose(0, -1) if tensor.ndim > 1 else tensor,
    lambda tensor: tensor[..., ::2] if tensor.ndim else tensor,
    lambda tensor: tensor[1:] if tensor.ndim else tensor,
    lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    lambda tensor: tensor[..., ::2].unsqueeze(0).expand(4, *tensor[..., ::2].shape) if tensor.ndim else tensor,
]


@st.composite
def sparse_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Sparse tensors of every layout."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.complex64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dense = torch.randint(0, 3, (2 * rows, 2 * columns), generator=generator).to(dtype)
    layout = draw(st.sampled_from(["coo", "uncoalesced", "csr", "csc", "bsr", "bsc"]))
    if layout == "uncoalesced":
        indices = torch.randint(0, 2, (2, rows), generator=generator)
        return torch.sparse_coo_tensor(indices, dense[:rows, :1].squeeze(1), dense.shape, check_invariants=True)
    blocks = (2, 1) if layout[0] == "b" else None
    made = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=blocks)
    return made.requires_grad_() if dtype.is_floating_point and draw(st.booleans()) else made


@st.composite
def tied_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors that share memory in several ways."""
    base = random_bits((draw(st.integers(2, 6)), 4), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    views = {
        "whole": base,
        "again": base,
        "alias": base.view(base.shape),
        "row": base[0],
        "tail": base[1:],
        "columns": base[:, :2],
        "columns again": base[:, :2].view(-1, 2),
        "column": base[:, :1],
        "middle": base[:, 1:3],
        "turned": base.t(),
        "bytes": base.view(torch.uint8),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(views)), min_size=1, max_size=4, unique=True))
    return {name: views[name] for name in chosen}


@st.composite
def tensordicts(draw: st.DrawFn, batch: tuple[int, ...] | None = None, depth: int = 2) -> Any:
    """TensorDicts with nested ones of longer batch sizes, names, locks, objects and lazy stacks inside."""
    if batch is None:
        batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    made = TensorDict({}, batch_size=batch, device=draw(st.sampled_from([None, "cpu"])))
    for key in draw(st.lists(keys(only_text=True), max_size=4, unique=True)):
        kind = draw(st.sampled_from(["tensor", "tensor", "object", "nested", "stack"]))
        if kind == "nested" and depth:
            made._set_str(key, draw(tensordicts(batch, depth - 1)), validated=True, inplace=False, non_blocking=False)
        elif kind == "stack" and depth and batch:
            members = [draw(tensordicts(batch[1:], depth - 1)) for _ in range(batch[0])]
            if len({member.device for member in members} | {made.device}) == 1:
                stack = lazy_stack(members, 0)
                made._set_str(key, stack, validated=True, inplace=False, non_blocking=False)
        elif kind == "object":
            made.set_non_tensor(key, draw(atoms()))
        else:
            made._set_str(key, draw(tensors(batch)), validated=True, inplace=False, non_blocking=False)
    if batch and not _has_stack(made) and draw(st.booleans()):
        names = st.lists(st.sampled_from("abcd"), min_size=len(batch), max_size=len(batch), unique=True)
        made.names = draw(names)
    return made.lock_() if draw(st.booleans()) else made


def _has_stack(value: TensorDict) -> bool:
    """Lazy stacks refuse names from above unless all members have the same."""
    entries = value._tensordict.values()
    return any(isinstance(entry, LazyStackedTensorDict) for entry in entries) or any(
        _has_stack(entry) for entry in entries if type(entry) is TensorDict
    )


def values() -> st.SearchStrategy[Any]:
    """Nested values of all kinds of containers and leaves."""
    return st.recursive(
        st.one_of(tensors(), tensors(), atoms(), tensordicts(), tied_tensors(), sparse_tensors()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys(), inner, max_size=4),
            st.dictionaries(keys(only_text=True), inner, max_size=4).map(OrderedDict),
            holders(inner),
        ),
        max_leaves=10,
    )
