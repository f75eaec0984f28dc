"""Replay buffers as users call them: rows of every kind, round and round, sampled by all processes; and refusals."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch._subclasses import FakeTensorMode

import memstore
import memstore.aio
from memstore.replay import sampling
from memstore.replay.sampling import copy_picked
from tests.aio.loops import with_store
from tests.children import in_child
from tests.replay.rows import SPEC, in_the_copy, numbers_of, rows

NESTED = {"x": ((3,), torch.float32), "more": {"y": ((), torch.int64), "z": ((2, 2), torch.bfloat16)}}


def batch(start: int, count: int) -> dict[str, Any]:
    """Rows that say which position they have."""
    number = torch.arange(start, start + count)
    return {
        "x": number[:, None].float().expand(count, 3),
        "more": {"y": number, "z": number[:, None, None].bfloat16().expand(count, 2, 2)},
    }


def row(number: int) -> dict[str, Any]:
    return {
        "x": torch.full((3,), float(number)),
        "more": {"y": torch.tensor(number), "z": torch.full((2, 2), float(number)).bfloat16()},
    }


def check(sample: Any) -> list[int]:
    """That each row is that of its index. Returns the indices."""
    index = sample["index"]
    assert torch.equal(sample["more", "y"], index)
    assert torch.equal(sample["x"], index[:, None].float().expand(-1, 3))
    assert torch.equal(sample["more", "z"], index[:, None, None].bfloat16().expand(-1, 2, 2))
    return index.tolist()


def new(store: memstore.Store, capacity: int = 10, **options: Any) -> memstore.ReplayBuffer:
    return memstore.ReplayBuffer(store, "replay", NESTED, capacity=capacity, **options)


def test_rows_go_round_and_are_sampled_with_their_index(store: memstore.Store) -> None:
    buffer = new(store)
    assert (len(buffer), buffer.cursor, buffer.spec, buffer.capacity) == (0, 0, NESTED, 10)
    assert buffer.extend(batch(0, 7)).tolist() == list(range(7))
    assert buffer.add(row(7)) == 7
    assert buffer.extend(batch(8, 6)).tolist() == list(range(8, 14))
    assert (len(buffer), buffer.cursor) == (10, 14)
    sample = buffer.sample(500)
    assert isinstance(sample, TensorDict) and sample.batch_size == torch.Size([500])
    assert set(check(sample)) == set(range(4, 14))


def test_all_who_open_it_have_one_buffer(store: memstore.Store) -> None:
    buffer = new(store)
    other = memstore.ReplayBuffer(store, "replay")
    sent = pickle.loads(pickle.dumps(buffer))
    buffer.extend(batch(0, 2))
    other.extend(batch(2, 2))
    sent.extend(batch(4, 2))
    assert len(buffer) == len(other) == len(sent) == 6
    for one in (buffer, other, sent):
        assert set(check(one.sample(200))) == set(range(6))


@pytest.mark.full
def test_a_process_that_has_nothing_but_the_path(root: str) -> None:
    script = f"""
