"""Updates of vLLM's workers through a store: phases, clients, restarts, parts, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from tests.distributed.serving.agents import Agents
from tests.documents.pages import ROOT, snippets
from tests.integrations.vllm.engines import (
    LAYERS,
    WIDTH,
    Engine,
    Offline,
    Trained,
    everywhere,
    names,
    numbers,
    served,
    worker,
)

from vllm.distributed.weight_transfer import (  # isort: skip
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    ParamMeta,
    Replicate,
    Shard,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # isort: skip

from memstore.integrations.vllm import (
    LocalClient,
    MemstoreTrainer,
    MemstoreTrainerInitInfo,
    MemstoreUpdateInfo,
    MemstoreWorker,
    register,
    update_workers,
)
from memstore.integrations.vllm.trainer import piece
from memstore.integrations.vllm.weights import Round, Staging, newest_round


def trainer(root: str, model: Trained, client: Any, **options: Any) -> Any:
    info = MemstoreTrainerInitInfo(root, rank=0, **options)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))


def test_the_plugin_registers_the_backend_once() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="memstore")
    assert plugin.load() is register
    register()
    register()
    assert WeightTransferEngineFactory._registry["memstore"]() is MemstoreWorker
    assert WeightTransferTrainerFactory._registry["memstore"]() is MemstoreTrainer


def test_a_worker_has_what_a_trainer_sends(root: str) -> None:
    one, model = worker(), Trained()
    llm = Offline(one)
    engine = trainer(root, model, LocalClient(llm))
    memory = {name: parameter.data_ptr() for name, parameter in llm_model(one).named_parameters()}
    for number in (1.0, 2.0):
        model.fill(number)
        assert engine.send_weights() == Round(int(number))
        assert everywhere(llm_model(one)) == {number}
        assert one.weight_transfer_engine.version == Round(int(number))
        assert llm.get_weight_version() == str(int(number))
    assert {name: one.data_ptr() for name, one in llm_model(one).named_parameters()} == memory, "graphs keep it"
    engine.shutdown()
    one.weight_transfer_engine.shutdown()


def llm_model(one: Any) -> Any:
    return one.model_runner.get_model()


def test_over_http(root: str) -> None:
    one, model = worker(), Trained(3.0)
    engine = Engine(one)
    with served(engine) as address:
        sender = trainer(root, model, HTTPVLLMWeightSyncClient(address), dtype="bfloat16")
        sender.send_weights()
        assert everywhere(llm_model(one)) == {3.0}
        assert engine.weight_version == "1"
        assert engine.told == [
            "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
        ]  # fmt: skip
        assert sender.store.info("weights").leaves[0].dtype == torch.bfloat16
        sender.shutdown()
    one.weight_transfer_engine.shutdown()


def test_the_pages_run_as_they_stand(root: str) -> None:
    pages = ("docs/serving.md", "docs/coming-from/vllm.md")
    found = [one for page in pages for one in snippets(ROOT / page) if "make test-vllm runs it" in (one.not_run or "")]
    one, model = worker(), Trained()
    steps, opened = iter((1.0, 2.0)), list[Any]()
    with served(Engine(one)) as address:
        known: dict[str, Any] = {"rank": 0, "steps": 2, "model": model, "train": lambda one: one.fill(next(steps))}
        for snippet, number in zip(found, (2.0, 3.0, 4.0), strict=True):
            code = snippet.code.replace("http://localhost:8000", address)
            for folder in ("/dev/shm/serving", "/dev/shm/trained"):
                code = code.replace(folder, root)
            model.fill(number)
            exec(code, known)
            assert everywhere(llm_model(one)) == {number}, snippet.place
            known["store"] = known["engine"].store
            if "trainer_init" in code:
                opened.append(known["engine"])
    for engine in opened:
        engine.shutdown()
    one.weight_transfer_engine.shutdown()


def test_a_session_that_a_dead_trainer_left_open_is_ended(root: str) -> None:
    one, model = worker(), Trained(1.0)
    engine = Engine(one)
    with served(engine) as address:
        client = HTTPVLLMWeightSyncClient(address)
        first = trainer(root, model, client)
        first.put_weights()
        client.start_weight_update()  # and is killed
        with pytest.raises(Exception, match="500"):
            client.start_weight_update()
        model.fill(2.0)
        second = trainer(root, model, client)
        assert second.send_weights() == Round(2)
        assert everywhere(llm_model(one)) == {2.0}
        first.shutdown()
        second.shutdown()
    one.weight_transfer_engine.shutdown()


DIES = """
import os, sys
from tests.integrations.vllm.engines import Trained
from tests.integrations.vllm.test_updates import trainer
from memstore.integrations.vllm import register
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

