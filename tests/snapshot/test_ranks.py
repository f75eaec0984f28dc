"""Snapshots of several ranks: what is shared is written once, and restored by other ranks in other layouts."""

from __future__ import annotations

import json
import math
import os
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import memstore
import memstore as torchsnapshot
from memstore import Snapshot, StateDict, Stateful, TensorShard
from memstore.sharding import Box, whole
from memstore.snapshot import drafts as partitions
from memstore.snapshot import reading
from memstore.snapshot.drafts import Naming, Offer, draft, offers_of, own_bytes, partition
from memstore.snapshot.publishing import Take, publish
from memstore.snapshot.stateful import StateWalker
from memstore.snapshot.storage import FileStorage
from tests.examples import examples
from tests.snapshot.ranks import all_right, on_ranks


def matrix() -> torch.Tensor:
    return torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def _take_own(rank: int, path: str) -> None:
    Snapshot.take(path, {"state": StateDict(rank=rank, x=torch.full((3,), float(rank)), both=torch.ones(2))})


def _restore_own(rank: int, path: str) -> Any:
    state = StateDict(rank=-1, x=torch.zeros(3))
    Snapshot(path).restore({"state": state})
    return state["rank"], state["x"].tolist()


def test_each_rank_gets_its_own_values_and_a_new_one_those_of_rank_0(path: str) -> None:
    all_right(on_ranks(2, _take_own, path))
    found = all_right(on_ranks(3, _restore_own, path))
    assert found == [(0, [0.0] * 3), (1, [1.0] * 3), (0, [0.0] * 3)]
    Snapshot(path).verify()
    assert Snapshot(path).read_object("1/state/rank") == 1
    assert Snapshot(path).metadata.world_size == 2


def _take_replicated(rank: int, path: str, globs: list[str]) -> list[str]:
    state = StateDict(**{f"w{i}": torch.full((1000,), float(i)) for i in range(8)}, own=torch.tensor(rank))
    before = set(os.listdir("/proc/self/fd"))
    Snapshot.take(path, {"state": state}, replicated=globs)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the folder, if at all
    return os.listdir(path)


@pytest.mark.parametrize(
    "globs", [["state/w*"], pytest.param(["**"], marks=pytest.mark.full), ["0/state/w*", "1/state/w*"]]
)
def test_replicated_tensors_are_written_once_and_balanced(path: str, globs: list[str]) -> None:
    all_right(on_ranks(2, _take_replicated, path, globs))
    sizes = [os.path.getsize(f"{path}/{name}") for name in os.listdir(path) if name.endswith(".safetensors")]
    assert len(sizes) == 2 and sum(sizes) < 8 * 4000 + 3000 and max(sizes) - min(sizes) < 1000
    for rank in (0, 1):
        assert Snapshot(path).read_object(f"{rank}/state/w3").tolist() == [3.0] * 1000
    if globs != ["**"]:
        assert [Snapshot(path).read_object(f"{rank}/state/own").item() for rank in (0, 1)] == [0, 1]


def _take_ddp(rank: int, path: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((2, 4), float(rank))).sum().backward()
    optimizer.step()
    Snapshot.take(path, {"model": model, "optimizer": optimizer}, replicated=["optimizer/*"])
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


def _restore_ddp(rank: int, path: str) -> Any:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    Snapshot(path).restore({"model": model, "optimizer": optimizer})
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (4, 4)
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


def test_modules_of_ddp_are_written_once_and_read_by_other_numbers_of_ranks(path: str) -> None:
    want = all_right(on_ranks(2, _take_ddp, path))[0]
    with open(f"{path}/model.safetensors.index.json") as file:
        assert set(json.load(file)["weight_map"]) == set(want)
    assert all_right(on_ranks(3, _restore_ddp, path)) == [want] * 3


LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
}


