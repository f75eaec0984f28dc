"""Modules whose weights come out of snapshots, views, state dicts and files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import CorruptionError, NotAStoreError, StructureMismatchError
from memstore.fake import fake_like
from tests.children import in_a_child, in_child
from tests.deferred_init.modules import Make, assert_made_as
from tests.sharding.fake_world import as_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("passing", torch.arange(4.0), persistent=False)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    made = Model()
    with torch.no_grad():
        for one in made.parameters():
            one.add_(1)
    return made


def snapshot(model: nn.Module, path: Path) -> str:
    memstore.Snapshot.take(path / "s", {"model": model, "other": memstore.StateDict(step=3)})
    return str(path / "s")


def safetensors(model: nn.Module, path: Path) -> str:
    with memstore.open(path / "store") as store:
        store.put("m", dict(model.state_dict()))
        store.export("m", path / "hub", max_shard_size="1KiB")
    assert (path / "hub" / "model.safetensors.index.json").exists()
    return str(path / "hub")


def one_file(model: nn.Module, path: Path) -> str:
    from safetensors.torch import save_file

    found = {name: one.clone() for name, one in model.state_dict().items() if name != "head.weight"}
    save_file(found, path / "one.safetensors")
    return str(path / "one.safetensors")


SOURCES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "a snapshot's path": snapshot,
    "a snapshot": lambda model, path: memstore.Snapshot(snapshot(model, path)),
    "a view of a snapshot": lambda model, path: memstore.Snapshot(snapshot(model, path)).view()["model"],
    "a folder of safetensors": safetensors,
    "a file, without the tied weight's other name": one_file,
    "a state dict": lambda model, path: model.state_dict(),
    "nested dicts": lambda model, path: {"trainer": {"embed": {"weight": model.embed.weight}}},
}


@pytest.mark.parametrize("name", SOURCES)
def test_weights_are_those_of_the_source(name: str, model: Model, tmp_path: Path) -> None:
    source = SOURCES[name](model, tmp_path)
    made = deferred_init(Model)
    done = materialize_module(made, source=source)
    assert not is_deferred(made) and made.head.weight is made.embed.weight
    for key in done.found:
        assert torch.equal(made.state_dict()[key], model.state_dict()[key]), key
    assert "embed.weight" in done.found and isinstance(made.embed.weight, nn.Parameter)
    assert "passing" in done.replayed and made.passing.tolist() == [0, 1, 2, 3]
    assert len(done.found) == (2 if name == "nested dicts" else 9)
    if name in ("a snapshot's path", "a folder of safetensors"):
        assert in_a_file(made.embed.weight) and in_a_file(made.layers[0].weight)


def test_a_view_of_a_store_is_mapped_and_what_is_written_stays_here(model: Model, root: str) -> None:
    with memstore.open(root, inline_limit=0) as store:
        store.put("model", dict(model.state_dict()))
        view, before = store.view("model"), memstore.bytes_read()
        made = deferred_init(Model)
        materialize_module(made, source=view)
        assert memstore.bytes_read() == before, "mapped, and not read"
        assert in_a_file(made.layers[0].weight), "and not copied"
        with torch.no_grad():
            made.embed.weight.zero_()
        assert torch.equal(view["embed.weight"] + 0, model.embed.weight)
        assert torch.equal(store.get("model")["embed.weight"], model.embed.weight)


def in_a_file(tensor: torch.Tensor) -> bool:
    """Whether its memory is that of a mapped file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return len(line.split()) > 5 and line.split()[5].startswith("/")
    return False


def test_weights_are_converted_on_the_way(model: Model, tmp_path: Path) -> None:
    made = deferred_init(Model)
    materialize_module(made, source=safetensors(model, tmp_path), dtype=torch.bfloat16)
    assert torch.equal(made.embed.weight, model.embed.weight.bfloat16()) and made.passing.dtype == torch.bfloat16
    assert made.layers[1].num_batches_tracked.dtype == torch.int64 and made.head.weight is made.embed.weight
    half = deferred_init(lambda: Model().half())
    materialize_module(half, source=model.state_dict())
    assert half.layers[0].weight.dtype == torch.float16, "as the constructor has chosen"
    moved = deferred_init(Model)
    materialize_module(moved, device="meta", source=model.state_dict())
    assert moved.embed.weight.is_meta and moved.passing.is_meta


def test_what_the_source_lacks_is_replayed(model: Model) -> None:
    torch.manual_seed(4)
    expected = Model()
    torch.manual_seed(4)
    made = deferred_init(Model)
    done = materialize_module(made, source={"layers.0.weight": model.layers[0].weight})
    assert done.found == ("layers.0.weight",) and torch.equal(made.layers[0].bias, expected.layers[0].bias)
    assert torch.equal(made.embed.weight, expected.embed.weight)