register()
client = HTTPVLLMWeightSyncClient(sys.argv[2])
trainer(sys.argv[1], Trained(1.0), client).put_weights()
client.start_weight_update()
os.kill(os.getpid(), 9)
"""


def test_a_trainer_that_is_killed_in_a_session_holds_up_nobody(root: str) -> None:
    one = worker()
    with served(Engine(one)) as address:
        done = subprocess.run([sys.executable, "-c", DIES, root, address], cwd=ROOT, timeout=400, check=False)
        assert done.returncode == -9
        second = trainer(root, Trained(2.0), HTTPVLLMWeightSyncClient(address))
        assert second.send_weights() == Round(2)
        assert everywhere(llm_model(one)) == {2.0}
        second.shutdown()
    one.weight_transfer_engine.shutdown()


def test_a_worker_on_another_host(scratch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens its own host's folder by the cluster's address, and loads what is there; then it is told of updates."""
    register()
    Path(scratch).mkdir()
    agents = Agents(Path(scratch), tmp_path)
    try:
        seed = agents.serve("a")
        other = agents.serve("b", join=seed, members=2)
        for name, value in (
            ("MEMSTORE_SECRET_FILE", str(agents.secret)),
            ("MEMSTORE_VLLM_ROOT", other.root),
            ("MEMSTORE_VLLM_CLUSTER", seed.address),
        ):
            monkeypatch.setenv(name, value)
        model = Trained(4.0)
        sender = trainer(seed.root, model, LocalClient(Offline()), cluster=seed.address)
        sender.put_weights()
        late = worker()
        assert everywhere(llm_model(late)) == {4.0}
        model.fill(5.0)
        sent = sender.put_weights()
        assert update_workers(LocalClient(Offline(late)), sender.store, "weights") == sent
        assert everywhere(llm_model(late)) == {5.0} and late.weight_transfer_engine.version == sent
        with memstore.open(other.root) as store:
            assert store.info("weights").owner.endswith(seed.address)
        sender.shutdown()
        late.weight_transfer_engine.shutdown()
    finally:
        for agent in agents.started:
            agent.terminate()


def test_a_server_that_is_away_is_an_error_and_the_version_is_there(root: str) -> None:
    import requests

    one, model = worker(), Trained(1.0)
    with served(Engine(one)) as address:
        sender = trainer(root, model, HTTPVLLMWeightSyncClient(address, timeout=5))
    with pytest.raises(requests.ConnectionError):
        sender.send_weights()
    assert newest_round(sender.store, "weights") == Round(1)
    update_workers(LocalClient(Offline(one)), sender.store, "weights")  # by whoever finds it back
    assert everywhere(llm_model(one)) == {1.0}
    sender.shutdown()
    one.weight_transfer_engine.shutdown()