def _tensor(layout: str, world_size: int, value: torch.Tensor) -> Any:
    if layout == "plain":
        return value.clone()
    if layout == "grid":
        mesh = init_device_mesh("cpu", (2, world_size // 2))
        return distribute_tensor(value, mesh, [Shard(1), Shard(0)], src_data_rank=None)
    if layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2))
        return distribute_tensor(value, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(value, mesh, LAYOUTS[layout], src_data_rank=None)


def _take_sharded(rank: int, path: str, layout: str) -> int:
    value = _tensor(layout, dist.get_world_size(), matrix())
    snapshot = Snapshot.take(path, {"state": StateDict(x=value)}, replicated=["state/x"])
    return snapshot.metadata.nbytes


def _restore_sharded(rank: int, path: str, layout: str) -> Any:
    state = StateDict(x=_tensor(layout, dist.get_world_size(), torch.zeros(7, 6)))
    Snapshot(path).restore({"state": state})
    found = state["x"]
    return (found.full_tensor() if isinstance(found, DTensor) else found).tolist()


full = pytest.mark.full


@pytest.mark.parametrize(
    "layout, world_size",
    [
        ("columns", 3),
        ("hybrid", 4),
        pytest.param("rows", 2, marks=full),
        pytest.param("replicated", 2, marks=full),
        pytest.param("grid", 4, marks=full),
        pytest.param("plain", 2, marks=full),
    ],
)
def test_tensors_go_from_any_layout_to_any_other(path: str, layout: str, world_size: int) -> None:
    sizes = all_right(on_ranks(world_size, _take_sharded, path, layout))
    assert sizes[0] < 7 * 6 * 4 + 300 * world_size
    Snapshot(path).verify()
    assert torch.equal(Snapshot(path).read_object("0/state/x"), matrix())
    assert torch.equal(Snapshot(path).get_state_dict_for_key("state")["x"], matrix())
    targets = {"rows": [("columns", 2)], "columns": [("plain", 1)], "grid": [("rows", 3)], "hybrid": [("grid", 4)]}
    for target, ranks in targets.get(layout, [("rows", 2)]):
        assert all_right(on_ranks(ranks, _restore_sharded, path, target)) == [matrix().tolist()] * ranks


def _take_fsdp(rank: int, path: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    Snapshot.take(path, {"model": model, "optimizer": optimizer})
    return _fsdp_values(model, optimizer)


def _fsdp_values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    weights = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
    return weights, [state["exp_avg"].full_tensor().tolist() for state in optimizer.state.values()]


def _restore_fsdp(rank: int, path: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    Snapshot(path).restore({"model": model, "optimizer": optimizer})
    found = _fsdp_values(model, optimizer)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return found


def test_fsdp_and_an_optimizer_that_has_no_state_yet(path: str) -> None:
    want = all_right(on_ranks(2, _take_fsdp, path))[0]
    assert all_right(on_ranks(3, _restore_fsdp, path)) == [want] * 3
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    Snapshot(path).restore({"model": model})
    assert {name: value.tolist() for name, value in model.state_dict().items()} == want[0]


def _take_shards(rank: int, path: str, rows: list[tuple[int, int]]) -> None:
    start, stop = rows[rank]
    Snapshot.take(path, {"state": StateDict(x=TensorShard(matrix()[start:stop], (7, 6), (start, 0)))})


def test_parts_that_leave_a_hole_or_overlap_are_refused_on_all_ranks(path: str) -> None:
    for rows, match in (([(0, 3), (4, 7)], "36 of its 42"), ([(0, 4), (3, 7)], "overlap")):
        for outcome in on_ranks(2, _take_shards, path, rows):
            assert isinstance(outcome, memstore.ShardMismatchError) and match in str(outcome)
        assert not os.path.exists(path)
    all_right(on_ranks(2, _take_shards, path, [(0, 3), (3, 7)]))
    target = TensorShard(torch.zeros(2, 6), (7, 6), (2, 0))
    assert Snapshot(path).read_object("0/state/x", target) is target
    assert torch.equal(target.local, matrix()[2:4])


def _take_pipeline(rank: int, path: str) -> None:
    model = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})
    torch.nn.init.constant_(model[f"layer{rank}"].weight, float(rank))
    Snapshot.take(path, {"model": model})


def test_layers_of_several_ranks_are_put_together(path: str) -> None:
    all_right(on_ranks(2, _take_pipeline, path))
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(2, 2) for i in range(2)})
    Snapshot(path).restore({"model": model})
    assert [model[f"layer{i}"].weight.mean().item() for i in range(2)] == [0.0, 1.0]


