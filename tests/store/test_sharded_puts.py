"""What ranks may put: tensors of every kind and layout, and what is refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore
from memstore import TensorShard

pytestmark = pytest.mark.embedded


def put_by_ranks(store: memstore.Store, *values: Any, key: str = "key") -> int:
    """Each value is what one rank puts."""
    size = len(values)
    puts: list[Any] = [
        store.put_sharded(key, value, attempt="one", rank=rank, world_size=size, wait=False)
        for rank, value in enumerate(values)
    ]
    return puts[-1].wait(30)


def test_what_lies_between_the_elements_is_not_stored(store: memstore.Store) -> None:
    base = torch.arange(1, 8001).reshape(1000, 8)
    column = base[:, :1].expand(1000, 50)
    put_by_ranks(
        store,
        {"plain": column, "shard": TensorShard(base[:, 2:3], (1000, 2), (0, 0))},
        {"shard": TensorShard(base[:, 5:6], (1000, 2), (0, 1))},
    )
    got = store.get("key")
    assert torch.equal(got["plain"], column) and got["plain"].stride() == (1, 0)
    assert torch.equal(got["shard"], base[:, [2, 5]])
    stored = b"".join(_bytes_of(file) for file in store.info("key").files)
    assert int(base[500, 0]).to_bytes(8, "little") in stored
    for other in (1, 3, 4, 6, 7):
        assert int(base[500, other]).to_bytes(8, "little") not in stored


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, 3)


def freed() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("local", "whole", "told"),
    [
        (fake, (2, 3), "a fake tensor: it has a shape, but no bytes"),
        (lambda: torch.empty(2, 3, device="meta"), (2, 3), "a meta tensor: it has a shape, but no bytes"),
        (freed, (2, 3), "whose storage was freed or cut"),
        (lambda: torch.ones([1] * 65), (1,) * 65, "a tensor of 65 dimensions; 64 is the most"),
        (lambda: torch.ones(1, 1), (1 << 40, 1 << 40), "more than any memory has"),
        (lambda: torch.empty(0, 1), (1 << 40, 1 << 40), "more than any memory has"),
        (lambda: torch.eye(2).to_sparse(), (2, 2), "put its to_dense"),
    ],
)
def test_what_no_box_can_be_stored_of_is_refused_by_its_rank_and_named(
    store: memstore.Store, local: Any, whole: tuple[int, ...], told: str
) -> None:
    shard = TensorShard(local(), whole, (0,) * len(whole))
    with pytest.raises(memstore.UnsupportedValueError, match=rf"value\['w'\]: a shard.*{told}"):
        put_by_ranks(store, {"w": shard})
    assert "key" not in store and not store.pending()


@pytest.mark.parametrize(
    "local",
    [
        lambda: torch.nn.Parameter(torch.randn(2, 3)),
        lambda: torch.nn.Parameter(torch.randn(2, 3), requires_grad=False),
        lambda: torch.randn(2, 3, requires_grad=True),
        lambda: torch.randn(2, 3, requires_grad=True) * 2,
        lambda: torch.nn.Buffer(torch.randn(2, 3)),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(4, 6)[::2, ::2],
        lambda: torch.randn(3).expand(2, 3),
        lambda: torch.randn(2, 3, dtype=torch.complex64).conj(),
        lambda: torch.randn(2, 3).to(torch.float8_e4m3fn),
        lambda: torch.randn(2, 3).bfloat16(),
    ],
)
def test_shards_of_all_kinds_come_back(store: memstore.Store, local: Any) -> None:
    first, second = local(), local()
    shards = [TensorShard(first, (4, 3), (0, 0)), TensorShard(second, (4, 3), (2, 0))]
    put_by_ranks(store, *shards)
    got = store.get("key")
    expected = torch.cat([first.detach().resolve_conj(), second.detach().resolve_conj()])
    assert torch.equal(got.detach().view(torch.uint8), expected.view(torch.uint8))
    assert got.requires_grad == first.requires_grad and got.is_leaf
    assert isinstance(got, torch.nn.Parameter) == isinstance(first, torch.nn.Parameter)
    made = store.get("key", like=shards[1]).local
    assert torch.equal(made.detach().contiguous().view(torch.uint8), expected[2:].view(torch.uint8))
    assert made.requires_grad == first.requires_grad
    assert isinstance(made, torch.nn.Parameter) == isinstance(first, torch.nn.Parameter)


def test_shards_without_dimensions_and_without_elements(store: memstore.Store) -> None:
    scalar = TensorShard(torch.tensor(5.0), (), ())
    empty, all_of_it = TensorShard(torch.empty(0, 3), (2, 3), (2, 0)), TensorShard(torch.ones(2, 3), (2, 3), (0, 0))
    nothing = TensorShard(torch.empty(0, 3), (0, 3), (0, 0))
    put_by_ranks(store, {"s": scalar, "e": empty, "n": nothing}, {"s": scalar, "e": all_of_it, "n": nothing})
    got = store.get("key")
    assert got["s"].item() == 5.0 and torch.equal(got["e"], torch.ones(2, 3)) and got["n"].shape == (0, 3)


def test_a_lazy_leaf_is_a_shard_and_so_is_its_clone(store: memstore.Store) -> None:
    store.put("from", torch.arange(8.0))
    parts = [store.view("from")[4 * i : 4 * i + 4] for i in range(2)]
    put_by_ranks(store, *(TensorShard(part, (8,), (4 * i,)) for i, part in enumerate(parts)), key="lazy")
    assert torch.equal(store.get("lazy"), torch.arange(8.0))
    put_by_ranks(store, *(TensorShard(part.clone(), (8,), (4 * i,)) for i, part in enumerate(parts)), key="other")
    assert torch.equal(store.get("other"), torch.arange(8.0))


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
