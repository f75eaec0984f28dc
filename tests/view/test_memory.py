"""What looks for the memory of a lazy leaf in C, past the operators: it reads the values, and can't write them."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from tests.children import in_child

STORED: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.arange(24.0).reshape(4, 6),
    "transposed": lambda: torch.arange(24.0).reshape(6, 4).T,
    "bf16": lambda: torch.arange(24.0).reshape(4, 6).bfloat16(),
    "complex": lambda: torch.arange(24).reshape(4, 6) * torch.complex(torch.tensor(1.0), torch.tensor(2.0)),
    "empty": lambda: torch.zeros(0, 6),
}


@pytest.fixture(params=["segment", "inline"])
def store(request: pytest.FixtureRequest, scratch: str) -> Any:
    with memstore.open(scratch, inline_limit=0 if request.param == "segment" else 1 << 14) as store:
        yield store


def holder(lazy: torch.Tensor) -> torch.Tensor:
    plain = torch.zeros(1, dtype=lazy.dtype)
    plain.data = lazy
    return plain


def reads_of(plain: torch.Tensor) -> list[torch.Tensor]:
    return [plain + 1, plain.T.contiguous(), plain.sum(0), plain.clone(), torch.cat([plain, plain]), plain[1:].exp()]


@pytest.mark.parametrize("name", STORED)
def test_a_tensor_that_a_leaf_was_assigned_to_reads_its_values(name: str, store: memstore.Store) -> None:
    made = STORED[name]()
    store.put("key", {"whole": made, "other": torch.ones(3)})
    lazy = store.view("key")["whole"]

    def read() -> None:
        for part in (lambda x: x, lambda x: x[1:3], lambda x: x[:, 2]):
            expected = part(made)
            found = holder(part(lazy))
            assert type(found) is torch.Tensor
            assert found.shape == expected.shape
            assert all(map(torch.equal, reads_of(found), reads_of(expected)))
            parameter = torch.nn.Parameter(torch.zeros(1, dtype=made.dtype))
            parameter.data = part(lazy)
            (parameter * 2).abs().sum().backward()
            assert parameter.grad is not None

    in_child(read)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "operator": lambda x: x.add_(1),
    "slice": lambda x: x[0].zero_(),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "random": lambda x: x.uniform_(),
    "numpy": lambda x: x.numpy().fill(1),
    "pointer": lambda x: x.data_ptr(),
    "dlpack": lambda x: torch.from_dlpack(x).fill_(1),
    "alias": lambda x: x.detach().fill_(1),
    "storage": lambda x: x.untyped_storage().fill_(1),
    "storage's copy": lambda x: x.untyped_storage().copy_(torch.zeros(24).untyped_storage()),
    "resize": lambda x: x.untyped_storage().resize_(0),
    "set": lambda x: torch.zeros(0).set_(x.untyped_storage()).fill_(1),
    "optimizer": lambda x: step(torch.nn.Parameter(x)),
}


def step(parameter: torch.Tensor) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1).step()


@pytest.mark.parametrize("name", WRITES)
def test_it_is_refused_a_write(name: str, store: memstore.Store) -> None:
    made = torch.arange(24.0).reshape(4, 6)
    store.put("key", made)
    view = store.view("key")

    def write() -> None:
        with pytest.raises(RuntimeError, match="Cannot access data pointer|not resizable"):
            WRITES[name](holder(view))
        assert torch.equal(view + 0, made)
        assert torch.equal(store.view("key") + 0, made)

    in_child(write)


def test_it_is_held_as_long_as_it_lives(scratch: str) -> None:
    with memstore.open(scratch, inline_limit=0) as store:
        store.put("key", torch.ones(5000))
        plain = holder(store.view("key"))
        for _ in range(4):  # files that nobody holds are filled again
            store.put("key", torch.zeros(5000))
        assert (plain + 0).sum() == 5000


@pytest.mark.parametrize("inline_limit", [0, 1 << 14])
def test_it_is_sent_as_a_copy(inline_limit: int, scratch: str) -> None:
    """Shared memory in the place of the view's would let a receiver write into it."""
    with memstore.open(scratch, inline_limit=inline_limit) as store:
        store.put("key", torch.ones(50))
        view = store.view("key")
        for plain in (holder(view), holder(view).untyped_storage()):
            received = pickle.loads(ForkingPickler.dumps(plain))
            received.fill_(0)
        assert (view + 0).sum() == 50
        assert (holder(view) + 0).sum() == 50