import memstore, torch
buffer = memstore.ReplayBuffer(memstore.open({root!r}), "replay", (( ), torch.int64), capacity=8)
print(buffer.extend(torch.arange(5)).tolist(), flush=True)
"""
    with memstore.open(root) as store:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
        assert done.stdout.strip() == "[0, 1, 2, 3, 4]", done.stderr
        sample = memstore.ReplayBuffer(store, "replay", mode="r+").sample(100)
        assert torch.equal(sample["data"], sample["index"])
        assert set(sample["index"].tolist()) == set(range(5))


def test_a_forked_child_goes_on_with_it(store: memstore.Store) -> None:
    buffer = new(store)
    buffer.extend(batch(0, 2))

    def child() -> list[int]:
        buffer.extend(batch(2, 2))
        return check(buffer.sample(4))

    assert set(in_child(child)) <= set(range(4))
    assert set(check(buffer.sample(100))) == set(range(4))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampler": "prioritized"}, "made without priorities"),
        ({"rate_limiter": memstore.RateLimiter(1.0, 1, 2.0)}, "its rate limiter is None, and not RateLimiter"),
    ],
)
def test_another_buffer_than_it_was_made_as_is_told(store: memstore.Store, asked: Any, message: str) -> None:
    new(store)
    with pytest.raises(memstore.StructureMismatchError, match=message):
        memstore.ReplayBuffer(store, "replay", **asked)


@pytest.mark.parametrize("sampler", ["uniform", "fifo", "lifo", "prioritized"])
def test_another_alpha_is_told_with_each_sampler(store: memstore.Store, sampler: Any) -> None:
    new(store, sampler="prioritized", alpha=0.9)
    with pytest.raises(memstore.StructureMismatchError, match="its alpha is 0.9, and not 0.7: say the same, or leave"):
        new(store, sampler=sampler, alpha=0.7)
    assert len(new(store, sampler=sampler, alpha=0.9)) == 0
    assert len(new(store, sampler=sampler, alpha=0.6)) == 0, "the default means as created"


@pytest.mark.parametrize("sampler", ["uniform", "fifo", "lifo"])
def test_alpha_has_no_effect_without_priorities(store: memstore.Store, sampler: Any) -> None:
    for _ in range(2):  # it is made, and opened
        assert len(new(store, sampler=sampler, alpha=0.7)) == 0
    with pytest.raises(memstore.StructureMismatchError, match="and it was made without priorities: leave sampler= out"):
        new(store, sampler="prioritized", alpha=0.7)


def test_modes_say_whether_it_has_to_be_there(store: memstore.Store) -> None:
    with pytest.raises(memstore.KeyNotFoundError, match="with spec= and capacity="):
        memstore.ReplayBuffer(store, "replay")
    with pytest.raises(memstore.KeyNotFoundError, match="mode 'a' makes it"):
        memstore.ReplayBuffer(store, "replay", NESTED, capacity=2, mode="r+")
    new(store, mode="x")
    with pytest.raises(memstore.AlreadyExistsError, match="'replay' is there already"):
        new(store, mode="x")
    store.create_dataset("data", NESTED, capacity=2)
    with pytest.raises(memstore.MutableEntryError, match="is a dataset"):
        memstore.ReplayBuffer(store, "data")


def test_what_does_not_fit_changes_nothing(store: memstore.Store) -> None:
    buffer = new(store)
    with pytest.raises(memstore.StoreFullError, match="10 slots, and a batch of 11"):
        buffer.extend(batch(0, 11))
    with pytest.raises(memstore.StructureMismatchError, match=r"value\['x'\] is missing"):
        buffer.add({"more": row(0)["more"]})
    assert (len(buffer), buffer.cursor) == (0, 0)
    assert buffer.extend(batch(0, 0)).tolist() == []
    with pytest.raises(memstore.StoreTimeoutError, match="no rows to sample"):
        buffer.sample(1, timeout=0.01)


def test_a_deleted_buffer_is_written_no_more(store: memstore.Store) -> None:
    buffer = new(store)
    buffer.extend(batch(0, 3))
    store.delete("replay")
    with pytest.raises(memstore.MutableEntryError, match="was deleted"):
        buffer.add(row(3))
    assert len(check(buffer.sample(3))) == 3
    with pytest.raises(memstore.VersionGoneError):
        pickle.loads(pickle.dumps(buffer))


def test_it_survives_the_death_of_all(root: str) -> None:
    def fill() -> None:
        new(memstore.open(root)).extend(batch(0, 10))
        os._exit(0)

    pid = os.fork()
    if not pid:
        fill()
    assert os.waitpid(pid, 0)[1] == 0
    with memstore.open(root) as store:
        buffer = memstore.ReplayBuffer(store, "replay")
        assert buffer.cursor == 10
        assert set(check(buffer.sample(200))) == set(range(10))


# --- rows without a sampler: by their age, whole, as copies -----------------------------------------------------------


def test_rows_are_counted_from_the_oldest_on(store: memstore.Store) -> None:
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=8, sampler="fifo")
    assert len(buffer[:]) == 0 and list(buffer) == []
    for number in range(0, 12, 3):
        buffer.extend(rows(number, 3))
    assert len(buffer) == 8 and buffer[:]["index"].tolist() == list(range(4, 12))
    buffer.sample(3)  # which stay until they are overwritten
    assert numbers_of(buffer[:]) == numbers_of(torch.stack(list(buffer))) == list(range(4, 12))
    assert numbers_of(buffer[0][None]) == [4]
    assert buffer[-1]["index"] == 11 and buffer[-1].batch_size == ()
    assert numbers_of(buffer[2:-1:2]) == [6, 8, 10] and numbers_of(buffer[::-1]) == list(range(11, 3, -1))
    assert numbers_of(buffer[[1, -1, 1]]) == [5, 11, 5]
    assert numbers_of(memstore.ReplayBuffer(memstore.open(store.root, "r"), "replay")[:2]) == [4, 5]
    for wrong, error in ((8, IndexError), (-9, IndexError), ([8], IndexError), ("x", TypeError), ((0, 1), TypeError)):
        with pytest.raises(error):
            buffer[wrong]


def test_rows_that_are_overwritten_meanwhile_are_left_out(
    store: memstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=8)
    buffer.extend(rows(0, 8))
    added = [8]

    def overwritten(*arguments: Any) -> Any:
        if added:
            buffer.extend(rows(added.pop(), 2))
        return copy_picked(*arguments)

    monkeypatch.setattr(sampling, "copy_picked", overwritten)
    assert numbers_of(buffer[:]) == list(range(2, 8))
    added.append(10)
    assert numbers_of(buffer[[0, -1]]) == [4, 11]  # begins anew
    added.append(12)
    assert [int(row["number"]) for row in buffer] == list(range(6, 12))
    assert numbers_of(buffer[:]) == list(range(6, 14))


def test_rows_of_a_writer_that_is_in_the_middle_are_no_rows_yet(store: memstore.Store) -> None:
    buffer = memstore.ReplayBuffer(store, "replay", SPEC, capacity=8)
    buffer.extend(rows(0, 6))
    found: list[list[int]] = []
    with in_the_copy(buffer, lambda: found.append(numbers_of(buffer[:]))):
        buffer.extend(rows(6, 4))
    assert found == [list(range(2, 6))] * 2  # at the ring's end, and at its beginning
    assert numbers_of(buffer[:]) == list(range(2, 10))


def test_rows_are_read_by_tasks(root: str) -> None:
    async def use(store: Any) -> None:
        buffer = memstore.aio.ReplayBuffer(store, "replay", SPEC, capacity=8)
        assert [row async for row in buffer] == []
        await buffer.extend(rows(0, 5))
        assert [int(row["number"]) async for row in buffer] == [0, 1, 2, 3, 4]
        assert numbers_of(await buffer.read_rows(slice(-2, None))) == [3, 4]

    with_store(root, use)


# --- rows of every kind, out=, torch's modes; and what is told of arguments that are none -----------------------------


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
]


@tensorclass
class Transition:
    state: torch.Tensor
    done: torch.Tensor


def make(store: memstore.Store, spec: Any, **options: Any) -> memstore.ReplayBuffer:
    return memstore.ReplayBuffer(store, "replay", spec, capacity=10, **options)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Different ones, as far as the dtype has them."""
    size = int(np.prod(shape))
    return (torch.arange(size) % 8).reshape(shape).to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 2)], ids=str)
