"""One process with a manager: what it saves, keeps, finds again, and refuses."""

from __future__ import annotations

import math
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import memstore
from memstore import CheckpointManager, Snapshot, StateDict
from memstore.checkpoints.folders import StepFolders
from memstore.errors import NoSnapshotError
from tests.checkpoints.states import MANIFEST, check_all, folders, save, state, step_in, whole
from tests.children import in_child
from tests.support.equality import assert_same

BACKENDS = pytest.mark.parametrize("backend", ["snapshot", "dcp"])


def plain(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"async_": False, **options})


@BACKENDS
@pytest.mark.parametrize("async_", [False, True])
def test_steps_are_kept_by_the_rules_and_found_by_another_process(root: str, backend: Any, async_: bool) -> None:
    rules: dict[str, Any] = {"keep_last": 2, "keep_every": 40, "keep_best": 1, "best": "min", "backend": backend}
    with CheckpointManager(root, save_every=10, async_=async_, **rules) as manager:
        for step in range(1, 71):
            due = manager.save(step, state(step), {"loss": abs(step - 22)})
            assert due == (step % 10 == 0)
    assert folders(root) == ["step-000020", "step-000040", "step-000060", "step-000070"]
    for found in (manager, CheckpointManager(root, best="min")):
        assert (found.steps(), found.latest(), found.best()) == ([20, 40, 60, 70], 70, 20)
    assert in_child(lambda: step_in(CheckpointManager(root))) == 70  # a manager of the other backend reads it, too
    assert step_in(CheckpointManager(root), 40) == 40


def test_a_root_without_steps(root: str) -> None:
    manager = CheckpointManager(root)
    assert (manager.steps(), manager.latest(), manager.best()) == ([], None, None)
    assert not os.path.exists(root)  # nothing is made by looking
    with pytest.raises(NoSnapshotError, match="no whole checkpoint") as caught:
        manager.restore(state())
    assert isinstance(caught.value, FileNotFoundError)
    save(plain(root), 5)
    with pytest.raises(NoSnapshotError, match=r"no checkpoint of step 7; it has 5"):
        manager.restore(state(), 7)


def test_a_run_that_goes_back_continues_from_its_own_steps(root: str) -> None:
    manager = plain(root)
    for step in (80, 90, 100):
        save(manager, step)
    again = plain(root, keep_last=3)
    assert step_in(again, 80) == 80
    save(again, 85)
    assert again.latest() == 85 and again.steps() == [85, 90, 100]
    save(again, 90)
    assert again.latest() == 90 and again.steps() == [85, 90, 100]
    assert step_in(plain(root)) == 90
    save(again, 95)
    assert again.steps() == [85, 90, 95]


