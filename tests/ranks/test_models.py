"""Models of all kinds, saved by some ranks and loaded by others: whole, in place, all ranks alike or none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import (
    KeyNotFoundError,
    PartialCommitError,
    StoreTimeoutError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.ranks import models
from tests.ranks.launcher import Ranks

ALL = list(itertools.product(models.KINDS, repeat=2))
FAST = [
    ("plain", "fsdp"),
    ("ddp", "tp"),
    ("fsdp", "fsdp and tp"),
    ("fsdp and tp", "ddp"),
    ("tp", "hsdp"),
    ("hsdp", "plain"),
]


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("saved", "loaded"), [pytest.param(*pair, marks=() if pair in FAST else pytest.mark.full) for pair in ALL]
)
def test_what_one_kind_saves_another_loads(root: str, ranks4: Ranks, ranks2: Ranks, saved: str, loaded: str) -> None:
    version, expected = ranks4.run(models.save, root, saved)[0]
    with memstore.open(root) as store:
        found = store.get("run")
        check_same({name: found["model"][name] for name in models.bare().state_dict()},
                   {name: tensor for name, tensor in expected.items() if ":" not in name})  # fmt: skip
    for ranks, steps in ((ranks2, 0), (ranks4, 1)):
        for answer in ranks.run(models.load, root, loaded, steps):
            assert answer[0] == version
            check_same(answer[1], expected)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp and tp"])
def test_models_are_saved_and_loaded_in_inference_mode(root: str, ranks4: Ranks, kind: str) -> None:
    ranks4.run(models.save_and_load_in_inference_mode, root, kind)


def test_one_process_loads_what_ranks_saved(root: str, ranks4: Ranks) -> None:
    version, expected = ranks4.run(models.save, root, "fsdp and tp")[0]
    model = models.bare(3)
    optimizer = models.optimizer_of(model)
    with memstore.open(root) as store:
        assert store.load_model("run", model, optimizer) == version
    check_same(models.state_of(model, optimizer), expected)


def test_ranks_load_what_one_process_saved(root: str, ranks2: Ranks) -> None:
    model = models.bare(3)
    optimizer = models.optimizer_of(model)
    models.step(model, optimizer, 1)
    with memstore.open(root) as store:
        store.save_model("run", model, optimizer)
    for _, found in ranks2.run(models.load, root, "fsdp"):
        check_same(found, models.state_of(model, optimizer))


def test_a_cast_concerns_the_model_only(root: str, ranks4: Ranks, ranks2: Ranks) -> None:
    _, expected = ranks4.run(models.save, root, "fsdp", 0, torch.bfloat16)[0]
    with memstore.open(root) as store:
        stored = store.get("run")
    assert {leaf.dtype for leaf in stored["model"].values()} == {torch.bfloat16, torch.int64}
    states = stored["optimizer"]["state"]["2.weight"]
    assert states["exp_avg"].dtype == torch.float32 and torch.equal(states["exp_avg"], expected["2.weight: exp_avg"])
    for _, weight in ranks2.run(models.load_half, root):
        assert torch.equal(weight, expected["0.weight"].to(torch.bfloat16))


def test_stages_are_saved_and_loaded_by_other_stages(root: str, ranks4: Ranks, ranks2: Ranks) -> None:
    ranks4.run(models.save_stage, root)
    assert ranks2.run(models.load_stage, root, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks4.run(models.load_stage, root, 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_no_rank_has_a_place_for_is_told_to_all(root: str, ranks4: Ranks, ranks2: Ranks) -> None:
    ranks4.run(models.save_stage, root)
    for error in ranks2.errors(models.load_stage, root, 7):
        assert isinstance(error, StructureMismatchError), error
        lines = [line.strip() for line in str(error).splitlines() if "layers." in line]
        names = ("'layers.7.weight'", "'layers.7.bias'")
        assert lines == [*(f"model[{name}]" for name in names), *(f"optimizer: parameter {name}" for name in names)]


@pytest.mark.parametrize("unfit", [0, 2])
def test_if_it_doesnt_fit_on_one_rank_none_loads(root: str, ranks4: Ranks, unfit: int) -> None:
    with memstore.open(root) as store:
        store.save_model("run", models.Stage(0, 2))
    for error in ranks4.errors(models.load_unfit, root, unfit):
        assert isinstance(error, StructureMismatchError), error
        assert f"model['other.weight']: not stored (rank {unfit})" in str(error)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_fails_while_it_fills_is_told_to_all(root: str, ranks2: Ranks, bad: int) -> None:
    texts = ranks2.run(models.load_refusing, root, bad)
    assert texts.pop(bad) == "damaged bytes"
    assert texts[0].startswith(f"rank {bad}: damaged bytes; so the ranks don't all have it")


@pytest.mark.parametrize("gives_up", [0, 1])
def test_a_rank_whose_load_is_cancelled_is_told_to_all_and_the_next_load_is_one(
    root: str, ranks2: Ranks, gives_up: int
) -> None:
    with memstore.open(root) as store:
        store.save_model("run", models.bare(3))
    answers = ranks2.run(models.load_given_up, root, gives_up)
    assert all(is_unchanged for _, is_unchanged, _ in answers)
    assert len({version for *_, version in answers}) == 1
    texts = [text for text, *_ in answers]
    assert texts.pop(gives_up) == "cancelled"
    assert texts[0].startswith(f"rank {gives_up}: AbandonedError")


def test_groups_save_and_load_apart(root: str, ranks4: Ranks) -> None:
    assert ranks4.run(models.save_in_groups, root) == [[1.0], [0.0], [1.0], [0.0]]


def test_what_one_rank_cant_save_all_are_told(root: str, ranks2: Ranks) -> None:
    errors = ranks2.errors(models.save_with_foreign_parameter, root, 1)
    assert isinstance(errors[1], UnsupportedValueError) and isinstance(errors[0], PartialCommitError)
    assert "rank 1 failed: UnsupportedValueError: parameter 6 of the optimizer's group 0" in str(errors[0])


def test_all_ranks_are_told_that_there_is_nothing(root: str, ranks4: Ranks) -> None:
    with memstore.open(root):
        pass
    for error in ranks4.errors(models.load_with_timeout, root, 600):
        assert isinstance(error, KeyNotFoundError), error
    with memstore.open(root) as store:
        version = store.save_model("run", models.Stage(0, 2))
    for error in ranks4.errors(models.load_with_timeout, root, 0.1, version):
        assert isinstance(error, StoreTimeoutError), error
    assert ranks4.run(models.load_with_timeout, root, 600) == [version] * 4


def test_a_rank_that_doesnt_come_to_a_load_is_named(root: str, ranks4: Ranks) -> None:
    with memstore.open(root) as store:
        store.save_model("run", models.Stage(0, 2))
    ranks4.begin(models.load_with_timeout, root, 1.0, ranks=[0, 1, 3])
    for rank in (0, 1, 3):
        error: Any = ranks4.answer(rank).error
        assert isinstance(error, StoreTimeoutError), error
        assert "for rank 2, which did not come" in str(error)
    ranks4.begin(models.load_with_timeout, root, 1.0, ranks=[2])  # it learns what became of it
    assert isinstance(ranks4.answer(2).error, StoreTimeoutError)
    ranks4.run(models.load_with_timeout, root, 600)


def test_all_ranks_load_the_version_that_rank_0_took(root: str, ranks4: Ranks) -> None:
    with memstore.open(root) as store:
        version = store.put("policy", {"model": models.whole_stamped()})
    assert ranks4.run(models.load_while_others_put, root) == [(version, [1.0])] * 4


@pytest.mark.parametrize("versions", [20, pytest.param(200, marks=pytest.mark.full)])
def test_a_generator_follows_a_trainer_on_another_mesh(root: str, ranks4: Ranks, ranks2: Ranks, versions: int) -> None:
    ranks4.begin(models.publish, root, versions)
    ranks2.begin(models.follow, root, versions)
    answers = [ranks2.answer(rank) for rank in range(2)]
    published = [ranks4.answer(rank).value for rank in range(4)]
    assert [answer.error for answer in answers] == [None, None] and len(set(published)) == 1
    one, two = (answer.value for answer in answers)
    assert one == two  # no rank has loaded another version than the other
    assert all(len(stamps) == 1 for stamps in one)  # none is torn, or mixed of several
    assert one == sorted(one) and one[-1] == [float(versions)]