def test_rows_of_any_dtype_and_shape(store: memstore.Store, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    buffer = make(store, {"x": (shape, dtype), "n": {"y": ((), torch.int64)}})
    x = values(dtype, 5, *shape)
    buffer.extend({"x": x, "n": {"y": torch.arange(5)}})
    assert buffer.add({"x": x[2], "n": {"y": torch.tensor(2)}}) == 5
    sample = buffer.sample(40)
    assert sample["x"].dtype is dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[dtype.itemsize]
    assert torch.equal(sample["x"].view(bits) if shape else sample["x"].view(bits), x[sample["n", "y"]].view(bits))


def tensors(count: int = 4) -> torch.Tensor:
    return torch.arange(count * 6.0).reshape(count, 2, 3)


@pytest.mark.parametrize(
    "given",
    [
        tensors(),
        tensors().transpose(1, 2).contiguous().transpose(1, 2),
        tensors().flip(0).flip(0),
        torch.nn.Parameter(tensors()),
        tensors().clone().requires_grad_() * 1,
        tensors().numpy(),
        tensors()[::1].expand(4, 2, 3),
        torch.cat([tensors(), tensors()])[:4],
    ],
    ids=["plain", "strided", "flipped", "parameter", "with a graph", "numpy", "expanded", "a part"],
)
@pytest.mark.parametrize("container", [dict, TensorDict], ids=["dict", "tensordict"])
def test_rows_of_any_memory(store: memstore.Store, given: Any, container: Any) -> None:
    buffer = make(store, {"x": ((2, 3), torch.float32)})
    buffer.extend({"x": given} if container is dict else TensorDict({"x": given}, [4]))
    buffer.add({"x": given[1]})
    sample = buffer.sample(50)
    assert torch.equal(sample["x"], torch.cat([tensors(), tensors()[1:2]])[sample["index"]])
    assert not sample["x"].requires_grad


def test_a_tensor_in_two_leaves_and_conjugated_ones(store: memstore.Store) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    buffer = make(store, {"a": ((), torch.complex64), "b": ((), torch.complex64)})
    buffer.extend({"a": x, "b": x})
    buffer.extend({"a": x.conj(), "b": x})
    sample = buffer.sample(40)
    assert torch.equal(sample["a"], torch.cat([x, x.conj()])[sample["index"]])


@pytest.mark.parametrize(
    "spec",
    [
        Transition(state=torch.zeros(3), done=torch.zeros((), dtype=torch.bool), batch_size=[]),
        TensorDict({"state": torch.zeros(3), "done": torch.tensor(False)}, []),
        {"state": ((3,), torch.float32), "done": ((), torch.bool)},
    ],
    ids=["tensorclass", "tensordict", "dict"],
)
def test_a_spec_of_any_form_gives_tensordicts(store: memstore.Store, spec: Any) -> None:
    buffer = make(store, spec)
    assert buffer.spec == {"state": ((3,), torch.float32), "done": ((), torch.bool)}
    batch = Transition(state=torch.ones(4, 3), done=torch.ones(4, dtype=torch.bool), batch_size=[4])
    buffer.extend(batch)
    buffer.extend(batch.to_tensordict())
    assert len(memstore.ReplayBuffer(store, "replay", spec)) == 8
    sample = buffer.sample(2)
    assert type(sample) is TensorDict and set(sample.keys()) == {"state", "done", "index"}


def test_names_of_any_kind(store: memstore.Store) -> None:
    name = "ä" * 100 + " / . ö"
    buffer = make(store, {name: {name: ((), torch.int64), "index": ((), torch.int64)}})
    buffer.extend({name: {name: torch.arange(3), "index": torch.arange(3)}})
    sample = buffer.sample(9)
    assert torch.equal(sample[name, name], sample["index"])


@pytest.mark.parametrize("name", ["index", "weight"])
def test_names_that_samples_have_are_refused(store: memstore.Store, name: str) -> None:
    with pytest.raises(ValueError, match=f"spec has the key '{name}', which samples have of their own"):
        make(store, {name: ((), torch.int64)})
    assert "replay" not in store


# -- out= --------------------------------------------------------------------------------------------------------------


def test_out_is_filled_in_place(store: memstore.Store) -> None:
    buffer = make(store, {"x": ((2,), torch.float32), "n": {"y": ((), torch.int64)}}, sampler="prioritized")
    y = torch.arange(5)
    buffer.extend({"x": y[:, None].float().expand(5, 2), "n": {"y": y}})
    out = buffer.sample(6)
    before = out["x"].data_ptr(), out["index"].data_ptr()
    out.zero_()
    assert buffer.sample(6, out=out) is out
    assert before == (out["x"].data_ptr(), out["index"].data_ptr())
    assert torch.equal(out["n", "y"], out["index"]) and torch.equal(out["x"][:, 0], out["index"].float())
    assert (out["weight"] == 1).all()
    strided = TensorDict({**out, "x": torch.zeros(2, 6).t()}, [6])
    buffer.sample(6, out=strided)
    assert torch.equal(strided["x"][:, 1], strided["index"].float())
    assert buffer.sample(0)["x"].shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": torch.zeros(3, 3)},
            r"'x' is torch.float32 of shape \[3, 3\], and takes torch.float32 of shape \[3, 2\]",
        ),
        ({"x": torch.zeros(3, 2).double()}, "'x' is torch.float64 of shape"),
        ({"x": None}, "'x' is missing"),
        ({"index": None}, r"'index' is missing, and takes torch.int64 of shape \[3\]"),
        ({"n": TensorDict({}, [3])}, r"\('n', 'y'\) is missing"),
    ],
)
def test_an_out_that_does_not_fit_is_told(store: memstore.Store, change: dict[str, Any], message: str) -> None:
    buffer = make(store, {"x": ((2,), torch.float32), "n": {"y": ((), torch.int64)}})
    buffer.extend({"x": torch.ones(5, 2), "n": {"y": torch.arange(5)}})
    entries = {**buffer.sample(3).zero_(), **change}
    out = TensorDict({name: value for name, value in entries.items() if value is not None}, [3])
    with pytest.raises(memstore.StructureMismatchError, match=message):
        buffer.sample(3, out=out)
    assert not any(bool(leaf.any()) for leaf in out.values(include_nested=True, leaves_only=True))