def _restore_swapped(rank: int, path: str) -> Any:
    model = torch.nn.ModuleDict({f"layer{1 - rank}": torch.nn.Linear(2, 2)})
    Snapshot(path).restore({"model": model})
    refused = torch.nn.ModuleDict({"layer0": torch.nn.Linear(2, 2)})
    with pytest.raises(memstore.StructureMismatchError, match=r"layer1\.bias: unexpected"):
        Snapshot(path).restore({"model": refused})
    return model[f"layer{1 - rank}"].state_dict()["weight"].mean().item()


def test_layers_may_be_on_other_ranks_than_those_that_saved_them_but_each_on_one(path: str) -> None:
    all_right(on_ranks(2, _take_pipeline, path))
    assert all_right(on_ranks(2, _restore_swapped, path)) == [1.0, 0.0]


def _fail(rank: int, path: str, where: str) -> None:
    class Broken(StateDict):
        def state_dict(self) -> dict[str, Any]:
            if rank == 1 and where == "state_dict":
                raise ArithmeticError("it has no state today")
            return super().state_dict()

    value: Any = complex if rank == 1 and where == "leaf" else 1
    app_state: Any = {"state": Broken(x=value, y=torch.ones(3) * rank)}
    if rank == 1 and where == "app_state":
        app_state = {"state": 7}
    Snapshot.take(path, app_state)


@pytest.mark.parametrize("where", ["app_state", "state_dict", "leaf"])
def test_a_failure_of_one_rank_is_told_by_all_and_leaves_nothing(path: str, where: str) -> None:
    first, second = on_ranks(2, _fail, path, where)
    assert isinstance(first, memstore.MemstoreError) and str(first).startswith("rank 1"), first
    assert isinstance(second, (ArithmeticError, TypeError)), second
    assert not os.path.exists(path)


class _Summing(StateDict):
    """Its state is a sum over all ranks, as that of a sharded optimizer may be."""

    def state_dict(self) -> dict[str, Any]:
        dist.all_reduce(total := torch.ones(1))
        return {"total": total}


class _Failing(StateDict):
    def state_dict(self) -> dict[str, Any]:
        raise ArithmeticError("it has no state today")


def _fails_before_a_collective(rank: int, path: str) -> tuple[str, float]:
    state = {"a": _Failing() if rank else StateDict(), "b": _Summing()}
    with pytest.raises((ArithmeticError, memstore.MemstoreError)) as raised:
        Snapshot.take(path, state)
    dist.all_reduce(total := torch.full((1,), float(rank)))  # a collective of the training, which must meet no other
    return str(raised.value), total.item()


def test_a_state_dict_that_fails_shifts_no_collective_of_the_others(path: str) -> None:
    (first, first_total), (_, second_total) = all_right(on_ranks(2, _fails_before_a_collective, path))
    assert "rank 1 failed: ArithmeticError" in first and first_total == second_total == 1.0
    assert not os.path.exists(path)


def _differ(rank: int, path: str) -> None:
    state = StateDict(x=torch.zeros(3 + rank))
    Snapshot(path).restore({"model": torch.nn.Linear(2 + rank, 2), "state": state})


def test_a_mismatch_on_one_rank_restores_nothing_on_any(path: str) -> None:
    Snapshot.take(path, {"model": torch.nn.Linear(2, 2), "state": StateDict(x=torch.ones(3))})
    for outcome in on_ranks(2, _differ, path):
        assert isinstance(outcome, memstore.StructureMismatchError) and "model/weight" in str(outcome)