class Multiply(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.zeros(1))
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.filterwarnings("ignore")
def test_a_script_of_lazy_leaves_is_saved_with_their_values(store: memstore.Store, tmp_path: Path) -> None:
    store.put("key", {"weight": torch.nn.Parameter(torch.rand(4, 3)), "other": torch.rand(5)})
    path = tmp_path / "script.pt"
    weight = store.view("key")["weight"]
    in_child(lambda: torch.jit.script(Multiply(weight)).save(path))
    loaded = torch.jit.load(path)
    assert torch.equal(loaded.weight, store.get("key")["weight"])
    assert torch.equal(loaded(torch.eye(4)), store.get("key")["weight"])


def test_a_state_of_random_numbers_is_taken_from_a_leaf(store: memstore.Store) -> None:
    generator = torch.Generator().manual_seed(3)
    store.put("key", {"global": torch.get_rng_state(), "own": generator.get_state()})
    expected = torch.rand(3), torch.rand(3, generator=generator)
    view = store.view("key")
    torch.set_rng_state(view["global"])
    assert torch.equal(torch.rand(3), expected[0])
    other = torch.Generator().set_state(view["own"])
    assert torch.equal(torch.rand(3, generator=other), expected[1])
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(torch.get_rng_state(), torch.get_rng_state())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_operators_give_is_writable_and_nobody_elses(mode: Any, store: memstore.Store) -> None:
    made = torch.arange(24.0).reshape(4, 6)
    store.put("key", made)
    view = store.view("key")
    with mode():
        for one in (view + 0, view.clone(), view[1:].T.contiguous(), view[[0, 1]], view[:, None].sum(1), view.double()):
            one.add_(1)
            assert one.data_ptr()
        gates = torch.nn.LSTM(6, 2)(view[None])  # asks for pointers to write by, and reads
        assert torch.equal(torch.nn.functional.conv1d(view[None], torch.ones(1, 4, 1))[0, 0], made.sum(0))
    assert gates[0].shape == (1, 4, 2)
    assert torch.equal(view + 0, made)


def test_leaves_between_elements_are_copied_and_sent(scratch: str, tmp_path: Path) -> None:
    """Files of others may have their leaves at any byte."""
    path = odd_file(tmp_path)
    with memstore.open(scratch) as store:
        store.attach("key", path)
        view = store.view("key")
        assert view["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert (holder(view["w"]) + 0).tolist() == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            holder(view["w"]).fill_(1)
        received = pickle.loads(pickle.dumps(view["w"][1:3]))
        assert type(received) is memstore.StoredTensor
        assert received.tolist() == [1.0, 2.0]
        assert (holder(received) + 0).tolist() == [1.0, 2.0]
        file = io.BytesIO()
        torch.save(received, file)
        file.seek(0)
        assert torch.load(file, weights_only=True).tolist() == [1.0, 2.0]


def odd_file(folder: Path) -> Path:
    """A safetensors file: one byte, then four floats."""
    leaves = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [4], "data_offsets": [1, 17]},
    }
    header = json.dumps(leaves).encode()
    path = folder / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + torch.arange(4.0).numpy().tobytes())
    return path


def test_what_comes_loaded_is_yours_to_write_beside_a_leaf_of_the_same_bytes(store: memstore.Store) -> None:
    values = torch.arange(10.0)
    jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 10]))
    store.put("key", {"part": values[2:5], "jagged": jagged})
    view = store.view("key")
    assert type(view["part"]) is memstore.StoredTensor
    assert (view["part"] + 0).tolist() == (holder(view["part"]) + 0).tolist() == [2.0, 3.0, 4.0]
    assert view["jagged"].values().data_ptr()
    view["jagged"].values().mul_(2)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        holder(view["part"]).fill_(1)