def test_an_out_whose_leaves_share_memory_is_refused(store: memstore.Store) -> None:
    """The one that was filled later had the values of both. Columns of one tensor share none."""
    buffer = make(store, {"x": ((2,), torch.float32), "y": ((2,), torch.float32)}, sampler="fifo")
    buffer.extend({"x": torch.ones(8, 2), "y": torch.full((8, 2), 2.0)})
    whole, index = torch.zeros(5, 4), torch.zeros(4, dtype=torch.int64)
    columns = TensorDict({"x": whole[:4, :2], "y": whole[:4, 2:], "index": index}, [4])
    buffer.sample(4, out=columns)
    assert whole[:4].tolist() == [[1, 1, 2, 2]] * 4
    for x, y in ((whole[:4, :2], whole[:4, 1:3]), (whole[:4, :2], whole[1:, :2]), (whole[:4, 2:], whole[:4, 2:])):
        whole.zero_()
        out = TensorDict({"x": x, "y": y, "index": index}, [4])
        with pytest.raises(memstore.StructureMismatchError, match="'[xy]' is a tensor that shares memory with '[xy]'"):
            buffer.sample(4, out=out)
        assert not whole.any()
    out = TensorDict({"x": index.view(torch.float32).view(4, 2), "y": torch.zeros(4, 2), "index": index}, [4])
    with pytest.raises(memstore.StructureMismatchError, match="shares memory with"):
        buffer.sample(4, out=out)
    assert buffer.sample(4, out=columns)["index"].tolist() == [4, 5, 6, 7], "no row was lost"


