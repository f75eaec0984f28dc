"""Models that ranks train, save and load: plain, DDP, FSDP2, tensor parallel. Runs on ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memstore
import memstore.aio
from memstore import engine
from memstore.aio import calls as aio_calls
from memstore.aio import waits
from memstore.errors import CorruptionError, MemstoreError
from tests.aio.loops import until
from tests.ranks.meshes import mesh_of

KINDS = ("plain", "ddp", "fsdp", "hsdp", "tp", "fsdp and tp")


def bare(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5, bias=False), nn.BatchNorm1d(5))


def make(kind: str, seed: int = 0) -> nn.Module:
    model: Any = bare(seed)
    size = dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if "tp" in kind:
        mesh = mesh_of((size,)) if kind == "tp" else mesh_of((2, size // 2))["dim1"]
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind == "fsdp":
        fully_shard(model[0], mesh=mesh_of((size,)))
        fully_shard(model, mesh=mesh_of((size,)))
    if kind == "hsdp":
        fully_shard(model, mesh=mesh_of((2, size // 2)))
    if kind == "fsdp and tp":
        fully_shard(model, mesh=mesh_of((2, size // 2))["dim0"])
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step with gradients that are the same in every layout."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: Any) -> torch.Tensor:
    """By torch's own collectives."""
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """All tensors, whole, by name."""
    found = {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}
    names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
    states: dict[Any, Any] = dict(optimizer.state) if optimizer else {}
    for parameter, state in states.items():
        found |= {f"{names[parameter]}: {key}": whole(value) for key, value in state.items()}
    return found


# --- functions that ranks run -----------------------------------------------------------------------------------------


def save(root: str, kind: str, seed: int = 0, dtype: torch.dtype | None = None) -> tuple[int, dict[str, torch.Tensor]]:
    model = make(kind, seed)
    optimizer = optimizer_of(model)
    for number in range(2):
        step(model, optimizer, number)
    if "tp" not in kind:
        model(torch.arange(24.0).reshape(4, 6))  # after which FSDP2 keeps the parameters whole for the backward pass
    with memstore.open(root) as store:
        version = store.save_model("run", model, optimizer, dtype=dtype)
    return version, state_of(model, optimizer)


def load(root: str, kind: str, steps: int = 0) -> tuple[int, dict[str, torch.Tensor]]:
    """`steps`: that the model and its optimizer have made already, so that there are states."""
    model = make(kind, seed=5)
    optimizer = optimizer_of(model)
    for number in range(steps):
        step(model, optimizer, number)
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()]
    places = [tensor.data_ptr() for tensor in local]
    with memstore.open(root, "r") as store:
        version = store.load_model("run", model, optimizer)
    assert places == [tensor.data_ptr() for tensor in local]
    found = state_of(model, optimizer)
    step(model, optimizer, 7)  # with what was loaded
    return version, found


def load_given_up(root: str, gives_up: int) -> tuple[str, bool, int]:
    """Loads that wait for a newer version. On one rank the task is cancelled; then all load what is there.

    Returns what the load raised, whether the model was as before then, and the version of the second load.
    """
    return asyncio.run(_load_given_up(root, gives_up))


async def _load_given_up(root: str, gives_up: int) -> tuple[str, bool, int]:
    model, text = bare(5), "cancelled"
    before = state_of(model, None)
    async with memstore.aio.open(root, timeout=100.0) as store:
        version = await store.version("run")
        loading = asyncio.ensure_future(store.load_model("run", model, newer_than=version))
        if dist.get_rank() == gives_up:
            await until(lambda: bool(waits._wait_threads) if gives_up == 0 else _has_a_thread(store), 60.0)
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            if gives_up:
                await until(lambda: not _has_a_thread(store), 60.0)  # it has noticed; else both ranks may load yet
                await store.put("run", await store.get("run"))  # for which rank 0 waits
        else:
            try:
                await loading
            except MemstoreError as error:
                text = str(error)
        is_unchanged = all(torch.equal(before[name], tensor) for name, tensor in state_of(model, None).items())
        return text, is_unchanged, await store.load_model("run", model)


def _has_a_thread(store: memstore.aio.AsyncStore) -> bool:
    pool = aio_calls._pools.get(store._lazy.pool_of_ranks("run"))
    return pool is not None and pool._running > 0


def save_and_load_in_inference_mode(root: str, kind: str) -> None:
    """As an evaluation does, whose module goes on training later."""
    model, other = make(kind), make(kind, seed=5)
    state, expected = model.state_dict(), state_of(model, None)  # torch makes no state_dict of DTensors in that mode
    optimizer = optimizer_of(other)
    with memstore.open(root) as store:
        with torch.inference_mode():
            store.save_model("run", model)
            store.put_sharded("state", state)
            store.load_model("run", other)
        assert all(torch.equal(store.get("state")[name], tensor) for name, tensor in expected.items())
    found = state_of(other, None)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    step(other, optimizer, 1)
    assert not any(parameter.is_inference() for parameter in other.parameters())


def load_half(root: str) -> tuple[int, torch.Tensor]:
    model = make("fsdp", seed=5).to(torch.bfloat16)
    with memstore.open(root) as store:
        return store.load_model("run", model), whole(model.state_dict()["0.weight"])