def test_a_view_of_a_parameter_shares_what_was_taken_for_it() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Parameter(torch.zeros(6)[2:4])
            self.flat = nn.Parameter(self.part.detach().as_strided((6,), (1,), 0))

    whole = deferred_init(Flat)
    materialize_module(whole, source={"flat": torch.arange(6.0)})
    assert whole.part.tolist() == [2, 3] and whole.part.data_ptr() == whole.flat.data_ptr() + 8
    part = deferred_init(Flat)
    materialize_module(part, source={"part": torch.tensor([7.0, 8.0])})
    assert part.flat.tolist() == [0, 0, 7, 8, 0, 0] and part.part.data_ptr() == part.flat.data_ptr() + 8


def test_all_mismatches_come_in_one_error_and_nothing_is_changed(model: Model) -> None:
    made = deferred_init(Model)
    state = {**model.state_dict(), "embed.weight": torch.ones(31, 8), "layers.0.bias": torch.ones(8, dtype=torch.int64)}
    state["layers.0.weight"] = fake_like(model.layers[0].weight)
    with pytest.raises(StructureMismatchError) as caught:
        materialize_module(made, source=state)
    text = str(caught.value)
    assert "embed.weight: shape [32, 8] in the module, [31, 8]" in text
    assert "layers.0.weight: the source's is fake" in text
    assert "layers.0.bias: torch.float32 in the module, torch.int64" in text and is_deferred(made.layers[1])
    materialize_module(made, source=model.state_dict())
    assert torch.equal(made.embed.weight, model.embed.weight)


def test_a_source_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StructureMismatchError, match="none of the module's 2 weights"):
        materialize_module(deferred_init(nn.Linear, 2, 2), source={"other": torch.ones(1)})
    with pytest.raises(NotAStoreError, match="there is no snapshot"):
        materialize_module(deferred_init(nn.Linear, 2, 2), source=str(tmp_path / "missing"))
    with pytest.raises(TypeError, match="source is a Snapshot"):
        materialize_module(deferred_init(nn.Linear, 2, 2), source=7)
    with pytest.raises(TypeError, match="belong together"):
        materialize_module(deferred_init(nn.Linear, 2, 2), mesh=7)


def test_a_damaged_file_is_named(model: Model, tmp_path: Path) -> None:
    path = one_file(model, tmp_path)
    os.truncate(path, os.path.getsize(path) - 100)
    with pytest.raises(CorruptionError, match="one.safetensors"):
        materialize_module(deferred_init(Model), source=path)


def test_materializing_a_part_takes_the_parts_names(model: Model, tmp_path: Path) -> None:
    made = deferred_init(Model)
    done = materialize_module(made.layers, source=safetensors(model, tmp_path))
    assert len(done.found) == 7 and is_deferred(made) and not is_deferred(made.layers)
    tensor = materialize_tensor(made.embed.weight)
    assert tensor.shape == (32, 8)


# --- with a mesh ------------------------------------------------------------------------------------------------------


def test_each_rank_reads_its_own_part(tmp_path: Path) -> None:
    for rank in range(2):
        in_child(check_rank, str(tmp_path), rank, timeout=100.0)


def check_rank(path: str, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.manual_seed(1)
    model = Model()
    folder = Path(path) / str(rank)
    folder.mkdir()
    sources = [snapshot(model, folder), safetensors(model, folder), model.state_dict(), None]
    with as_rank(rank, 2):
        mesh = init_device_mesh("cpu", (2,))
        for source in sources:
            before = memstore.bytes_read()
            torch.manual_seed(1)
            made = deferred_init(Model)
            materialize_module(made, source=source, mesh=mesh, placements=[Shard(0)])
            weight: Any = made.embed.weight
            assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter) and weight.requires_grad
            assert weight.shape == (32, 8) and made.head.weight is weight
            assert torch.equal(weight.to_local(), model.embed.weight[16 * rank : 16 * rank + 16])
            assert type(made.passing) is torch.Tensor and made.passing.tolist() == [0, 1, 2, 3]
            if source is sources[0]:
                total = sum(one.nbytes for one in model.parameters())
                assert memstore.bytes_read() - before <= total // 2, "half of it"

        made = deferred_init(Model)
        chosen = {"embed.weight": [Shard(1)], "layers.0.weight": [Replicate()]}
        materialize_module(made, source=sources[1], mesh=mesh, placements=chosen, dtype=torch.bfloat16)
        local: Any = made.embed.weight
        assert local.to_local().shape == (32, 4) and local.dtype == torch.bfloat16
        assert type(made.layers[0].bias) is nn.Parameter, "left whole"


