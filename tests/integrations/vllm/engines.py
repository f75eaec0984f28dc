"""vLLM's own workers, layers, routes and clients, on a CPU, with the backend "memstore"; without an engine core.

`Model` has vLLM's parallel layers, and a `load_weights` as those of vLLM's models: several names go into one layer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
pytest.importorskip("vllm", reason="`make test-vllm` has vllm in an environment of its own")

from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.worker.gpu_worker import Worker

from memstore.integrations.vllm import register

WIDTH, LAYERS, WORDS = 64, 3, 96
FUSED = (
    ("qkv", "q_proj", "q"),
    ("qkv", "k_proj", "k"),
    ("qkv", "v_proj", "v"),
    ("gate_up", "gate", 0),
    ("gate_up", "up", 1),
)
SHAPES = {
    "q_proj": (WIDTH, WIDTH),
    "k_proj": (WIDTH // 2, WIDTH),
    "v_proj": (WIDTH // 2, WIDTH),
    "o_proj": (WIDTH, WIDTH),
    "gate": (2 * WIDTH, WIDTH),
    "up": (2 * WIDTH, WIDTH),
    "down": (WIDTH, 2 * WIDTH),
}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: Any = {"bias": False, "params_dtype": torch.float32}
        self.qkv = QKVParallelLinear(WIDTH, WIDTH // 4, 4, 2, **options)
        self.o_proj = RowParallelLinear(WIDTH, WIDTH, **options)
        self.gate_up = MergedColumnParallelLinear(WIDTH, [2 * WIDTH, 2 * WIDTH], **options)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, **options)


class Model(torch.nn.Module):
    """A part of vLLM's Llama: its layers, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(WORDS, WIDTH, params_dtype=torch.float32)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.given: list[str] = []  # the names of the last load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        self.given = []
        for name, weight in weights:
            self.given.append(name)
            for fused, part, shard in FUSED:
                if f".{part}." in name:
                    parameter = parameters[name.replace(part, fused)]
                    parameter.weight_loader(parameter, weight, shard)
                    break
            else:
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
        return set(self.given)


def names() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
    return found | {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}


class Trained(torch.nn.Module):
    """The trainer's model: parameters by the names of a checkpoint, all filled with one number."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        for name, shape in names().items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, torch.nn.Module())
                module = getattr(module, step)
            module.register_parameter(last, torch.nn.Parameter(torch.full(shape, number)))

    def fill(self, number: float, only: str = "") -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith(only):
                    parameter.fill_(number)


def numbers(model: torch.nn.Module) -> dict[str, set[float]]:
    """What the parameters have, by the first two steps of their names."""
    found: dict[str, set[float]] = {}
    for name, parameter in model.named_parameters():
        where = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        found.setdefault(where, set()).update(parameter.detach().unique().tolist())
    return found


def everywhere(model: torch.nn.Module) -> set[float]:
    found = numbers(model)
    words = found.pop("embed") - {0.0}  # which has rows of zeros behind the last word
    return words.union(*found.values())


CONFIG = VllmConfig(device_config=DeviceConfig("cpu"))


def begin(rank: int = 0, world_size: int = 1, meeting: str = "") -> None:
    """Makes vLLM's groups, once a process.

    Args:
        meeting: a file by which the ranks find each other: a port that is free now may be taken when they are there.
    """
    register()
    if not parallel_state.model_parallel_is_initialized():
        CONFIG.parallel_config = ParallelConfig(tensor_parallel_size=world_size)
        with set_current_vllm_config(CONFIG):
            address = f"file://{meeting or tempfile.mkdtemp() + '/meeting'}"
            parallel_state.init_distributed_environment(world_size, rank, address, rank, backend="gloo")
            parallel_state.initialize_model_parallel(world_size, 1)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def worker(rank: int = 0) -> Worker:
    """vLLM's worker, with a model of ours and the engine that its configuration names."""
    begin()
    made = Worker.__new__(Worker)
    made.vllm_config, made.rank = CONFIG, rank
    made._weight_update_active = made._weight_update_is_draft = False
    with set_current_vllm_config(CONFIG):
        model = Model()
    for parameter in model.parameters():
        parameter.data.zero_()
    record_metadata_for_reloading(model)
    made.model_runner = SimpleNamespace(reset_lora_state=lambda: None, get_model=lambda: model, shutdown=lambda: None)
    config = WeightTransferConfig(backend="memstore")
    made.weight_transfer_engine = WeightTransferEngineFactory.create_engine(config, CONFIG, torch.device("cpu"), model)
    return made


class Engine:
    """What vLLM's routes call of an engine, and what `LocalClient` calls of an LLM: all workers do as they are told.

    Args:
        workers: in this process.
    """

    def __init__(self, *workers: Worker) -> None:
        self.workers, self.told = list(workers), []
        self.weight_version: str | None = None

    def all(self, method: str, *arguments: Any) -> None:
        self.told.append(method)
        for one in self.workers:
            getattr(one, method)(*arguments)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.all("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self) -> None:
        self.all("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self.all, "update_weights", request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.all("finish_weight_update")
        self.weight_version = weight_version or self.weight_version

    async def get_weight_version(self) -> str | None:
        return self.weight_version


class Offline:
    """As `vllm.LLM`, whose methods take dicts: `RLOfflineMixin` with an engine of ours."""

    def __init__(self, *workers: Worker) -> None:
        from vllm.entrypoints.rl.offline import RLOfflineMixin

        engine = self.engine = Engine(*workers)
        self._mixin = RLOfflineMixin.__new__(RLOfflineMixin)
        self._mixin.llm_engine = SimpleNamespace(
            collective_rpc=lambda method, kwargs=None: engine.all(method, *(kwargs or {}).values()),
            set_weight_version=lambda version: setattr(engine, "weight_version", version),
            get_weight_version=lambda: engine.weight_version,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixin, name)


class Actor(Engine):
    """As an `AsyncLLM` that is an actor of Ray: a worker in a process of its own."""

    def __init__(self) -> None:
        super().__init__(worker())

    async def update_weight_version(self, version: str) -> None:
        self.weight_version = version

    async def has(self) -> tuple[set[float], str | None]:
        return everywhere(self.workers[0].model_runner.get_model()), self.weight_version


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """Serves vLLM's own routes of weight updates, and gives the address."""
    import uvicorn
    from fastapi import FastAPI
    from vllm.entrypoints.rl.online.api_router import router

    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = engine
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
