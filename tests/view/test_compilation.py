"""torch.compile with lazy leaves: it breaks the graph, and each leaf is read where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memstore


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    torch._dynamo.reset()


def test_compilation_breaks_the_graph_at_a_lazy_leaf(store: memstore.Store) -> None:
    store.put("key", torch.rand(6, 4))
    compiled = torch.compile(lambda x: (x * 2).sum() + torch.ones(3), backend="eager")
    assert torch.equal(compiled(store.view("key")), (store.get("key") * 2).sum() + torch.ones(3))


TWO_LEAVES: dict[str, Callable[[Any], torch.Tensor]] = {  # what is compiled for the one must not read the other
    "added": lambda value: value["w"] + value["b"],
    "rows": lambda value: value["w"][3] + value["b"][:4],
    "indices": lambda value: value["w"][torch.tensor([3, 1])] + value["b"][torch.tensor([2, 0])][:, None],
    "masks": lambda value: value["w"][value["b"] > 0].sum() + value["b"][value["b"] < 0].sum(),
    "copies": lambda value: value["w"].clone() + value["b"].data + value["b"].new_tensor([1.0]),
    "numbers": lambda value: torch.tensor(value["b"].tolist()) + value["w"][0, 0].item(),
    "numpy": lambda value: torch.from_numpy(value["w"].numpy()) + torch.from_numpy(value["b"].numpy()),
    "read rows": lambda value: memstore.read_rows(value, [3, 1])["w"] + memstore.read_rows(value["b"], [2, 0])[:, None],
    "a layer": lambda value: nn.functional.linear(torch.ones(4), value["w"], value["b"]),
}


@pytest.mark.parametrize("function", TWO_LEAVES.values(), ids=list(TWO_LEAVES))
def test_what_is_compiled_reads_each_leaf_where_it_is(function: Any, store: memstore.Store) -> None:
    value = {"w": torch.randn(4, 4), "b": torch.tensor([100.0, -200.0, 300.0, -400.0])}
    store.put("layer", value)
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        assert torch.allclose(compiled(store.view("layer")), function(value))


def test_a_module_that_shows_leaves_is_compiled(store: memstore.Store) -> None:
    model, lazy = nn.Linear(4, 4), nn.Linear(4, 4)
    store.put("layer", model.state_dict())
    lazy.load_state_dict(store.view("layer"), assign=True)
    assert torch.allclose(torch.compile(lazy, backend="eager")(torch.ones(4)), model(torch.ones(4)))


def test_a_graph_without_breaks_says_why_not(store: memstore.Store) -> None:
    store.put("key", torch.rand(6, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="StoredTensor"):
        torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(store.view("key"))