def test_a_worker_that_is_restarted_loads_the_newest_by_itself(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_VLLM_ROOT", root)
    monkeypatch.setenv("MEMSTORE_VLLM_KEY", "policy")
    monkeypatch.setenv("MEMSTORE_VLLM_PREFIX", "model.")
    monkeypatch.setenv("MEMSTORE_VLLM_NAMES", json.dumps({"final.weight": "norm.weight"}))
    early = worker()  # before there is a store
    assert everywhere(llm_model(early)) == {0.0} and early.weight_transfer_engine.version is None
    with memstore.open(root) as store:
        weights = {f"model.{name}": torch.full(shape, 5.0) for name, shape in names().items()}
        weights["model.final.weight"] = weights.pop("model.norm.weight")
        store.put("policy", {**weights, "optimizer.step": torch.tensor(1)})
        late = worker()
        assert everywhere(llm_model(late)) == {5.0} and late.weight_transfer_engine.version == Round(1)
        client = LocalClient(Offline(early, late))
        assert update_workers(client, store, "policy") == Round(1)
        assert everywhere(llm_model(early)) == {5.0}
    for one in (early, late):
        one.weight_transfer_engine.shutdown()


def test_what_has_changed_is_sent_alone(root: str) -> None:
    one, model = worker(), Trained(1.0)
    sender = trainer(root, model, LocalClient(Offline(one)))
    with pytest.raises(memstore.KeyNotFoundError, match="whole"):
        sender.send_weights(changed=lambda name: True)
    sender.send_weights()
    last = f"layers.{LAYERS - 1}."
    model.fill(2.0, last)
    assert sender.send_weights(changed=lambda name: name.startswith(last + "q_proj")) == Round(1, 2)
    assert sender.store.info("weights/changed").nbytes < sender.store.info("weights").nbytes / 8
    model_there = llm_model(one)
    assert {name.partition(".q_")[0] for name in model_there.given} > {f"layers.{LAYERS - 1}"}
    assert all(name.startswith(last) for name in model_there.given), "all names of the layer, and no others"
    assert model_there.layers[-1].qkv.weight.unique().tolist() == [1.0, 2.0]
    assert numbers(model_there)["layers.0"] == {1.0} == numbers(model_there)["norm"]

    model.fill(3.0, "norm")
    assert sender.send_weights(changed=["norm.weight", "norm.bias"]) == Round(1, 3)
    assert numbers(model_there)["norm"] == {3.0}
    late = worker()  # which needs both changes
    client = LocalClient(Offline(late))
    client.init_weight_transfer_engine({"root": root})
    update_workers(client, sender.store, "weights")
    assert numbers(llm_model(late)) == numbers(model_there)

    model.fill(4.0)
    assert sender.send_weights() == Round(4)
    assert newest_round(sender.store, "weights") == Round(4), "what had changed before counts no more"
    assert everywhere(model_there) == {4.0}
    sender.shutdown()
    for each in (one, late):
        each.weight_transfer_engine.shutdown()


def test_merged_adapters_are_sent_as_weights(root: str) -> None:
    one, model = worker(), Trained(1.0)
    sender = trainer(root, model, LocalClient(Offline(one)))
    sender.send_weights()
    adapted = [layer.q_proj.weight for layer in model.layers.children()]
    rank2 = torch.full((WIDTH, 2), 2.0) @ torch.full((2, WIDTH), 0.5)
    with torch.no_grad():
        for weight in adapted:
            weight += rank2
    assert sender.send_weights(changed=lambda name: "q_proj" in name) == Round(1, 2)
    for layer in llm_model(one).layers:
        assert torch.equal(layer.qkv.weight[:WIDTH], torch.full((WIDTH, WIDTH), 3.0))
        assert layer.qkv.weight[WIDTH:].unique().tolist() == [1.0], "what has no adapter"
    with torch.no_grad():
        for weight in adapted:
            weight -= rank2
    sender.send_weights(changed=lambda name: "q_proj" in name)
    assert everywhere(llm_model(one)) == {1.0}
    sender.shutdown()
    one.weight_transfer_engine.shutdown()


def test_a_round_that_is_replaced_meanwhile_is_loaded_whole(root: str) -> None:
    one, two, model = worker(), worker(), Trained(1.0)
    llm = Offline(one, two)
    sender = trainer(root, model, LocalClient(llm))
    other = memstore.open(root)
    load = one.weight_transfer_engine.model.load_weights

    def overtaken(weights: Any) -> Any:  # another trainer puts between the two workers' loads
        other.put("weights", Trained(9.0).state_dict())
        return load(weights)

    llm_model(one).load_weights = overtaken
    assert sender.send_weights() == Round(1)
    assert everywhere(llm_model(one)) == everywhere(llm_model(two)) == {1.0}
    other.close()
    sender.shutdown()
    for each in (one, two):
        each.weight_transfer_engine.shutdown()


def test_newest_is_no_version_for_ranks(root: str) -> None:
    for version in ("newest", 0, True, None, 1.5):
        with pytest.raises(ValueError, match="update_workers looks once"):
            MemstoreUpdateInfo(version)  # pyright: ignore
    one = worker()
    one.start_weight_update()
    with pytest.raises(ValueError, match="newest"):
        one.update_weights({"version": "newest"})


def test_a_version_that_is_gone_leaves_the_model_as_it_was(root: str) -> None:
    one, model = worker(), Trained(1.0)
    sender = trainer(root, model, LocalClient(Offline(one)))
    sender.send_weights()
    sender.send_weights()
    one.start_weight_update()
    with pytest.raises(memstore.VersionGoneError):
        one.update_weights({"version": 1})
    assert everywhere(llm_model(one)) == {1.0} and one.weight_transfer_engine.version == Round(2)
    model.fill(3.0)
    sender.send_weights()
    assert everywhere(llm_model(one)) == {3.0}
    sender.shutdown()
    one.weight_transfer_engine.shutdown()


def test_layers_are_filled_where_they_are_unless_their_kernels_want_another_form(root: str) -> None:
    one, model = worker(), Trained()
    there = llm_model(one)
    there.layers[1].down.quant_method = Doubled()
    sender = trainer(root, model, LocalClient(Offline(one)))
    memory = {name: parameter.data_ptr() for name, parameter in there.named_parameters()}
    one.start_weight_update()
    assert [name for name, parameter in there.named_parameters() if parameter.is_meta] == ["layers.1.down.weight"]
    one.finish_weight_update()
    for number in (3.0, 5.0):
        model.fill(number)
        sender.send_weights()
        assert {name: parameter.data_ptr() for name, parameter in there.named_parameters()} == memory
        assert there.layers[1].down.weight.unique().tolist() == [2 * number]
        assert numbers(there).pop("layers.1") == {number, 2 * number}
        assert numbers(there)["layers.0"] == numbers(there)["layers.2"] == numbers(there)["norm"] == {number}
    sender.shutdown()
    one.weight_transfer_engine.shutdown()


class Doubled(UnquantizedLinearMethod):
    """Makes another form of the weights, as quantised layers do."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data * 2, requires_grad=False)


def test_weights_of_another_shape_are_told(root: str) -> None:
    one, model = worker(), Trained(1.0)
    sender = trainer(root, model, LocalClient(Offline(one)))
    sender.send_weights()
    with memstore.open(root) as store:
        weights = {name: torch.full(shape, 2.0) for name, shape in names().items()}
        weights["layers.1.v_proj.weight"] = torch.full((3, 3), 2.0)
        store.put("weights", weights)
    one.start_weight_update()
    with pytest.raises((AssertionError, RuntimeError)):
        one.update_weights({"version": 2})
    assert not any(parameter.is_meta for parameter in llm_model(one).parameters())
    assert numbers(llm_model(one))["layers.0"] == {2.0} and numbers(llm_model(one))["layers.2"] == {1.0}
    assert one.weight_transfer_engine.version is None, "tensors of two versions"
    sender.send_weights()
    assert everywhere(llm_model(one)) == {1.0}
    sender.shutdown()
    one.weight_transfer_engine.shutdown()


def test_a_store_that_was_begun_anew_is_opened_again(root: str) -> None:
    one, model = worker(), Trained(1.0)
    client = LocalClient(Offline(one))
    first = trainer(root, model, client)
    first.send_weights()
    first.shutdown()
    memstore.destroy(root)
    model.fill(7.0)
    second = trainer(root, model, client)
    second.send_weights()
    assert everywhere(llm_model(one)) == {7.0}
    second.shutdown()
    one.weight_transfer_engine.shutdown()


def test_a_worker_that_knows_no_place_says_so(root: str) -> None:
    one = worker()
    one.start_weight_update()
    with pytest.raises(RuntimeError, match="MEMSTORE_VLLM_ROOT"):
        one.update_weights({"version": 1})
    with pytest.raises(ValueError, match="root"):
        one.init_weight_transfer_engine({"key": "weights"})
    assert everywhere(llm_model(one)) == {0.0}


@pytest.mark.parametrize(("rows", "columns"), [(7, 5), (8, 4), (1, 3), (2, 9)])
@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(0)), (Shard(1), Replicate())]
)
def test_pieces_lie_where_torch_chunk_cuts_them(placements: Any, rows: int, columns: int) -> None:
    whole, mesh = torch.arange(rows * columns).reshape(rows, columns), (2, 3)
    meta = ParamMeta(
        "w", whole.dtype, (rows, columns), owners=(6, 5, 4, 3, 2, 1), mesh_shape=mesh, placements=placements
    )
    found = torch.full_like(whole, -1)
    for position, rank in enumerate(meta.owners):
        part = whole
        for coordinate, size, placement in zip(divmod(position, mesh[1]), mesh, placements, strict=True):
            if isinstance(placement, Shard):
                chunks = part.chunk(size, placement.dim)
                part = chunks[coordinate] if coordinate < len(chunks) else part.narrow(placement.dim, 0, 0)
        shard = piece(meta, rank, part)
        assert shard.global_shape == (rows, columns)
        if part.numel():
            (row, column), (height, width) = shard.offsets, part.shape
            found[row : row + height, column : column + width] = shard.local
    assert torch.equal(found, whole)


def test_a_piece_of_another_shape_is_refused() -> None:
    meta = ParamMeta("w", torch.float32, (4, 4), owners=(0, 1), placements=(Shard(0),))
    with pytest.raises(ValueError, match="'w'"):
        piece(meta, 1, torch.zeros(3, 4))


@pytest.mark.parametrize("nbytes", [64, 1000, 1 << 20])
def test_staged_copies_are_those_of_copy(store: memstore.Store, nbytes: int) -> None:
    store.put("w", {"w": torch.randn(33, 17)})
    leaf = store.view("w")["w"]
    targets = [
        torch.zeros(33, 17),
        torch.zeros(17, 33).T,
        torch.zeros(40, 20)[2:35, 1:18],
        torch.zeros(33, 17).bfloat16(),
    ]
    with Staging(torch.device("cpu"), nbytes):
        for target in targets:
            target.copy_(leaf)
        targets[0][:, 3].copy_(leaf[:, 4])
        counted = torch.zeros((), dtype=torch.int64).copy_(torch.tensor(5))
    whole = store.get("w")["w"]
    assert counted == 5
    assert torch.equal(targets[0][:, 3], whole[:, 4])
    assert all(torch.equal(target.to(whole.dtype)[:, 4:], whole[:, 4:]) for target in targets[1:3])
    assert torch.equal(targets[3], whole.bfloat16())
