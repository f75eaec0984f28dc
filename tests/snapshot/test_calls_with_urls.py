"""Every call that takes the path of a snapshot takes a URL, or says that it doesn't; none makes a folder "s3:"."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import memstore
from memstore import CheckpointManager, Snapshot, StateDict
from memstore.cli.commands import cli
from memstore.convert import convert
from memstore.deferred_init import deferred_init, materialize_module
from memstore.errors import AlreadyExistsError, CorruptionError, NoSnapshotError
from memstore.snapshot.buckets import open_bucket, parse_url
from memstore.snapshot.objects import ObjectStorage
from tests.documents.pages import snippets
from tests.ranks.launcher import Ranks
from tests.support.equality import assert_same

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.usefixtures("s3_environment")


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def taken(url: str, s3_environment: None) -> dict[str, Any]:
    app_state: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "progress": StateDict(step=7)}
    Snapshot.take(url, app_state)
    return app_state


@pytest.mark.usefixtures("taken")
def test_commands_take_urls(url: str) -> None:
    assert run("snapshot", "info", url)["world_size"] == 1
    assert set(run("snapshot", "ls", url)) == {"0/model/weight", "0/model/bias", "0/progress/step"}
    assert run("snapshot", "verify", url) == {"ok": True, "compared": True}
    Snapshot.take(url + "b", {"model": torch.nn.Linear(3, 2), "progress": StateDict(step=8)})
    assert run("snapshot", "diff", url, url) == []
    assert len(run("snapshot", "diff", url, url + "b", code=1)) == 3
    ObjectStorage(url).publish("memstore_snapshot.0123456789abcdef.claim", b"", durable=True)
    assert run("snapshot", "prune", url)["kept"] == 1
    assert run("snapshot", "prune", url, "--older-than", "0")["objects"] == 1
    assert run("snapshot", "verify", url)["ok"]


def test_a_copy_comes_from_a_url_and_goes_to_one(url: str, taken: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "copied")
    for source, target in ((url, folder), (folder, url + "b"), (url + "b", url + "c")):
        run("snapshot", "copy", source, target)
        assert run("snapshot", "diff", url, target) == []
        assert run("snapshot", "verify", target)["ok"]
    assert torch.equal(Snapshot(url + "c").read_object("0/model/weight"), taken["model"].weight)
    result = CliRunner().invoke(cli, ["snapshot", "copy", folder, url + "b"])
    assert isinstance(result.exception, AlreadyExistsError)
    assert url + "b" in str(result.exception)


def test_prune_is_for_urls(root: str) -> None:
    result = CliRunner().invoke(cli, ["snapshot", "prune", root])
    assert result.exit_code == 2
    assert "say a URL" in result.output


def test_the_command_for_steps_takes_urls(url: str) -> None:
    with CheckpointManager(url, keep_last=None, async_=False) as manager:
        for step in (1, 2):
            manager.save(step, {"progress": StateDict(step=step)})
    assert [one["step"] for one in run("checkpoints", url)] == [1, 2]
    assert run("checkpoints", url, "--prune", "--keep-last", "1", "--yes")["removed"] == [f"{url}/step-000001"]
    assert manager.steps() == [2]


def test_conversions_come_from_urls_and_go_there(url: str, taken: dict[str, Any], tmp_path: Path) -> None:
    weight = taken["model"].weight
    done = convert(url, tmp_path / "folder")
    assert (done.source, done.source_format, done.target_format) == (url, "snapshot", "snapshot")
    Snapshot(str(tmp_path / "folder")).verify()
    done = convert(tmp_path / "folder", url + "b")
    assert done.target == url + "b"
    Snapshot(url + "b").verify()
    assert torch.equal(Snapshot(url + "b").read_object("0/model/weight"), weight)
    with pytest.raises(AlreadyExistsError):
        convert(tmp_path / "folder", url + "b")
    with pytest.raises(ValueError, match="in a bucket lie snapshots"):
        convert(tmp_path / "folder", url + "c", target_as="torch")
    assert run("convert", url, str(tmp_path / "model.pt"))["tensors"] == 2


def test_checkpoints_of_others_are_converted_from_a_bucket(url: str, tmp_path: Path) -> None:
    """torchsnapshot's, as its S3 plugin puts them: an object for each file, under the path."""
    with tarfile.open(Path(__file__).parent.parent / "convert" / "torchsnapshot-0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    place = parse_url(url)
    bucket = open_bucket(place)
    folder = tmp_path / "one"
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(f"{place.key}/{path.relative_to(folder)}", path.read_bytes())
    convert(folder, tmp_path / "direct.pt", allow_pickle=True)
    done = convert(url, tmp_path / "fetched.pt", allow_pickle=True)
    assert (done.source, done.source_format) == (url, "torchsnapshot")
    direct, fetched = (torch.load(tmp_path / name, weights_only=False) for name in ("direct.pt", "fetched.pt"))
    assert_same(direct, fetched)
    assert convert(url, url + "-as-snapshot", allow_pickle=True).target_format == "snapshot"
    with pytest.raises(NoSnapshotError):
        convert(url + "-nothing", tmp_path / "nothing.pt")
    bucket.put(f"{place.key}-bad/.snapshot_metadata", b"{}")
    bucket.put(f"{place.key}-bad/0/a", b"x")
    with pytest.raises(CorruptionError):
        convert(url + "-bad", tmp_path / "bad.pt")


def test_a_deferred_module_comes_from_a_url(url: str, taken: dict[str, Any]) -> None:
    for source in (url, Snapshot(url)):
        module = deferred_init(torch.nn.Linear, 3, 2)
        materialize_module(module, source=source)
        assert torch.equal(module.weight, taken["model"].weight)
        with torch.no_grad():
            module.weight.zero_()
    assert Snapshot(url).read_object("0/model/weight").any()


def test_a_store_gets_a_copy(url: str, taken: dict[str, Any], store: memstore.Store) -> None:
    store.put("view", Snapshot(url).view())
    assert torch.equal(store.get("view")["model"]["weight"], taken["model"].weight)
    run("put", store.root, "copy", url)
    assert torch.equal(store.get("copy")["model"]["weight"], taken["model"].weight)


def _deferred(run: str) -> dict[str, Any]:
    Snapshot.take(f"{run}/step-7", {"model": torch.nn.Linear(3, 2)})
    return {"fresh": deferred_init(torch.nn.Linear, 3, 2), "materialize_module": materialize_module}


def _dcp(_: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

    given = [LoadPlanner, SavePlanner, StorageReader, StorageWriter]
    return {"torch_dcp": dcp, "dcp": dcp, "state": {"w": torch.ones(9)}, **{one.__name__: one for one in given}}


def _saved_file(_: str) -> dict[str, Any]:
    torch.save(torch.nn.Linear(3, 2).state_dict(), "model.pt")
    return {}


def _run(run: str) -> dict[str, Any]:
    with CheckpointManager(run, async_=False) as manager:
        manager.save(100, {"progress": StateDict(step=100)})
    return {}


BEFORE: dict[str, Callable[[str], dict[str, Any]]] = {  # what a page has made before its snippet with a bucket
    "docs/coming-from/torchsnapshot.md": lambda _: {},
    "docs/coming-from/dcp.md": _dcp,
    "docs/dcp.md": _dcp,
    "docs/deferred-init.md": _deferred,
    "docs/convert.md": _saved_file,
    "docs/command-line.md": _run,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("page", BEFORE)
def test_what_pages_do_in_a_bucket_runs(page: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of all other snippets have no server."""
    monkeypatch.chdir(tmp_path)
    names = BEFORE[page](url)
    found = [one for one in snippets(ROOT / page) if one.not_run == "it needs a bucket"]
    assert found
    for one in found:
        code = one.code.replace("s3://bucket/run", url)
        if one.language == "python":
            exec(compile(code, one.place, "exec"), names)
            continue
        for line in code.splitlines():
            result = CliRunner().invoke(cli, shlex.split(line, comments=True)[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)


def _take_and_restore(url: str, options: dict[str, Any]) -> Any:
    rank = dist.get_rank()
    both = torch.arange(6.0)
    given: dict[str, Any] = {"storage_options": options, "replicated": ["state/both"]}
    Snapshot.take(url, {"state": StateDict(rank=rank, both=both)}, **given)
    Snapshot.async_take(url + "b", {"state": StateDict(rank=rank, both=both)}, **given).wait(60.0)
    found: list[Any] = []
    for place in (url, url + "b"):
        state = StateDict(rank=-1, both=torch.zeros(6))
        Snapshot(place, storage_options=options).restore({"state": state})
        found.append((state["rank"], torch.equal(state["both"], both)))
    return found


def test_several_ranks_take_and_restore(ranks2: Ranks, url: str, s3_options: dict[str, Any]) -> None:
    assert ranks2.run(_take_and_restore, url, s3_options) == [[(0, True)] * 2, [(1, True)] * 2]
    Snapshot(url).verify()
    names = ObjectStorage(url).names()
    assert not [name for name in names if "claim" in name or "part" in name]


def _take_in_memory() -> str:
    try:
        Snapshot.take("memory://x/y", {"state": StateDict(x=1)})
    except (ValueError, memstore.MemstoreError) as error:  # of this rank, or of rank 0
        return str(error)
    return ""


def test_memory_is_of_one_rank(ranks2: Ranks) -> None:
    assert all("memory of one process" in found for found in ranks2.run(_take_in_memory))


@pytest.mark.full
def test_the_example_trains_into_a_bucket(url: str) -> None:
    if find_spec("sklearn") is None:
        pytest.skip("sklearn: not installed; make demo installs it")
    command = [sys.executable, "examples/train_and_resume.py", "--steps", "20", "--to", url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same") == 3
    assert "newest checkpoint is of step" in done.stdout


REFUSALS: dict[str, Callable[[Any, str], Any]] = {
    "attach": lambda store, url: store.attach("k", url),
    "attach a path": lambda store, url: store.attach("k", Path(url)),
    "export": lambda store, url: store.export("x", url),
    "open": lambda store, url: memstore.open(url),
    "take of a path": lambda store, url: Snapshot.take(Path(url), {}),
    "manager of a path": lambda store, url: CheckpointManager(Path(url)),
    "convert a path": lambda store, url: convert(Path(url), "/nowhere/x"),
    "convert to torch": lambda store, url: convert("/dev/shm", url, target_as="torch"),
    "other storage": lambda store, url: Snapshot.take(url.replace("s3", "hdfs"), {}),
    "other storage, manager": lambda store, url: CheckpointManager(url.replace("s3", "http")),
    "other storage, convert": lambda store, url: convert(url.replace("s3", "hdfs"), "/nowhere/x"),
}


@pytest.mark.parametrize("call", REFUSALS)
def test_other_calls_refuse_urls_in_words(
    call: str, url: str, store: memstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store.put("x", {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"URL|storage|bucket|folder of this host"):
        REFUSALS[call](store, url)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_of_memory_a_disk_and_a_bucket_the_first_that_is_left_is_restored(
    asynchronous: bool, url: str, root: str, tmp_path: Path
) -> None:
    app_state: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "progress": StateDict(step=7)}
    memory, tiers = f"{root}-memory", [str(tmp_path / "disk"), url]
    if asynchronous:
        pending = Snapshot.async_take(memory, app_state, then=tiers)
        snapshot = pending.wait(60.0)
        assert [(tier.path, tier.state) for tier in pending.status()] == [
            (place, "whole") for place in (memory, *tiers)
        ]
    else:
        snapshot = Snapshot.take(memory, app_state, then=tiers)
    assert (snapshot.path, list(snapshot.then)) == (memory, tiers)
    for place in (memory, *tiers):
        Snapshot(place).verify()
        found: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "progress": StateDict(step=0)}
        again = Snapshot(memory, then=tiers)
        again.restore(found)
        assert again._open().path == place
        assert found["progress"]["step"] == 7
        assert torch.equal(found["model"].weight, app_state["model"].weight)
        if place != url:
            shutil.rmtree(place)


def test_tiers_end_in_a_bucket_and_copies_go_there(url: str, root: str) -> None:
    app_state: dict[str, Any] = {"model": torch.nn.Linear(3, 2)}
    for take in (Snapshot.take, lambda *given, **more: Snapshot.async_take(*given, **more).wait(60.0)):
        url += "a"
        snapshot = take(f"{root}{url[-3:]}", app_state, then=[url])
        for one in (snapshot, Snapshot(url), Snapshot(f"{root}-nowhere", then=[url])):
            assert torch.equal(one.read_object("0/model/weight"), app_state["model"].weight)
    Snapshot(url).copy(f"{root}-copy").verify()
    copied = Snapshot(f"{root}-copy").copy(url + "copy")
    assert copied.path == url + "copy"
    copied.verify()
    with CheckpointManager(f"{root}-run", then=[url + "run"], async_=False) as manager:
        manager.save(1, app_state)
        manager.save(2, app_state)
    assert CheckpointManager(url + "run").steps() == [1, 2]
    assert CheckpointManager(f"{root}-empty", then=[url + "run"]).restore(app_state) == 2