def test_an_out_that_copies_its_leaves_is_refused(store: memstore.Store) -> None:
    """It was returned as it was: the rows went into a copy."""
    buffer = make(store, {"x": ((2,), torch.float32)})
    buffer.extend({"x": torch.ones(5, 2)})
    whole = buffer.sample(4).zero_()
    stack = LazyStackedTensorDict(*whole[:2].clone().unbind(0))
    for out in (stack, whole._get_sub_tensordict(torch.tensor([0, 3]))):
        with pytest.raises(memstore.StructureMismatchError, match="'x' is a copy, which a .* makes when it is asked"):
            buffer.sample(2, out=out)
    assert buffer.sample(2, out=whole._get_sub_tensordict(slice(1, 3))).batch_size == (2,)
    assert whole["x"].sum(1).tolist() == [0, 2, 2, 0]
    with pytest.raises(TypeError, match="out is an ABCMeta, and not the TensorDict that a sample is"):
        buffer.sample(2, out=TensorDict)


# -- torch's modes -----------------------------------------------------------------------------------------------------


def test_modes_of_torch_do_not_reach_it(store: memstore.Store) -> None:
    buffer = make(store, ((2,), torch.float32))
    with torch.no_grad():
        buffer.extend(torch.ones(2, 2))
    with torch.inference_mode():
        buffer.extend(torch.ones(2, 2))
        buffer.sample(3)
        opened = memstore.ReplayBuffer(store, "replay")
    (opened.sample(3)["data"] * torch.ones(2, requires_grad=True)).sum().backward()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert buffer.sample(3)["data"].shape == (3, 2)
    real = torch.ones(2)
    with FakeTensorMode():
        sample = buffer.sample(3)
        with pytest.raises(memstore.UnsupportedValueError):
            buffer.add(torch.ones(2))
    assert sample["data"].sum() == 6
    assert torch.func.vmap(lambda x: x + buffer.sample(1)["data"][0])(real[None]).sum() == 4
    assert buffer.cursor == 4


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (torch.ones(3), memstore.StructureMismatchError, r"of shape \[3\], and takes torch.float32 of shape \[2\]"),
        (torch.ones(2).double(), memstore.StructureMismatchError, "torch.float64"),
        ({"x": torch.ones(2)}, memstore.StructureMismatchError, "isn.t in the spec"),
        (torch.ones(2, device="meta"), memstore.UnsupportedValueError, "a meta tensor"),
        (torch.ones(2).to_sparse(), memstore.UnsupportedValueError, "rows are of dense tensors"),
        ([1.0, 2.0], memstore.UnsupportedValueError, "is a list"),
        (None, memstore.UnsupportedValueError, "is a NoneType"),
    ],
)
def test_what_is_no_row_is_told(store: memstore.Store, row: Any, error: type[Exception], message: str) -> None:
    buffer = make(store, ((2,), torch.float32))
    with pytest.raises(error, match=message):
        buffer.add(row)
    assert (len(buffer), buffer.cursor) == (0, 0)


