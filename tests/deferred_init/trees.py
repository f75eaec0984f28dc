"""Random trees of torch's own modules, as plans: nested tuples, from which the same module is made again and again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

Plan = tuple[Any, ...]
parametrizations = nn.utils.parametrizations


def _pruned(rows: int, columns: int) -> nn.Module:
    module = nn.Linear(rows, columns)
    prune.random_unstructured(module, "weight", amount=0.5)
    return module


def _lazy(rows: int, columns: int) -> nn.Module:
    module = nn.LazyLinear(columns)
    module(torch.ones(2, rows))
    return module


def _trained(rows: int, columns: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(rows, columns), nn.BatchNorm1d(columns))
    module(torch.rand(3, rows))
    return module


LEAVES: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "without bias": lambda a, b: nn.Linear(a, b, bias=False),
    "bilinear": lambda a, b: nn.Bilinear(a, b, 2),
    "convolution": lambda a, b: nn.Conv2d(a, b, 3),
    "transposed": lambda a, b: nn.ConvTranspose1d(a, b, 2),
    "embedding": lambda a, b: nn.Embedding(a, b, padding_idx=0),
    "bag": lambda a, b: nn.EmbeddingBag(a, b, mode="max"),
    "batch norm": lambda a, b: nn.BatchNorm1d(a),
    "instance norm": lambda a, b: nn.InstanceNorm1d(a, affine=True, track_running_stats=True),
    "layer norm": lambda a, b: nn.LayerNorm((a, b)),
    "rms norm": lambda a, b: nn.RMSNorm(a),
    "group norm": lambda a, b: nn.GroupNorm(1, a),
    "prelu": lambda a, b: nn.PReLU(a),
    "lstm": lambda a, b: nn.LSTM(a, b, 2, bidirectional=True),
    "gru": lambda a, b: nn.GRU(a, b, batch_first=True),
    "cell": nn.RNNCell,
    "attention": lambda a, b: nn.MultiheadAttention(2 * a, 2, kdim=b, vdim=b, add_bias_kv=True),
    "encoder layer": lambda a, b: nn.TransformerEncoderLayer(2 * a, 2, b),
    "decoder": lambda a, b: nn.TransformerDecoder(nn.TransformerDecoderLayer(2 * a, 2, b), 2),
    "softmax": lambda a, b: nn.AdaptiveLogSoftmaxWithLoss(a, 10, [2, 5]),
    "weight norm": lambda a, b: parametrizations.weight_norm(nn.Linear(a, b)),
    "spectral norm": lambda a, b: parametrizations.spectral_norm(nn.Linear(a, b)),
    "orthogonal": lambda a, b: parametrizations.orthogonal(nn.Linear(a, b)),
    "hooked weight norm": lambda a, b: nn.utils.weight_norm(nn.Linear(a, b)),
    "hooked spectral norm": lambda a, b: nn.utils.spectral_norm(nn.Linear(a, b)),
    "pruned": _pruned,
    "lazy": _lazy,
    "lazy still": lambda a, b: nn.LazyConv2d(b, 3),
    "trained": _trained,
    "skipped": lambda a, b: nn.Sequential(*[_filled(nn.utils.skip_init(nn.Linear, a, b))]),
}


def _filled(module: nn.Module) -> nn.Module:
    for one in module.parameters():
        nn.init.uniform_(one, -1, 1)
    return module


def _again(one: torch.Tensor) -> None:
    nn.init.trunc_normal_(one, std=0.4) if one.dim() > 1 else nn.init.normal_(one)


def _initialised(module: nn.Module) -> nn.Module:
    for one in module.parameters():
        if not isinstance(one, nn.UninitializedParameter) and one.is_floating_point():
            _again(one)
    return module


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _tied(module: nn.Module) -> nn.Module:
    """The first parameter is that of a second module too, by another name."""
    other = nn.Module()
    for one in module.parameters():
        other.shared = one
        break
    return nn.ModuleDict({"a": module, "b": other})


def _is_lazy(module: nn.Module) -> bool:
    return any(isinstance(one, nn.UninitializedParameter) for one in module.parameters())


def _saved(module: nn.Module) -> nn.Module:
    """Its own state, loaded again: copied by names."""
    if not _is_lazy(module):
        module.load_state_dict({name: one.clone() + 1 for name, one in module.state_dict().items()})
    return module


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "initialised": _initialised,
    "frozen": _frozen,
    "tied": _tied,
    "saved": _saved,
    "half": lambda module: module.half(),
    "double": lambda module: module.to(torch.float64),
    "train and eval": lambda module: module.train().eval(),
    "copied": lambda module: nn.ModuleList([module, copy.deepcopy(module)]),
    "twice": lambda module: nn.Sequential(module, module),
    "compiled": lambda module: nn.Sequential(torch.compile(module)),
}
NOT_COPIED = {"hooked weight norm", "hooked spectral norm", "pruned"}  # their weights are no leaves

leaves = st.tuples(st.sampled_from(sorted(LEAVES)), st.integers(1, 5), st.integers(1, 5))
plans = st.recursive(
    leaves,
    lambda plans: st.one_of(
        st.tuples(st.sampled_from(sorted(AROUND)), plans),
        st.tuples(st.just("list"), st.lists(plans, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


def build(plan: Plan) -> nn.Module:
    """The module of a plan."""
    kind = plan[0]
    if kind in LEAVES:
        return LEAVES[kind](*plan[1:])
    if kind == "list":
        return nn.ModuleList([build(one) for one in plan[1]])
    return AROUND[kind](build(plan[1]))


def kinds(plan: Plan) -> set[str]:
    """All kinds that are in a plan."""
    inner = plan[1] if plan[0] == "list" else [plan[1]] if plan[0] in AROUND else []
    return {plan[0]}.union(*(kinds(one) for one in inner))
