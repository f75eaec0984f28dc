"""What scripts take from TorchStore beside its functions; what memstore has no use for says so."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import pickle
from typing import Any, ClassVar

import pytest

import memstore
import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore.folders import ROOT_VARIABLE

STRATEGIES: list[Any] = [ts.LocalRankStrategy, ts.HostStrategy, ts.ControllerStorageVolumes, ts.TorchStoreStrategy]

# name: parameters with their defaults, in TorchStore's order
SIGNATURES = {
    "initialize": "num_storage_volumes=1, strategy=None, store_name='torchstore', mesh=None",
    "put": "key, value, store_name='torchstore'",
    "put_batch": "entries, store_name='torchstore'",
    "get": "key, inplace_tensor=None, tensor_slice_spec=None, store_name='torchstore'",
    "get_batch": "keys, store_name='torchstore'",
    "delete": "key, *, store_name='torchstore'",
    "delete_batch": "keys, *, store_name='torchstore'",
    "keys": "prefix=None, *, store_name='torchstore'",
    "exists": "key, store_name='torchstore'",
    "put_state_dict": "state_dict, key, store_name='torchstore', direct_rdma=False, transfer_dtype=None",
    "get_state_dict": "key, user_state_dict=None, strict=True, store_name='torchstore', direct_rdma=False",
    "client": "store_name='torchstore'",
    "reset_client": "store_name='torchstore'",
    "shutdown": "store_name='torchstore'",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_have_torchstores_parameters(name: str) -> None:
    signature = inspect.signature(getattr(ts, name))
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == f"({SIGNATURES[name]})"
    assert inspect.iscoroutinefunction(getattr(ts, name)) is (name != "reset_client")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_are_accepted(strategy: Any, scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, scratch)
    made = pickle.loads(pickle.dumps(strategy(ts.TransportType.SharedMemory)))

    async def use() -> None:
        await ts.initialize(num_storage_volumes=4, strategy=made)
        await ts.put("key", 1)
        await ts.shutdown()

    asyncio.run(use())
    with pytest.raises(ts.NoCounterpartError, match="volumes"):
        made.select_storage_volume()
    assert not hasattr(made, "storage_volumes")


class _ProcsOfTwoHosts:
    sizes: ClassVar[dict[str, int]] = {"hosts": 2, "gpus": 4}


def test_processes_of_several_hosts_are_told_to_give_their_hosts() -> None:
    with pytest.raises(ts.NoCounterpartError, match="give that one"):
        asyncio.run(ts.initialize(mesh=_ProcsOfTwoHosts()))


def test_torchstores_paths_are_there() -> None:
    from memstore.integrations.torchstore.logging import init_logging
    from memstore.integrations.torchstore.transport import TransportType
    from memstore.integrations.torchstore.transport.types import TensorSlice
    from memstore.integrations.torchstore.utils import spawn_actors

    assert TransportType.TorchCommsRDMA is TransportType.TorchComms and TensorSlice is ts.TensorSlice
    assert spawn_actors is ts.spawn_actors and init_logging is ts.init_logging
    assert len({TensorSlice((0,), (1,), (4,), (2,), (2,)), TensorSlice((0,), (1,), (4,), (2,), (2,))}) == 1


def test_logging_follows_torchstores_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("memstore")
    level, handlers = logger.level, list(logger.handlers)
    monkeypatch.setenv("TORCHSTORE_LOG_LEVEL", "warning")
    try:
        ts.init_logging()
        assert logger.level == logging.WARNING and logger.handlers
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.parametrize("name", ["StorageVolume", "Controller", "create_transport_buffer"])
def test_other_names_of_torchstore_are_told_to_have_no_counterpart(name: str) -> None:
    with pytest.raises(ts.NoCounterpartError, match=f"no '{name}' in memstore.*docs/coming-from/torchstore.md"):
        getattr(ts, name)
    assert not hasattr(ts, name) and issubclass(ts.NoCounterpartError, memstore.MemstoreError)


@pytest.mark.parametrize(
    "code",
    [
        "from memstore.integrations.torchstore import StorageVolume",
        "import memstore.integrations.torchstore.storage_volume",
        "from memstore.integrations.torchstore.controller import Controller",
        "from memstore.integrations.torchstore.storage_utils.trie import Trie",
        "from memstore.integrations.torchstore.transport import TransportBuffer",
        "from memstore.integrations.torchstore.transport.buffers import TransportBuffer",
    ],
)
def test_imports_of_other_names_are_told_so_and_can_be_caught(code: str) -> None:
    with pytest.raises(ts.NoCounterpartImportError, match="in memstore: .*docs/coming-from/torchstore.md") as caught:
        exec(code)
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, memstore.MemstoreError)
    assert importlib.util.find_spec("memstore.nothing") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("memstore.integrations.torchstores")


def test_a_client_has_no_controller(job: str) -> None:
    client = asyncio.run(ts.client())
    with pytest.raises(ts.NoCounterpartError, match="the client has no '_controller'"):
        client._controller  # noqa: B018
    assert asyncio.run(client.store()).root.startswith(job)


ENV = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "9",
}


def test_the_environment_of_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    env = ts.spmd.SPMDEnv.from_env()
    assert env == ts.spmd.SPMDEnv(3, 1, 4, 2, "h", 9) and (env.num_hosts, env.group_rank) == (2, 1)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ValueError, match="multiple of LOCAL_WORLD_SIZE"):
        ts.spmd.SPMDEnv.from_env()
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="MASTER_PORT"):
        ts.spmd.SPMDEnv.from_env()
    assert ts.spmd.SPMDEnv.from_env(master_port=7).master_port == 7


def test_initialize_spmd_wants_a_strategy_and_a_known_transport() -> None:
    for strategy in (None, ts.ControllerStorageVolumes()):
        with pytest.raises(RuntimeError, match="HostStrategy or a LocalRankStrategy"):
            asyncio.run(ts.initialize_spmd(strategy=strategy))
    with pytest.raises(ValueError, match="transport is one of"):
        asyncio.run(ts.initialize_spmd(ts.HostStrategy(), transport="pigeon"))