def _take_and_fail_to_restore(rank: int, path: str) -> tuple[str, list[str]]:
    snapshot = Snapshot.take(path if rank == 0 else f"{path}-of-rank-1", {"state": StateDict(x=torch.ones(3))})

    class Broken(StateDict):
        where = ""

        def state_dict(self) -> dict[str, Any]:
            if self.where == "state_dict":
                raise ArithmeticError("no state today")
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            if self.where == "load_state_dict":
                raise ArithmeticError("no loading today")

    said: list[str] = []
    for where in ("path", "app_state", "state_dict", "load_state_dict"):
        state = Broken(x=torch.zeros(3))
        state.where = where if rank else ""
        app_state: Any = {"state": 7 if rank and where == "app_state" else state}
        try:
            Snapshot(f"{path}-not" if rank and where == "path" else path).restore(app_state)
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
    return snapshot.path, said


def test_rank_0_says_where_a_snapshot_is_and_a_failure_of_one_rank_to_restore_is_told_by_all(path: str) -> None:
    (first_path, first), (second_path, second) = all_right(on_ranks(2, _take_and_fail_to_restore, path))
    assert first_path == second_path == path
    assert [text.split()[0] for text in second] == ["NoSnapshotError", "TypeError", *["ArithmeticError"] * 2]
    assert len(first) == 4 and all("rank 1" in text for text in first), first


# --- who writes which box, and boxes read into any others -------------------------------------------------------------


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor: cuts in each dimension."""
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        sides = list(zip(cuts, cuts[1:], strict=False)) or [(0, 0)]
        boxes = [Box((*box.offsets, a), (*box.shape, b - a)) for box in boxes for a, b in sides]
    return boxes


def take_as_ranks(path: str, state_dicts: Sequence[Any]) -> None:
    """As ranks would with these state dicts, all of whose tensors are shared."""
    storage = FileStorage.create(path, durable=False)
    take = Take("0123456789abcdef", path, len(state_dicts), 0.0, "test", True, False, True)
    walked = []
    for state_dict in state_dicts:
        walker = StateWalker(allow_pickle=False)
        state = walker.add("state", state_dict)
        walked.append((state, walker.tensors, {tensor.path for tensor in walker.tensors if tensor.is_sharded}))
    shares = partition(
        [own_bytes(tensors, shared) for _, tensors, shared in walked],
        [offers_of(tensors, shared) for _, tensors, shared in walked],
    )
    parts = []
    for rank, (state, tensors, shared) in enumerate(walked):
        part, files, _ = draft(take, rank, [state], tensors, shared, shares, Naming(None, ""))
        written = tuple(file.write(storage, durable=False, checksum=True) for file in files)
        parts.append(msgspec.structs.replace(part, files=written))
    publish(storage, parts)


@pytest.mark.parametrize("joined", [0, 64 << 10])
@given(st.data())
@settings(max_examples=examples(40))
def test_any_boxes_are_read_into_any_others(joined: int, data: st.DataObject) -> None:
    """Args: joined: gaps of so many bytes are read too; without any, runs are read each by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_JOINED", joined)
        _check_boxes_into_others(data)


def _check_boxes_into_others(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from([torch.int16, torch.float64, torch.complex128]))
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    stored, wanted = data.draw(grids(shape)), data.draw(grids(shape))
    turned = data.draw(st.booleans())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        take_as_ranks(f"{folder}/s", [{"x": TensorShard(value[box.slices], shape, box.offsets)} for box in stored])
        snapshot = Snapshot(f"{folder}/s")
        snapshot.verify()
        assert torch.equal(snapshot.read_object("0/state/x"), value)
        for box in wanted:
            local = torch.zeros(tuple(reversed(box.shape)) if turned else box.shape, dtype=dtype)
            local = local.permute(tuple(range(len(shape) - 1, -1, -1))) if turned else local
            target = TensorShard(local, shape, box.offsets)
            snapshot.read_object("0/state/x", target, data.draw(st.sampled_from([None, 1, 64])))
            assert torch.equal(local, value[box.slices])


