"""What an operator does with its tensors, as its schema says it: makes views, writes, or reads.

Schemas don't say all, so some operators are known by name: in-place collectives write what they are given, gathers read
only rows of their first argument, `zeros_like` and the like read nothing, and `set_` gives one tensor the memory of
another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten

_OF_ROWS: frozenset[Any] = frozenset(
    {
        _aten.index.Tensor,
        _aten._unsafe_index.Tensor,
        _aten.index_select.default,
        _aten.masked_select.default,
        _aten.gather.default,
        _aten.take.default,
        _aten.embedding.default,
    }
)
_OF_SHAPES = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
_MOVES = frozenset({"aten::to", "aten::type_as"})


class Rule(NamedTuple):
    """Attributes:
    written: place and name of each argument that is written.
    makes_views: some result is a view of the arguments, as a rule.
    moves: its results may be on another device; in inference mode such a one comes whole, and seems to make views.
    reads_rows: only those elements of the first argument are read that the result has.
    reads_nothing: only shapes and dtypes matter.
    keeps: another tensor gets the memory of an argument.
    reads_all: none of the rules above for less.
    """

    written: tuple[tuple[int, str], ...]
    makes_views: bool
    moves: bool
    reads_rows: bool
    reads_nothing: bool
    keeps: bool
    reads_all: bool


_rules: dict[Any, Rule] = {}


def rule_of(operator: Any) -> Rule:
    rule = _rules.get(operator)
    if rule is None:
        rule = _rules[operator] = _find(operator)
    return rule


def _find(operator: Any) -> Rule:
    schema = operator._schema
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if schema.name.startswith("c10d::") and schema.name.endswith("_"):
        written.append((0, schema.arguments[0].name))
    views = [one.alias_info for one in schema.returns if one.alias_info is not None and not one.alias_info.is_write]
    makes_views, reads_rows, reads_nothing = bool(views), operator in _OF_ROWS, schema.name in _OF_SHAPES
    return Rule(
        tuple(written),
        makes_views,
        moves=schema.name in _MOVES,
        reads_rows=reads_rows,
        reads_nothing=reads_nothing,
        keeps=schema.name == "aten::set_",
        reads_all=not (makes_views or reads_rows or reads_nothing),
    )