def test_a_rank_that_replays_never_has_all(tmp_path: Path) -> None:
    in_child(check_replayed_memory, timeout=100.0)


def check_replayed_memory() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    layers, nbytes = 32, 4 << 20
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        made = deferred_init(lambda: nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        seen: list[int] = []

        def placements(name: str, tensor: torch.Tensor) -> Any:
            seen.append(anonymous())
            return [Shard(0)]

        materialize_module(made, mesh=mesh, placements=placements)
    assert len(seen) >= layers and max(seen) - seen[0] < layers * nbytes // 2


def anonymous() -> int:
    """Bytes of memory of this process that lie in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# --- tensors that wrap others -----------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    """It wraps nothing."""


def two(factor: float = 1.0) -> Any:
    return TwoTensor(torch.full((4, 2), factor), torch.full((4, 2), 2 * factor))


def with_buffer(make: Callable[[], torch.Tensor]) -> Any:
    def made() -> nn.Module:
        module = nn.Module()
        module.register_buffer("kept", make())
        module.bias = nn.Parameter(torch.zeros(2))
        return module

    return deferred_init(made)


@pytest.mark.parametrize("ours", [two, lambda: torch.rand(4, 2), lambda: torch.rand(4, 2).as_subclass(Marked)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_that_wraps_others_comes_as_what_it_is(ours: Any, dtype: torch.dtype | None) -> None:
    made = with_buffer(ours)
    kept = made.kept
    done = materialize_module(made, source={"kept": two(3.0)}, dtype=dtype)
    assert done.found == ("kept",) and made.kept is kept and type(kept) is TwoTensor
    assert kept.a.unique().tolist() == [3] and kept.b.unique().tolist() == [6]
    assert kept.a.dtype == kept.b.dtype == (dtype or torch.float32) and not isinstance(kept, nn.Parameter)


@pytest.mark.parametrize("cls", [nn.Parameter, Marked])
def test_a_sources_class_that_wraps_nothing_is_none_of_the_modules(cls: Any) -> None:
    made = deferred_init(nn.Linear, 2, 4)
    materialize_module(made, source={"weight": torch.ones(4, 2).as_subclass(cls)})
    assert type(made.weight) is nn.Parameter and made.weight.unique().tolist() == [1]


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (two, torch.ones(4, 2), "kept: the source's is a Tensor, and the module's a TwoTensor"),
        (
            lambda: torch.rand(8, 2)[:4],
            two(),
            "kept: the source's is a TwoTensor, which wraps others.*shares its memory",
        ),
    ],
)
def test_classes_that_can_not_be_are_named_and_nothing_is_changed(ours: Any, theirs: Any, message: str) -> None:
    made = with_buffer(ours)
    kept, bias = made.kept, made.bias
    with pytest.raises(StructureMismatchError, match=message):
        materialize_module(made, source={"bias": torch.ones(2), "kept": theirs})
    assert made.kept is kept and made.bias is bias and is_deferred(kept) and is_deferred(bias)


@in_a_child
def test_no_rank_takes_a_part_of_what_wraps_others() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        spread = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
        for theirs, way_out in ((two(), "give a plain tensor"), (spread, r"give its full_tensor\(\)")):
            sharded: Any = deferred_init(nn.Linear, 2, 4, bias=False)
            fully_shard(sharded, mesh=mesh)
            cases: list[tuple[nn.Module, dict[str, Any]]] = [
                (sharded, {}),
                (deferred_init(nn.Linear, 2, 4), {"mesh": mesh, "placements": [Shard(0)]}),
            ]
            for made, kinds in cases:
                with pytest.raises(StructureMismatchError, match=f"weight: the source's is a .*Tensor.*{way_out}"):
                    materialize_module(made, source={"weight": theirs}, **kinds)
                assert is_deferred(made)


# --- which part of a source is the module's: prefixes of names --------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(one, value) for name, one in net().state_dict().items()}


@pytest.mark.parametrize("prefix", ["", "model.", "trainer.state.model."])
def test_a_prefix_that_all_names_have_is_ignored(prefix: str) -> None:
    made = deferred_init(net)
    done = materialize_module(made, source={f"{prefix}{name}": one for name, one in state(2).items()})
    assert len(done.found) == 4 and made[1].weight.unique().tolist() == [2]


@pytest.mark.parametrize("names", [("actor", "actor_target", "critic"), ("ema", "model")])
def test_a_source_with_several_modules_that_fit_is_refused_and_names_them(names: tuple[str, ...]) -> None:
    made, source = deferred_init(net), {name: state(number) for number, name in enumerate(names)}
    with pytest.raises(StructureMismatchError) as caught:
        materialize_module(made, source=source)
    assert all(f"'{name}' (4 of 4)" in str(caught.value) for name in names)
    assert "Say which" in str(caught.value) and is_deferred(made[0]) and is_deferred(made[1])
    materialize_module(made, source=source[names[1]])
    assert made[0].bias.unique().tolist() == [1]


def test_the_same_names_in_a_snapshot_are_refused_and_its_view_says_which(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {"ema": net(), "model": net()}
    memstore.Snapshot.take(tmp_path / "s", values)
    with pytest.raises(StructureMismatchError, match="2 of its parts"):
        materialize_module(deferred_init(net), source=tmp_path / "s")
    made = deferred_init(net)
    materialize_module(made, source=memstore.Snapshot(tmp_path / "s").view()["model"])
    assert torch.equal(made[0].weight, values["model"][0].weight)


def test_a_module_is_found_beside_what_has_other_names() -> None:
    made = deferred_init(net)
    materialize_module(made, source={"optimizer": {"exp_avg": torch.zeros(3)}, "model": state(2)})
    assert made[0].weight.unique().tolist() == [2]


def test_names_without_a_prefix_come_before_those_with_one() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.zeros(1)), nn.ParameterDict({"scale": torch.zeros(1)})

    made = deferred_init(Outer)
    materialize_module(made, source={"scale": torch.ones(1), "inner.scale": torch.full((1,), 2.0)})
    assert made.scale.item() == 1 and made.inner["scale"].item() == 2


def test_a_deep_part_does_not_get_the_weights_of_another() -> None:
    """`weight` is a name of many modules."""
    whole = deferred_init(lambda: nn.ModuleDict({"layers": net(), "head": nn.Linear(3, 3)}))
    part: Any = whole["layers"][0]
    weights = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    source = {
        **{f"layers.0.{name}": one for name, one in weights.items()},
        **{f"head.{name}": one * 9 for name, one in weights.items()},
    }
    with pytest.raises(StructureMismatchError, match=r"'layers\.0' \(2 of 2\), 'head' \(2 of 2\).*check_fn"):
        materialize_module(part, source=source)
    with pytest.raises(StructureMismatchError, match=r"'head' \(1 of 2\)"):
        materialize_module(part, source={"head.weight": torch.ones(3, 3), "other.bias2": torch.ones(3)})
    assert is_deferred(part)
    materialize_module(whole, source=source, check_fn=lambda one: one is part)
    assert part.weight.unique().tolist() == [1] and is_deferred(whole["head"])


def test_a_mismatch_says_which_part_was_compared() -> None:
    source = {f"model.{name}": one[:2] for name, one in state(1).items()}
    with pytest.raises(StructureMismatchError, match=r"under 'model', don't fit"):
        materialize_module(deferred_init(net), source=source)


# --- lazy modules, which get their shapes from a source ---------------------------------------------------------------


def used(make: Make) -> nn.Module:
    made = make()
    made(torch.ones(2, 5, 4))
    return made


MODULES: dict[str, Make] = {
    "linear": lambda: nn.LazyLinear(3),
    "convolution": lambda: nn.LazyConv1d(3, 2),
    "with buffers": lambda: nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_lazy_module_takes_its_shapes_from_the_source(name: str) -> None:
    state = used(MODULES[name]).state_dict()
    expected, made = MODULES[name](), deferred_init(MODULES[name])
    expected.load_state_dict(state)
    done = materialize_module(made, source=state)
    assert set(done.found) == set(state)
    assert_made_as(expected, made)
    assert torch.equal(made(torch.ones(2, 5, 4)), expected(torch.ones(2, 5, 4)))


def test_a_lazy_module_that_was_looked_at_takes_them_too() -> None:
    state, made = used(MODULES["linear"]).state_dict(), deferred_init(nn.LazyLinear, 3)
    assert is_lazy(materialize_tensor(made.weight))
    materialize_module(made, source=state, dtype=torch.float64)
    assert torch.equal(made.weight, state["weight"].double()) and type(made.weight) is nn.Parameter


def test_what_the_source_has_no_shape_for_stays_lazy() -> None:
    made = deferred_init(nn.LazyLinear, 3)
    done = materialize_module(made, source={"weight": torch.ones(3, 5)})
    assert done == (("weight",), ("bias",)) and is_lazy(made.bias) and not is_lazy(made.weight)
    made = deferred_init(nn.LazyLinear, 3)
    assert materialize_module(made, source=nn.LazyLinear(3).state_dict()).found == ()
    assert is_lazy(made.weight) and not is_deferred(made)
    with pytest.raises(StructureMismatchError, match="weight: the source's is uninitialized"):
        materialize_module(deferred_init(nn.Linear, 5, 3), source=nn.LazyLinear(3).state_dict())