@given(st.data())
def test_every_box_is_written_once_by_a_rank_that_has_it(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    offers: list[list[Offer]] = [[] for _ in range(ranks)]
    wanted: dict[str, list[Box]] = {}
    for number in range(data.draw(st.integers(0, 4))):
        shape, path = data.draw(shapes), f"x{number}"
        boxes = [box for box in data.draw(grids(shape)) if not box.is_empty]
        wanted[path] = boxes
        held = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in boxes]
        for rank in range(ranks):
            mine = tuple(box for box, who in zip(boxes, held, strict=True) if rank in who)
            offers[rank].append(Offer(path, "int64", 8, shape, mine, True))
    shares = partition([0] * ranks, offers)
    for path, boxes in wanted.items():
        written = [(rank, box) for rank in range(ranks) for box in shares[rank].get(path, [])]
        assert sorted(box for _, box in written) == sorted(boxes)
        for rank, box in written:
            assert box in next(offer for offer in offers[rank] if offer.path == path).boxes


def test_what_all_ranks_have_is_balanced_and_large_tensors_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "SPLIT", 1000)
    sizes = [(7, 100), (1, 900), (90, 10), (3, 5), (1, 2000), ()]
    offers = [[Offer(f"x{i}", "int8", 1, size, (whole(size),), False) for i, size in enumerate(sizes)]]
    shares = partition([0, 0, 500], offers * 3)
    loads = [sum(math.prod(box.shape) for boxes in share.values() for box in boxes) for share in shares]
    assert sum(loads) == sum(map(math.prod, sizes)) and loads == pytest.approx([1500, 1700, 1200], abs=900)
    assert sum(len(share.get("x4", [])) for share in shares) == 1, "its rows can't be split"
    wide = partition([0, 0], [[Offer("w", "int8", 1, (40, 100), (whole((40, 100)),), False)]] * 2)
    assert sorted(box for share in wide for box in share["w"]) == [Box((0, 0), (20, 100)), Box((20, 0), (20, 100))]
    assert all(len(share["w"]) == 1 for share in wide)


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    offers = [[Offer("x", "int8", 1, (3,), (whole((3,)),), False)], [Offer("x", "int8", 1, (4,), (), False)]]
    with pytest.raises(memstore.ShardMismatchError, match=r"rank 0 has it as int8\[3\], rank 1 as int8\[4\]"):
        partition([0, 0], offers)
    beyond = [
        [Offer("x", "int8", 1, (3,), (Box((0,), (2,)),), True)],
        [Offer("x", "int8", 1, (3,), (Box((2,), (2,)),), True)],
    ]
    with pytest.raises(memstore.ShardMismatchError, match=r"x: the ranks' part \[2:4\] lies outside of \[3\]"):
        partition([0, 0], beyond)