def test_a_run_that_begins_anew_over_another_ones_steps_is_warned(root: str) -> None:
    first = plain(root)
    save(first, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(first, 50)  # it knows what it does
        again = plain(root)
        again.restore(state())
        save(again, 50)
        save(plain(f"{root}-other"), 10)
    with pytest.warns(RuntimeWarning, match="restored none"):
        save(plain(root), 10)


@BACKENDS
def test_the_same_step_again_takes_the_place_of_the_earlier_one(root: str, backend: Any) -> None:
    manager = plain(root, backend=backend)
    save(manager, 7)
    assert manager.save(7, state(77))
    assert folders(root) == ["step-000007.2"] and manager.steps() == [7]
    objects = state()
    assert manager.restore(objects) == 7 and objects["progress"]["step"] == 77
    save(manager, 7)
    assert folders(root) == ["step-000007"] and step_in(manager) == 7


@BACKENDS
@pytest.mark.parametrize("kind", ["view", "snapshot"])
def test_a_step_that_is_being_read_stays_until_it_is_not(root: str, backend: Any, kind: str) -> None:
    manager = plain(root, keep_last=1, backend=backend)
    save(manager, 1)
    snapshot = Snapshot(f"{root}/step-000001")
    held: Any = snapshot.view() if kind == "view" else snapshot
    if backend == "dcp" or kind == "snapshot":
        snapshot.get_manifest()
    if kind == "view":
        del snapshot
    for step in (2, 3):
        save(manager, step)
        assert folders(root) == ["step-000001", f"step-{step:06}"]
    held = snapshot = None  # noqa: F841
    save(manager, 4)
    assert folders(root) == ["step-000004"]


def test_a_reference_that_another_process_got_keeps_the_step(root: str) -> None:
    manager = plain(root, keep_last=1)
    save(manager, 1)
    sent = pickle.dumps(Snapshot(f"{root}/step-000001").view()["model"]["weight"])
    leaf = pickle.loads(sent)
    save(manager, 2)
    assert folders(root) == ["step-000001", "step-000002"] and leaf[0, 0].item() == 1
    del leaf
    save(manager, 3)
    assert folders(root) == ["step-000003"]


def test_a_step_of_which_a_process_died_that_read_it_goes(root: str) -> None:
    manager = plain(root, keep_last=1)
    save(manager, 1)

    def die() -> None:
        held = Snapshot(f"{root}/step-000001").view()
        os._exit(len(held) and 9)

    with pytest.raises(RuntimeError, match="exit code 9"):
        in_child(die)
    save(manager, 2)
    assert folders(root) == ["step-000002"]


def test_metrics_are_stored_as_they_are(root: str) -> None:
    manager = plain(root, keep_last=None, metric="loss", best="min")
    save(manager, 1, {"loss": torch.tensor(0.5), "n": 3})
    save(manager, 2, {"loss": math.nan})
    save(manager, 3, {"loss": math.inf})
    save(manager, 4, {"other": -1.0})
    save(manager, 5)
    assert manager.best() == 1
    save(manager, 6, {"loss": -math.inf})
    assert CheckpointManager(root, metric="loss", best="min").best() == 6
    assert CheckpointManager(root, metric="loss").best() == 3
    assert CheckpointManager(root, metric="nothing").best() is None
    assert manager.steps() == [1, 2, 3, 4, 5, 6]
    for wrong in ([1.0], {"loss": "0.5"}, {"loss": torch.ones(2)}, {1: 2.0}, {"loss": None}):
        with pytest.raises(TypeError, match="metrics"):
            manager.save(7, state(7), wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keep_last": 0}, "keep_last is 1 or more"),
        ({"keep_every": -1}, "keep_every is 1 or more"),
        ({"save_every": 2.5}, "save_every is a whole number"),
        ({"best": "largest"}, "best is 'max' or 'min'"),
        ({"backend": "orbax"}, "backend is 'snapshot' or 'dcp'"),
        ({"async_": "yes"}, "async_ is True or False"),
        ({"metric": 3}, "metric is the name"),
    ],
)
def test_arguments_that_cannot_be_meant(root: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        CheckpointManager(root, **options)


def test_calls_that_cannot_be_meant(root: str) -> None:
    with pytest.raises(ValueError, match="no storage 'hdfs'"):
        CheckpointManager("hdfs://bucket/run")
    memstore.open(f"{root}-store").close()
    with pytest.raises(memstore.AlreadyExistsError, match="is a store"):
        save(plain(f"{root}-store"), 1)
    with pytest.raises(memstore.NotAStoreError, match="is a file"):
        plain("/dev/null").latest()
    manager = plain(root, save_every=10)
    for step in (-1, 1.5, True, 10**15):
        with pytest.raises((TypeError, ValueError), match="step is"):
            manager.save(step, state())
    assert not manager.save(5, state(5)) and manager.save(5, state(5), force=True)
    with pytest.raises(TypeError, match="no state_dict"):
        manager.save(10, {"x": 3})
    assert folders(root) == ["step-000005"]  # what failed leaves nothing
    manager.close()
    manager.close()
    with pytest.raises(memstore.StoreClosedError, match="another manager"):
        manager.save(20, state(20))
    assert step_in(manager) == 5 and "closed" in repr(manager)


class Failed:
    def __init__(self, pending: Any) -> None:
        self.pending = pending

    def wait(self, timeout: float | None = None) -> None:
        self.pending.wait()
        raise OSError("injected")

    def done(self) -> bool:
        return True


def fail_in_the_background(manager: CheckpointManager) -> None:
    running = manager._running
    assert running is not None
    manager._running = running._replace(pending=Failed(running.pending))


def test_what_fails_in_the_background_is_raised_by_the_next_save(root: str) -> None:
    manager = CheckpointManager(root, save_every=10)
    manager.save(10, state(10))
    manager.wait()
    manager.save(20, state(20))
    fail_in_the_background(manager)
    assert not manager.save(21, state(21))
    with pytest.raises(OSError, match="injected"):
        manager.save(30, state(30))
    save(manager, 40)
    manager.close()
    assert 40 in manager.steps() and 30 not in manager.steps()


def test_the_error_of_a_block_is_not_hidden_by_that_of_a_save(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="mine"), CheckpointManager(root) as manager:
        manager.save(1, state(1))
        fail_in_the_background(manager)
        raise KeyError("mine")
    assert "injected" in caplog.text


# --- another manager saves in the middle of a call -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["_look", "hold"])
def test_a_look_or_a_choice_in_whose_middle_another_step_takes_the_place_of_the_last(
    root: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = plain(root, keep_last=1)
    save(other, 1)
    real, calls = getattr(StepFolders, method), 0

    def in_the_middle(storage: StepFolders, name: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            in_child(lambda: save(other, 2))
        return real(storage, name)

    monkeypatch.setattr(StepFolders, method, in_the_middle)
    manager = CheckpointManager(root)
    if method == "_look":
        assert manager.steps() == [2]  # and never none
    assert step_in(manager) == 2 and calls > 1


def test_a_look_in_whose_middle_a_step_becomes_whole_and_the_one_before_is_being_removed(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = plain(root)
    save(other, 20)
    claimed = StepFolders(root).claim(10, {}, None, "snapshot")  # a run that has gone back
    real = StepFolders._look
    looked: list[str] = []

    def in_the_middle(storage: StepFolders, name: str) -> Any:
        found = real(storage, name)
        looked.append(name)
        if looked == ["step-000010"]:
            Snapshot.take(f"{root}/step-000010", state(10))
            os.remove(f"{root}/step-000020/{MANIFEST}")  # the folder is there still
        return found

    monkeypatch.setattr(StepFolders, "_look", in_the_middle)
    assert CheckpointManager(root).latest() == 10
    claimed.held.close()


# --- folders of others -----------------------------------------------------------------------------------------------


def torchs(path: str, step: int, *, flat: bool = False) -> None:
    """Saves with torch's own writer, as torchtitan does: a model's tensors stand without its name."""
    objects = state(step)
    model = objects["model"].state_dict()
    told = {"progress": objects["progress"].state_dict()}
    torch_dcp.save(told | (model if flat else {"model": model}), checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore")
def test_torchtitans_and_orbaxs_folders_are_found_restored_and_left_alone(root: str) -> None:
    os.mkdir(root)
    torchs(f"{root}/step-100", 100, flat=True)
    torchs(f"{root}/200", 200)
    Snapshot.take(f"{root}/step-000300", state(300))
    os.makedirs(f"{root}/400/state")
    open(f"{root}/400/_CHECKPOINT_METADATA", "w").close()  # Orbax's own format
    os.mkdir(f"{root}/2024")
    os.mkdir(f"{root}/step-500")  # torchtitan is about to write there
    os.symlink(f"{root}/200", f"{root}/newest")
    manager = plain(root, keep_last=1, storage_options={"allow_pickle": True})
    assert manager.steps() == [100, 200, 300] and manager.latest() == 300
    assert [step_in(manager, step) for step in (100, 200, 300)] == [100, 200, 300]
    with pytest.raises(memstore.UnsupportedValueError, match="memstore convert"):
        plain(root).restore(state(), 100)
    before = folders(root)
    save(manager, 300)
    save(manager, 301)
    assert folders(root) == sorted([*before, "step-000301"])
    assert manager.latest() == 301 and manager.steps() == [100, 200, 300, 301]


def test_a_record_that_is_damaged_is_none(root: str) -> None:
    manager = plain(root, keep_last=1)
    save(manager, 1)
    with open(f"{root}/step-000001/memstore_checkpoint.json", "r+b") as file:
        file.write(b"x")
    manager = plain(root, keep_last=1)
    save(manager, 2)
    save(manager, 3)
    assert manager.steps() == [1, 3]  # nobody knows whose it is
    assert step_in(manager, 1) == 1


def test_a_folder_that_is_a_link_is_not_removed(root: str) -> None:
    manager = plain(root, keep_last=1)
    save(manager, 1)
    os.rename(f"{root}/step-000001", f"{root}-elsewhere")
    os.symlink(f"{root}-elsewhere", f"{root}/step-000001")
    save(manager, 2)
    assert os.path.exists(f"{root}-elsewhere/{MANIFEST}") and manager.steps() == [1, 2]


def test_files_that_a_user_adds_go_with_their_step(root: str) -> None:
    manager = plain(root, keep_last=1)
    save(manager, 1)
    os.makedirs(f"{root}/step-000001/tokenizer/deep")
    open(f"{root}/step-000001/config.json", "w").close()
    save(manager, 2)
    assert folders(root) == ["step-000002"]


# --- all of a training's state ---------------------------------------------------------------------------------------


class Drawing(StateDict):
    """Draws random numbers when it is restored: so the random state comes last."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        super().load_state_dict(state_dict)
        torch.rand(7)


@BACKENDS
def test_a_training_continues_bit_for_bit(root: str, backend: Any) -> None:
    def objects() -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        named: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
        return {**named, "random": memstore.RNGState(), "progress": Drawing(step=0)}

    def train(app_state: dict[str, Any], until: int, manager: CheckpointManager | None) -> Any:
        for step in range(app_state["progress"]["step"] + 1, until + 1):
            app_state["optimizer"].zero_grad()
            app_state["model"](torch.randn(4, 8)).square().mean().backward()
            app_state["optimizer"].step()
            app_state["schedule"].step()
            app_state["progress"]["step"] = step
            if manager is not None:
                manager.save(step, app_state)
        return app_state["model"].state_dict()

    expected = train(objects(), 6, None)
    with CheckpointManager(root, backend=backend) as manager:
        train(objects(), 3, manager)
    resumed = objects()
    torch.manual_seed(99)
    assert manager.restore(resumed) == 3
    assert_same(train(resumed, 6, None), expected)


def test_checks_of_this_file_can_fail(root: str) -> None:
    save(plain(root), 1)
    check_all(root)
    assert whole(root) == {"step-000001"}
    with open(f"{root}/step-000001/model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with pytest.raises(memstore.CorruptionError):
        check_all(root)