def test_a_tensor_whose_memory_was_freed_is_told(store: memstore.Store) -> None:
    buffer = make(store, ((2,), torch.float32))
    row = torch.ones(2)
    row.untyped_storage().resize_(0)
    with pytest.raises(memstore.UnsupportedValueError, match="its bytes aren't there"):
        buffer.add(row)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": "prioritized", "replacement": False}, ValueError, "may come again"),
        ({"sampler": "prioritized", "alpha": -1.0}, ValueError, "alpha is a number from 0 to 4"),
        ({"sampler": "prioritized", "alpha": None}, TypeError, "alpha is a number from 0 to 4, and not None"),
        ({"beta": float("nan")}, ValueError, "beta is a number, 0 at least"),
        ({"mode": "w"}, ValueError, "mode is 'a', 'r\\+' or 'x', and not 'w'"),
        ({"capacity": 0}, ValueError, "capacity is a number of rows"),
        ({"spec": {}}, ValueError, "spec is empty"),
        ({"spec": 3}, TypeError, "a spec is"),
        ({"key": ""}, memstore.InvalidKeyError, "key"),
    ],
)
def test_arguments_that_are_none_make_nothing(
    store: memstore.Store, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    asked: dict[str, Any] = {"key": "replay", "spec": ((), torch.int8), "capacity": 10, **options}
    key, spec = asked.pop("key"), asked.pop("spec")
    with pytest.raises(error, match=message):
        memstore.ReplayBuffer(store, key, spec, **asked)
    assert list(store.keys()) == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((0.0, 1, 1.0), "samples_per_insert is a number above 0"), ((float("inf"), 1, 2.0), "samples_per_insert")],
)
def test_numbers_that_make_no_rate_limiter(numbers: tuple[float, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memstore.RateLimiter(*numbers)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda buffer: buffer.sample(1.5), TypeError, "batch_size is a number, and not 1.5"),
        (lambda buffer: buffer.sample(1, out=3), TypeError, "out is an int, and not the TensorDict"),
        (lambda buffer: buffer.sample(1, timeout=float("nan")), ValueError, "and not nan"),
        (lambda buffer: buffer.sample_slices(1, 0), ValueError, "slice_len is 1 or more"),
        (lambda buffer: buffer.sample_slices(1, 1), KeyError, "has no leaf 'done', but 'x', 'z'"),
        (lambda buffer: buffer.sample_slices(1, 1, end_key="z"), TypeError, "tells no end"),
    ],
)
def test_calls_that_make_no_sense(store: memstore.Store, call: Any, error: type[Exception], message: str) -> None:
    buffer = make(store, {"x": ((), torch.int8), "z": ((0,), torch.bool)})
    with pytest.raises(error, match=message):
        call(buffer)