@pytest.mark.parametrize("checksum, most", [(False, 4 << 20), (True, 120 << 20)])
def test_a_read_stays_within_its_memory_budget(tmp_path: Path, checksum: bool, most: int) -> None:
    value = torch.arange(16 << 20, dtype=torch.int32).reshape(4096, 4096)
    snapshot = Snapshot.take(f"{tmp_path}/s", {"s": StateDict(x=value)}, durability="process", checksum=checksum)
    target = torch.zeros(4096, 4096, dtype=torch.int32).t()
    columns = TensorShard(torch.zeros(4096, 8, dtype=torch.int32), (4096, 4096), (0, 99))
    tracemalloc.start()
    try:
        snapshot.read_object("0/s/x", target, memory_budget_bytes=1 << 20)
        snapshot.read_object("0/s/x", columns, memory_budget_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert torch.equal(target, value) and torch.equal(columns.local, value[:, 99:107])


def test_of_columns_only_their_rows_are_read(tmp_path: Path) -> None:
    value = torch.arange(8 << 20, dtype=torch.int32).reshape(64, 128 << 10)  # rows of 512 KiB
    Snapshot.take(f"{tmp_path}/s", {"s": StateDict(x=value)}, durability="process", checksum=False)
    snapshot = Snapshot(f"{tmp_path}/s")
    snapshot.get_manifest()
    for local in (torch.zeros(64, 500, dtype=torch.int32), torch.zeros(500, 64, dtype=torch.int32).t()):
        before = _bytes_read()
        snapshot.read_object("0/s/x", TensorShard(local, (64, 128 << 10), (0, 1000)))
        assert torch.equal(local, value[:, 1000:1500])
        assert 64 * 500 * 4 <= _bytes_read() - before < 2 * 64 * 500 * 4, "and some of /proc"


def test_of_columns_only_the_chunks_that_have_them_are_read_and_compared(tmp_path: Path) -> None:
    value = torch.arange(20 << 20, dtype=torch.int32).reshape(2, 10 << 20)  # rows of 40 MiB, in chunks of 16
    path = f"{tmp_path}/s"
    Snapshot.take(path, {"s": StateDict(x=value)}, durability="process")
    with open(f"{path}/state.safetensors", "r+b") as file:
        file.seek(18 << 20)  # in the second chunk
        file.write(b"damage")
    snapshot = Snapshot(path)
    local = torch.zeros(2, 1000, dtype=torch.int32)
    before = _bytes_read()
    snapshot.read_object("0/s/x", TensorShard(local, tuple(value.shape), (0, 0)))
    assert torch.equal(local, value[:, :1000])
    assert _bytes_read() - before < 33 << 20, "two chunks of five"
    with pytest.raises(memstore.CorruptionError, match="chunk 1"):
        snapshot.read_object("0/s/x", TensorShard(local, tuple(value.shape), (0, 5 << 20)))


def _bytes_read() -> int:
    """By this process, with system calls."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


# --- what scripts for torchsnapshot do, with no more than the import changed ------------------------------------------


EPOCHS, STEPS = 3, 4


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder:
        yield folder


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(
    model: torch.nn.Module, folder: str, restore_from: str | None = None, replicated: list[str] | None = None
) -> str:
    """The loop of torchsnapshot's examples: a snapshot an epoch, all of them with the random state."""
    optim = torch.optim.Adagrad(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, step_size=2, gamma=0.5)
    progress = torchsnapshot.StateDict(current_epoch=0)
    app_state: dict[str, Stateful] = {
        "rng_state": torchsnapshot.RNGState(),
        "model": model,
        "optim": optim,
        "scheduler": scheduler,
        "progress": progress,
    }
    if restore_from is not None:
        snapshot = torchsnapshot.Snapshot(path=restore_from)
        snapshot.restore(app_state=app_state)
    while progress["current_epoch"] < EPOCHS:
        for _ in range(STEPS):
            inputs, labels = torch.rand((8, 16)), torch.rand((8, 1))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)
            optim.zero_grad()
            loss.backward()
            optim.step()
        scheduler.step()
        progress["current_epoch"] += 1
        torchsnapshot.Snapshot.take(
            path=f"{folder}/epoch-{progress['current_epoch']}", app_state=app_state, replicated=replicated
        )
    return "".join(str(value.tolist()) for value in model.state_dict().values())


def test_the_loop_of_one_process_is_resumed_bit_for_bit(folder: str) -> None:
    torch.manual_seed(42)
    want = train(network(), f"{folder}/whole")
    torch.manual_seed(1)
    assert train(network(), f"{folder}/resumed", restore_from=f"{folder}/whole/epoch-1") == want


def _train_ddp(rank: int, folder: str, restore_from: str | None) -> str:
    torch.manual_seed(42 if restore_from is None else 1)
    return train(DistributedDataParallel(network()), folder, restore_from, replicated=["**"])


