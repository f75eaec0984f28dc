"""A put with `delta_of=` shares the bytes of unchanged leaves with an earlier version; nobody who reads it notices."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memstore
from memstore import contents
from memstore.engine import deadline_after, need_cluster
from memstore.engine.root import folder
from memstore.errors import CrossHostError, NotServedError, QuotaExceededError
from memstore.store import values
from tests.children import Child, Wire
from tests.crash.leftovers import left_after_gc
from tests.inside import root_of

pytestmark = pytest.mark.embedded

MIB = 1 << 20
LEAVES = 20


@pytest.fixture
def model() -> dict[str, Any]:
    """A value of 20 leaves of 256 KiB each, and some others."""
    leaves = {f"layer.{i}": torch.full((256, 256), float(i)) for i in range(LEAVES)}
    return {**leaves, "step": 0, "small": torch.ones(3), "bits": torch.ones(5, dtype=torch.bool)}


def change(model: dict[str, Any], *numbers: int) -> None:
    for number in numbers:
        model[f"layer.{number}"] = model[f"layer.{number}"] + 1000
    model["step"] += 1


def check(store: memstore.Store, model: dict[str, Any], key: str = "m", **options: Any) -> None:
    found = store.get(key, **options)
    assert list(found) == list(model) and found["step"] == model["step"]
    assert all(torch.equal(found[name], model[name]) for name in model if name != "step")


def live(store: memstore.Store) -> float:
    """In MiB."""
    return store.stats().live_bytes / MIB


def test_it_takes_what_changed(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put("m", model)
    whole = live(store)
    for step in range(4):
        change(model, 3)
        store.put("m", model, delta_of=True)
        check(store, model)
        assert live(store) < 1.1 * whole, step
    info = store.info("m")
    assert info.kind == "segment" and len(info.files) == 2 and len(info.leaves) == LEAVES + 2
    assert info.nbytes == LEAVES * 256 * 1024 + 12 + 5
    assert store.verify().ok
    store.put("m", model)  # a plain put knows nothing of it
    store.gc()
    assert live(store) < 1.02 * whole
    store.delete("m")
    assert left_after_gc(store) == []


def test_what_saves_little_is_put_whole(store: memstore.Store, model: dict[str, Any]) -> None:
    version = store.put("m", model, delta_of=True)  # there is no base
    assert len(store.info("m").files) == 1
    change(model, *range(LEAVES // 2 + 1))
    store.put("m", model, delta_of=version)
    assert len(store.info("m").files) == 1
    store.put("small", torch.ones(100))
    store.put("small", torch.ones(100), delta_of=True)
    assert store.info("small").kind == "inline"
    check(store, model)
    store.put("m", {"other": torch.ones(MIB)}, delta_of=True)
    assert len(store.info("m").files) == 1


def test_many_deltas_keep_few_files(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put("m", model)
    for step in range(2 * LEAVES):
        change(model, step % LEAVES)
        store.put("m", model, delta_of=True)
        assert len(store.info("m").files) <= 16
    check(store, model)
    assert live(store) < 11 and store.verify().ok


def test_equal_values_share_all(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put("m", model)
    before = live(store)
    store.put("m", model, delta_of=True)
    check(store, model)
    assert live(store) - before < 0.02


@pytest.mark.parametrize("make", [lambda model: model, lambda model: {"a": {"b": [model["layer.1"]]}, **model}])
def test_leaves_may_come_and_go(
    store: memstore.Store, model: dict[str, Any], make: Callable[[dict[str, Any]], Any]
) -> None:
    store.put("m", model)
    del model["layer.4"]
    model["more"] = torch.ones(MIB // 8)
    model["layer.5"] = model["layer.5"][:, :128].contiguous()
    model["layer.6"] = model["layer.6"].t()  # other strides
    model["layer.7"] = model["layer.7"].double()
    model["layer.8"] = torch.nn.Parameter(model["layer.8"])
    value = make(model)
    store.put("m", value, delta_of=True)
    assert len(store.info("m").files) == 2
    found = store.get("m")
    assert list(found) == list(value)
    for name in model:
        if name != "step":
            assert torch.equal(found[name], model[name]) and found[name].stride() == model[name].stride()
    assert isinstance(found["layer.8"], torch.nn.Parameter) and store.verify().ok


def test_tensors_that_share_memory_are_put_whole(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put("m", model)
    model["tied"] = model["layer.0"]  # the very same
    change(model, 1)
    store.put("m", model, delta_of=True)
    assert len(store.info("m").files) == 2
    found = store.get("m")
    assert found["tied"] is found["layer.0"]
    model["part"] = model["layer.2"][5:]
    store.put("m", model, delta_of=True)
    assert len(store.info("m").files) == 1
    check(store, model)


def test_nan_and_zeros_are_compared_by_their_bits(store: memstore.Store, model: dict[str, Any]) -> None:
    model["layer.0"][0, 0], model["layer.1"][0, 0] = float("nan"), 0.0
    store.put("m", model)
    model["layer.1"][0, 0] = -0.0
    store.put("m", model, delta_of=True)
    assert len(store.info("m").files) == 2
    assert torch.signbit(store.get("m")["layer.1"][0, 0]) and torch.isnan(store.get("m")["layer.0"][0, 0])


def test_casts_and_conditions_hold(store: memstore.Store, model: dict[str, Any]) -> None:
    version = store.put("m", model)
    change(model, 1)
    with pytest.raises(memstore.VersionConflictError):
        store.put("m", model, delta_of=True, expect_version=version + 1)
    store.put("m", model, delta_of=version, expect_version=version)
    store.put("m", model, delta_of=True, dtype=torch.bfloat16)
    assert store.get("m")["layer.1"].dtype == torch.bfloat16
    with pytest.raises((TypeError, ValueError)):
        store.put("m", model, delta_of="newest")  # type: ignore[arg-type]


# --- several keys -----------------------------------------------------------------------------------------------------


def test_values_put_at_one_moment_each_take_what_changed(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put_many({"a": model, "b": model, "small": 1})
    whole = live(store)
    before = dict(model)
    change(model, 3, 4)
    store.put_many({"a": model, "b": before, "small": 2, "new": torch.ones(3)}, delta_of=True)
    assert len(store.info("a").files) == len(store.info("b").files) == 2
    assert live(store) < 1.15 * whole
    check(store, model, "a")
    check(store, before, "b")
    assert store.get("small") == 2 and store.verify().ok
    with pytest.raises(TypeError, match="delta_of"):
        store.put_many({"a": model}, delta_of=3)  # type: ignore[arg-type]
    store.clear()
    assert left_after_gc(store) == []


@pytest.mark.parametrize("loses_catalog", [False, True])
def test_a_repair_brings_values_of_one_moment_back(
    store: memstore.Store, root: str, model: dict[str, Any], loses_catalog: bool
) -> None:
    store.put_many({"a": model, "b": model})
    before = dict(model)
    change(model, 3)
    store.put_many({"a": model, "b": before}, delta_of=True)
    store.close()
    if loses_catalog:
        os.remove(f"{root}/catalog/local/data.mdb")
    assert memstore.repair(root).lost == ()
    with memstore.open(root) as found:
        check(found, model, "a")
        check(found, before, "b")
        assert found.verify().ok


# --- the base goes ----------------------------------------------------------------------------------------------------


def test_kept_versions_share_and_go_by_and_by(store: memstore.Store, model: dict[str, Any]) -> None:
    models: dict[int, dict[str, Any]] = {}
    for step in range(5):
        change(model, step)
        models[store.put("m", model, history=3, delta_of=True)] = dict(model)
        assert live(store) < 7.5
        for version in store.versions("m"):
            check(store, models[version], version=version)
    first, second, _ = store.versions("m")
    change(model, 9)
    last = store.put("m", model, delta_of=second)  # not the present one
    check(store, model)
    with store.pin("m", version=last):
        store.put("m", 1, history=1)
        check(store, model, version=last)
        assert store.versions("m") == (last, last + 1) and store.verify().ok
    store.delete("m")
    assert left_after_gc(store) == []


def test_a_version_that_is_gone_is_no_base(store: memstore.Store, model: dict[str, Any]) -> None:
    version = store.put("m", model)
    store.put("m", 1)
    change(model, 1)
    store.put("m", model, delta_of=version)
    assert len(store.info("m").files) == 1
    check(store, model)


def test_a_base_that_goes_meanwhile_is_put_whole(
    store: memstore.Store, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the comparison and the commit: nobody may share a file that is no version's any more."""
    draft_delta = values.contents.draft_delta

    def slow(*arguments: Any) -> Any:
        draft = draft_delta(*arguments)
        store.delete("m")
        return draft

    monkeypatch.setattr(values.contents, "draft_delta", slow)
    store.put("m", model)
    change(model, 1)
    store.put("m", model, delta_of=True)
    assert len(store.info("m").files) == 1
    check(store, model)
    store.delete("m")
    assert left_after_gc(store) == []