def test_a_buffer_that_is_only_read(root: str) -> None:
    with memstore.open(root) as store:
        made = make(store, ((), torch.int8), sampler="prioritized")
        made.extend(torch.ones(3, dtype=torch.int8))
        memstore.ReplayBuffer(
            store, "limited", ((), torch.int8), capacity=2, rate_limiter=memstore.RateLimiter(1, 1, 2)
        )
        with memstore.open(root, "r") as reader:
            buffer = memstore.ReplayBuffer(reader, "replay", sampler="prioritized")
            made.add(torch.ones((), dtype=torch.int8))
            for one in (buffer, pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
                assert len(one) == 4 and one.sample(3)["data"].tolist() == [1, 1, 1]
                for call in (lambda one=one: one.update_priority([0], 1.0), one.flush, lambda one=one: one.add(0)):
                    with pytest.raises(memstore.ReadOnlyError, match="opened with mode 'r'"):
                        call()
            with pytest.raises(memstore.ReadOnlyError, match="sampler='fifo'"):
                memstore.ReplayBuffer(reader, "replay", sampler="fifo")
            with pytest.raises(memstore.ReadOnlyError, match="a rate limiter"):
                memstore.ReplayBuffer(reader, "limited")
            with pytest.raises(memstore.ReadOnlyError, match="can't make 'new'"):
                memstore.ReplayBuffer(reader, "new", ((), torch.int8), capacity=2, mode="x")
            with pytest.raises(memstore.KeyNotFoundError):
                memstore.ReplayBuffer(reader, "new", ((), torch.int8), capacity=2)
            with pytest.raises(memstore.StoreTimeoutError, match="follow each other"):
                buffer.sample_slices(1, 5, end_key=None, timeout=0.01)


@pytest.mark.parametrize("call", ["get", "view", "ref", "put", "open_dataset"])
def test_other_calls_on_its_key_name_the_right_one(store: memstore.Store, call: str) -> None:
    make(store, ((), torch.int8))
    arguments = (torch.ones(1),) if call == "put" else ()
    with pytest.raises(memstore.MutableEntryError, match=r"a replay buffer.*ReplayBuffer\(store, 'replay'\)"):
        getattr(store, call)("replay", *arguments)


def test_a_buffer_outlives_its_store_and_its_key(root: str) -> None:
    with memstore.open(root) as store:
        buffer = make(store, ((), torch.int64))
    buffer.extend(torch.arange(4))
    assert set(buffer.sample(50)["data"].tolist()) == {0, 1, 2, 3}
    with memstore.open(root) as store:
        store.delete("replay")
        again = memstore.ReplayBuffer(store, "replay", ((), torch.int64), capacity=3)
        assert len(again) == 0 and len(buffer.sample(4)["data"]) == 4


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bool, ()), (torch.bool, (1,)), (torch.float32, ()), (torch.uint8, (1,)), (torch.bfloat16, ())],
)
def test_flags_of_any_dtype_end_episodes(store: memstore.Store, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    buffer = make(store, {"next": {"done": (shape, dtype)}, "y": ((), torch.int64)})
    done = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0]).to(dtype).reshape(8, *shape)
    buffer.extend({"next": {"done": done}, "y": torch.arange(8)})
    slices = buffer.sample_slices(200, 3, end_key=("next", "done"))["y"]
    assert set(slices[:, 0].tolist()) == {0, 3, 4} and bool((slices.diff() == 1).all())


def test_numbers_tell_episodes_apart(store: memstore.Store) -> None:
    buffer = make(store, {"episode": ((), torch.int32), "y": ((), torch.int64)})
    buffer.extend({"episode": torch.tensor([7, 7, 7, 3, 3, 0, 0, 0, 0, 0]).int(), "y": torch.arange(10)})
    slices = buffer.sample_slices(200, 3, end_key="episode")["y"]
    assert set(slices[:, 0].tolist()) == {0, 5, 6, 7}
    with pytest.raises(memstore.StoreTimeoutError, match="no 6 rows of one episode that follow each other"):
        buffer.sample_slices(1, 6, end_key="episode", timeout=0)
    buffer.extend({"episode": torch.tensor([0]).int(), "y": torch.tensor([10])})
    slices = buffer.sample_slices(50, 6, end_key="episode")  # over the end of the ring
    assert slices["y"].tolist() == [[5, 6, 7, 8, 9, 10]] * 50