def test_the_loop_of_ddp_is_resumed_bit_for_bit(folder: str) -> None:
    want = all_right(on_ranks(2, _train_ddp, f"{folder}/whole", None))
    assert all_right(on_ranks(2, _train_ddp, f"{folder}/resumed", f"{folder}/whole/epoch-1")) == want
    manifest = Snapshot(f"{folder}/whole/epoch-1").get_manifest()
    entries = {path: entry for path, entry in manifest.items() if "/rng_state/" not in path}  # which differ
    first = {path.removeprefix("0/"): entry for path, entry in entries.items() if path.startswith("0/")}
    assert "model/module.0.weight" in first and "optim/state/0/sum" in first
    assert {f"{rank}/{path}": entry for path, entry in first.items() for rank in (0, 1)} == entries  # written once


def test_objects_are_read_one_by_one(folder: str) -> None:
    model, progress = network(), torchsnapshot.StateDict(steps=7, losses=[0.5, 0.25], name="run")
    snapshot = Snapshot.take(f"{folder}/a", {"model": model, "progress": progress})
    assert snapshot.read_object("0/progress/steps") == 7
    assert snapshot.read_object(path="0/progress/losses/1") == 0.25
    weight = snapshot.read_object("0/model/0.weight")
    assert torch.equal(weight, model[0].weight)
    out = torch.empty_like(model[0].weight)
    assert snapshot.read_object("0/model/0.weight", obj_out=out, memory_budget_bytes=4096) is out
    assert torch.equal(out, model[0].weight)
    manifest = snapshot.get_manifest()
    assert {"0/model/0.weight", "0/progress/steps"} <= manifest.keys()
    assert manifest["0/model/0.weight"].shape == (8, 16) and snapshot.metadata.manifest.keys() == manifest.keys()
    assert snapshot.metadata.world_size == 1
    state_dict = snapshot.get_state_dict_for_key("progress")
    assert state_dict == {"steps": 7, "losses": [0.5, 0.25], "name": "run"}


def test_a_model_that_grew_is_restored_as_far_as_it_fits(folder: str) -> None:
    Snapshot.take(f"{folder}/a", {"model": torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})})
    grown = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    with pytest.raises(torchsnapshot.StructureMismatchError):
        Snapshot(f"{folder}/a").restore({"model": grown})
    Snapshot(f"{folder}/a").restore({"model": grown}, strict=False)


class _Counter:
    """An object with a state of its own, as a data loader's."""

    def __init__(self) -> None:
        self.count, self.loaded = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": {"epoch": torch.arange(self.count)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.loaded = state_dict["count"], True


def test_objects_with_the_two_methods_need_nothing_else(folder: str) -> None:
    counter, other = _Counter(), _Counter()
    assert isinstance(counter, torchsnapshot.Stateful)
    counter.count = 5
    Snapshot.take(f"file://{folder}/a", {"loader": counter})
    Snapshot(f"{folder}/a").restore({"loader": other})
    assert other.loaded and other.count == 5


def _own_and_replicated(rank: int, folder: str) -> tuple[int, float]:
    pg = torch.distributed.new_group(list(range(2)))
    state = torchsnapshot.StateDict(own=torch.full((3,), float(rank)), same=torch.ones(3))
    snapshot = Snapshot.take(f"{folder}/a", {"state": state}, pg, ["state/same"])
    state["own"], state["same"] = torch.zeros(3), torch.zeros(3)
    Snapshot(f"{folder}/a", pg=pg).restore({"state": state})
    assert snapshot.path == f"{folder}/a" and state["same"].tolist() == [1.0] * 3
    return rank, state["own"][0].item()


def test_ranks_of_a_group_of_their_own(folder: str) -> None:
    assert all_right(on_ranks(2, _own_and_replicated, folder)) == [(0, 0.0), (1, 1.0)]
    entries = Snapshot(f"{folder}/a").get_manifest()
    assert {"0/state/own", "1/state/own", "0/state/same", "1/state/same"} <= entries.keys()