def save_in_groups(root: str) -> list[float]:
    """The even and the odd ranks each save a model, and load that of the others."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own, model = rank % 2, nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(own))
    with memstore.open(root) as store:
        store.save_model(f"run{own}", model, process_group=groups[own])
        store.load_model(f"run{1 - own}", model, newer_than=0, process_group=groups[own])
    return model.weight.unique().tolist()


class Stage(nn.Module):
    """Of a pipeline: the layers that this rank has."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(first, last)})
        for i, layer in self.layers.items():
            nn.init.constant_(cast(nn.Linear, layer).weight, float(i))
        self.norm = nn.LayerNorm(2)


def save_stage(root: str) -> int:
    rank = dist.get_rank()
    model = Stage(2 * rank, 2 * rank + 2)
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    with memstore.open(root) as store:
        return store.save_model("run", model, optimizer)


def load_stage(root: str, layers: int) -> list[float]:
    """So many layers in all, spread over other stages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Stage(rank * layers // size, (rank + 1) * layers // size)
    optimizer = optimizer_of(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with memstore.open(root) as store:
        store.load_model("run", model, optimizer, timeout=60)
    assert set(optimizer.state) == set(model.parameters())
    return [round(float(cast(nn.Linear, layer).weight.mean())) for layer in model.layers.values()]


def load_unfit(root: str, unfit: int) -> None:
    """One rank's module has another name."""
    model: Any = Stage(0, 2)
    if dist.get_rank() == unfit:
        model.other = nn.Linear(1, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with memstore.open(root) as store:
            store.load_model("run", model, timeout=600)
    finally:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def load_with_timeout(root: str, timeout: float, newer_than: int | None = None) -> int:
    with memstore.open(root) as store:
        return store.load_model("run", Stage(0, 2), newer_than=newer_than, timeout=timeout)


class Refusing(nn.Module):
    """One rank can't load it, which is found out only when it is filled."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.layer, self.bad = nn.Linear(2, 2), bad

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if self.bad == dist.get_rank():
            raise CorruptionError("damaged bytes")


def load_refusing(root: str, bad: int) -> str:
    """What this rank raises."""
    with memstore.open(root) as store:
        store.save_model("run", Refusing(bad))
        with pytest.raises(CorruptionError) as raised:
            store.load_model("run", Refusing(bad), timeout=600)
        assert raised.value.key == (None if dist.get_rank() == bad else "run")
        store.load_model("run", Refusing(-1), timeout=600)
    return str(raised.value)


def save_with_foreign_parameter(root: str, bad: int) -> int:
    model = Stage(0, 2)
    parameters = [*model.parameters(), *([nn.Parameter(torch.ones(1))] * (dist.get_rank() == bad))]
    with memstore.open(root) as store:
        return store.save_model("run", model, torch.optim.SGD(parameters), timeout=600)


# --- a generator that follows a trainer -------------------------------------------------------------------------------

_SHAPES = ((37, 11), (5,), (64, 3))


class Stamped(nn.Module):
    """Every element says of which version it is."""

    def __init__(self, placement: Any) -> None:
        super().__init__()
        mesh = mesh_of((dist.get_world_size(),))
        for i, shape in enumerate(_SHAPES):
            spread = distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)
            setattr(self, f"w{i}", nn.Parameter(spread))
        self.number: torch.Tensor
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def stamp(self, number: int) -> None:
        for parameter in self.parameters():
            parameter.to_local().fill_(number)  # type: ignore[attr-defined]
        self.number.fill_(number)

    def stamps(self) -> set[float]:
        values = torch.cat([parameter.to_local().flatten() for parameter in self.parameters()])  # type: ignore[attr-defined]
        return {*values.unique().tolist(), float(self.number)}


def load_while_others_put(root: str) -> tuple[int, list[float]]:
    """Between rank 0's look and those of the others, the key is overwritten, and files are used again."""
    model = Stamped(Shard(0))
    real = engine.unpack
    with memstore.open(root) as store:

        def overwrite_and_unpack(*arguments: Any, **options: Any) -> Any:
            for number in range(5):
                store.put("policy", {"model": {name: value + 10 + number for name, value in whole_stamped().items()}})
                store.gc()
            return real(*arguments, **options)

        engine.unpack = overwrite_and_unpack
        try:
            return store.load_model("policy", model), sorted(model.stamps())
        finally:
            engine.unpack = real


def whole_stamped() -> dict[str, torch.Tensor]:
    weights = {f"w{i}": torch.ones(shape) for i, shape in enumerate(_SHAPES)}
    return {**weights, "number": torch.ones((), dtype=torch.int64)}


def publish(root: str, versions: int) -> int:
    model = Stamped(Shard(0))
    version = 0
    with memstore.open(root) as store:
        for number in range(1, versions + 1):
            model.stamp(number)
            version = store.save_model("policy", model)
    return version


def follow(root: str, versions: int) -> list[list[float]]:
    """The stamps of each version that was loaded: one, if it was neither torn nor mixed."""
    model, seen, version = Stamped(Shard(dist.get_world_size() % 2)), [[0.0]], 0
    with memstore.open(root) as store:
        while versions not in seen[-1]:
            version = store.load_model("policy", model, newer_than=version, timeout=100)
            seen.append(sorted(model.stamps()))
    return seen[1:]