def test_refs_and_views_outlive_base_and_delta(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put("m", model)
    change(model, 2)
    store.put("m", model, delta_of=True)
    ref, view = store.ref("m"), store.view("m")
    sent = pickle.dumps(store.ref("m"))
    expected = dict(model)
    for _ in range(4):
        change(model, 2, 3)
        store.put("m", model, delta_of=True)
    store.delete("m")
    store.gc()
    for found in (ref.get(), pickle.loads(sent).get()):
        assert all(torch.equal(found[name], expected[name]) for name in expected if name != "step")
    assert torch.equal(view["layer.2"][7:9], expected["layer.2"][7:9])
    assert torch.equal(view["layer.19"][:], expected["layer.19"])


def _read(wire: Wire, root: str) -> int:
    count = 0
    with memstore.open(root, "r") as store:
        wire.send()
        while not wire.has_message:
            found = store.get("m")
            step = found["step"]
            assert all(float(found[f"layer.{i}"][9, 9]) == i + 1000 * ((step + i) // LEAVES) for i in range(LEAVES))
            count += 1
    return count


def _write(wire: Wire, root: str) -> None:
    """Layer i changes in each step for which step + i is a multiple of the leaves, by 1000."""
    model: dict[str, Any] = {f"layer.{i}": torch.full((256, 256), float(i)) for i in range(LEAVES)}
    with memstore.open(root) as store:
        for step in range(60):
            for i in range(LEAVES):
                if step and (step + i) % LEAVES == 0:
                    model[f"layer.{i}"] = model[f"layer.{i}"] + 1000
            model["step"] = step
            store.put("m", model, delta_of=True)
            if not step:
                wire.send()
                wire.receive()


def test_others_read_it_while_it_is_put(store: memstore.Store) -> None:
    with Child(_write, store.root) as writer:
        writer.receive()
        with Child(_read, store.root) as reader:
            reader.receive()
            writer.send()
            writer.receive()
            reader.send()
            assert reader.receive() > 0
    assert store.verify().ok
    store.delete("m")
    assert left_after_gc(store) == []


# --- quotas, tiers, hosts, damage -------------------------------------------------------------------------------------


def test_a_quota_counts_all_files_of_a_version(store: memstore.Store, model: dict[str, Any]) -> None:
    store.set_quota("m", 9 * MIB)
    for step in range(8):
        change(model, step)
        store.put("m", model, delta_of=True)
    with pytest.raises(QuotaExceededError):
        store.put("m", {**model, "large": torch.zeros(MIB)}, delta_of=True)
    store.delete("m")
    assert store.quotas()[0].used == 0


def test_its_files_move_to_a_disk(root: str, model: dict[str, Any]) -> None:
    with memstore.open(root, capacity=8 * MIB, spill=f"{root}.spill", checksum=True) as store:
        store.put("m", model, history=2)
        change(model, 2)
        store.put("m", model, delta_of=True)
        for number in range(6):
            store.put(f"k{number}", torch.full((MIB // 4,), float(number)))
        assert store.info("m").spilled
        check(store, model)
        change(model, 3)
        store.put("m", model, delta_of=True)  # of a base on the disk
        check(store, model)
        contents.put_deltas_whole(root_of(store), deadline_after(10.0))
        assert len(store.info("m").files) == 1 and store.verify().ok
        check(store, model)
        store.clear()
        assert left_after_gc(store) == []


def test_a_store_of_several_hosts_has_none(root: str, model: dict[str, Any]) -> None:
    """What is there is put whole before others may come in; nobody puts another one then."""
    with memstore.open(root) as store, memstore.open(root) as other:
        for key in ("m", "other"):
            store.put(key, model)
        change(model, 1)
        store.put("m", model, delta_of=True)
        with pytest.raises(NotServedError, match="share files, as version 3 of 'm' does"):
            need_cluster(root_of(store), deadline_after(10.0))
        contents.put_deltas_whole(root_of(store), deadline_after(10.0))
        assert len(store.info("m").files) == 1 and store.verify().ok
        check(store, model)
        live_before = live(store)
        need_cluster(root_of(store), deadline_after(10.0))
        change(model, 2)
        other.put("m", model, delta_of=True)
        other.put_many({"m": model, "other": model}, delta_of=True)
        assert len(other.info("m").files) == len(other.info("other").files) == 1
        check(store, model)
        assert live(store) == live_before and store.verify().ok
        with pytest.raises(CrossHostError):
            folder.add_feature(root, root_of(store).settings, folder.DELTAS)


def test_a_kept_version_that_shares_files_can_not_be_served(store: memstore.Store, model: dict[str, Any]) -> None:
    store.put("m", model, history=2)
    change(model, 1)
    version = store.put("m", model, delta_of=True)
    contents.put_deltas_whole(root_of(store), deadline_after(10.0))
    with pytest.raises(NotServedError, match=f"version {version} of 'm'"):
        need_cluster(root_of(store), deadline_after(10.0))


@pytest.mark.parametrize("loses_catalog", [False, True])
def test_a_repair_keeps_it_with_the_files_that_it_shares(
    store: memstore.Store, root: str, model: dict[str, Any], loses_catalog: bool
) -> None:
    store.put("m", model, history=2)
    for step in range(3):
        change(model, step)
        store.put("m", model, delta_of=True)
    store.close()
    if loses_catalog:
        os.remove(f"{root}/catalog/local/data.mdb")
    assert memstore.repair(root).lost == ()
    with memstore.open(root) as found:
        check(found, model)
        assert found.verify().ok and len(found.versions("m")) == (1 if loses_catalog else 2)
        change(model, 7)
        found.put("m", model, delta_of=True)
        check(found, model)
        found.delete("m")
        assert left_after_gc(found) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_repair_brings_no_earlier_version_back(scratch: str, model: dict[str, Any], which: int) -> None:
    """Where one of its files is lost, the key is lost, and told."""
    with memstore.open(scratch) as store:
        store.put("m", model)
        change(model, 1)
        store.put("m", model, delta_of=True)
        path = store.info("m").files[which]
    os.remove(path)
    assert memstore.repair(scratch).lost == ("m",)
    with memstore.open(scratch) as store:
        assert "m" not in store
