"""Values and keys: `memstore get`, `put`, `diff`; and what is said where a key can't be found, or can't be copied."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tensordict import TensorDict

import memstore
from tests.children import in_child
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import COMMAND, call, call_json, run


class Ours:
    """What only pickle can store. To read it would run this."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["MEMSTORE_TEST_CANARY"],)


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root) as store:
        w = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
        store.put("policy", {"layer": {"w": w, "b": torch.tensor([0, float("nan"), float("inf"), -3])}, "step": 7})
        store.put("bare", torch.arange(1000))
    yield root


def test_a_value_is_shown_leaf_by_leaf(filled: str) -> None:
    lines = call("get", filled, "policy").splitlines()
    assert lines[0].startswith("policy  dict of 2 leaves and 1 object, version 1, ")
    assert lines[1].split() == ["leaf", "content", "min", "mean", "max", "NaN", "inf"]
    assert lines[2].split() == ["layer/w", "float32", "[64,", "64]", "-1", lines[2].split()[5], "1", "0", "0"]
    assert lines[3].split()[3:] == ["-3", "-1.5", "0", "1", "1"]
    assert lines[4] == "step     7"
    assert len(call("get", filled, "policy", "layer").splitlines()) == 4


@pytest.mark.parametrize("leaf", ["layer/w", "layer.w"])
def test_a_leaf_is_shown_with_head_statistics_and_histogram(filled: str, leaf: str) -> None:
    lines = call("get", filled, "policy", leaf).splitlines()
    assert lines[0].startswith("policy layer/w  float32 [64, 64], 16.0 KiB, version 1")
    assert lines[1].startswith("[[-1. ") and "..." in lines[4]
    assert "min -1  mean" in "\n".join(lines) and "4,096 elements: 0 zero, 0 NaN, 0 infinite" in lines
    bars = [line for line in lines if "█" in line]
    assert len(bars) == 10 and bars[0].strip().startswith("-1 … -0.8  ") and bars[-1].strip().startswith("0.8 … 1 ")


def test_json_has_statistics_and_histogram(filled: str) -> None:
    found = call_json("get", filled, "policy", "layer/b")
    (leaf,) = found["leaves"]
    assert (leaf["name"], leaf["dtype"], leaf["shape"]) == (["layer", "b"], "float32", [4])
    assert leaf["statistics"] == {
        "count": 4,
        "minimum": -3.0,
        "mean": -1.5,
        "maximum": 0.0,
        "deviation": 1.5,
        "zeros": 1,
        "nans": 1,
        "infinities": 1,
    }
    assert sum(one["count"] for one in leaf["histogram"]) == 2
    assert call_json("get", filled, "policy")["objects"] == [{"name": ["step"], "value": "7"}]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nothing",), 4, "no key 'nothing'"),
        (("policy", "layer/x"), 4, "'policy' has no leaf 'layer/x': it has 'layer/w', 'layer/b', 'step'"),
        (("bare", "x"), 4, "its value is a single leaf"),
        (("policy", "-o", "x.txt"), 2, "-o writes .npy, .pt, .pth, .safetensors"),
        (("policy", "-o", "x.npy"), 3, "has 2 leaves and 1 object (layer/w, layer/b, step"),
        (("policy", "step", "-o", "x.npy"), 3, "'step' of 'policy' is no tensor, and this file takes one: without"),
        (("policy", "layer", "-o", "x.npy"), 3, "has 2 leaves (layer/w, layer/b), and this file takes a single tensor"),
        (("policy", "-o", "x.safetensors"), 3, "safetensors has nothing for it; write a .pt file"),
        (("policy", "--bins", "0"), 2, "--bins"),
    ],
)
def test_what_is_not_there_is_named(filled: str, arguments: tuple[str, ...], code: int, says: str) -> None:
    assert says in " ".join(call("get", filled, *arguments, code=code).split())
    assert not os.path.exists("x.npy")


@pytest.mark.parametrize(
    ("key", "leaf", "shape"),
    [
        ("dotted", "a.b", [2]),
        ("dotted", "a/b", [4]),
        ("dotted", "a", [3]),
        ("nested", "a.b", [3]),
        ("nested", "a/b", [3]),
        ("nested", "value", [5]),
        ("bare", "value", [1]),
    ],
)
def test_a_leaf_that_another_could_be_taken_for_is_the_one_of_this_very_name(
    root: str, tmp_path: Path, key: str, leaf: str, shape: list[int]
) -> None:
    with memstore.open(root) as store:
        store.put("dotted", {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}, "a/b": torch.ones(4)})
        store.put("nested", {"a": {"b": torch.ones(3)}, "value": torch.ones(5)})
        store.put("bare", torch.ones(1))
    (found,) = call_json("get", root, key, leaf)["leaves"]
    assert found["shape"] == shape
    call("get", root, key, leaf, "-o", str(tmp_path / "x.npy"))
    assert list(np.load(tmp_path / "x.npy").shape) == shape


def test_of_many_leaves_those_with_names_like_it_are_named(root: str) -> None:
    with memstore.open(root) as store:
        store.put("many", {f"layer{i}": {"weight": torch.ones(1)} for i in range(20)})
    said = " ".join(call("get", root, "many", "layer15/wieght", code=4).split())
    assert said.startswith("memstore: 'many' has no leaf 'layer15/wieght': did you mean 'layer15/weight'")


def test_other_kinds_of_values(root: str) -> None:
    with memstore.open(root) as store:
        store.put("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        store.put("sparse", torch.eye(3).to_sparse())
        store.put("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        store.put("float8", torch.ones(70, dtype=torch.float8_e4m3fn))
        store.put("bfloat16", torch.full((2, 3, 4), 0.5, dtype=torch.bfloat16))
        store.put("complex", torch.tensor([3 + 4j]))
        store.put("bool", torch.tensor([True, False, True]))
        store.put("empty", torch.empty(0, 3))
        store.put("scalar", torch.tensor(2.5))
        store.put("object", ["text", 3])
        store.put("td", TensorDict({"x": torch.ones(3)}, [3]))
    assert "values   float32 [5]" in call("get", root, "jagged")
    assert "indices" in call("get", root, "sparse") and "values" in call("get", root, "sparse")
    assert "int8 [3]" in call("get", root, "quantized")
    assert "min 1  mean 1  max 1  std 0" in call("get", root, "float8")
    shown = call("get", root, "bfloat16")
    assert "[0, :, :]" in shown and "[0.5 0.5 0.5 0.5]" in shown
    assert "magnitudes: min 5" in call("get", root, "complex") and "3.+4.j" in call("get", root, "complex")
    lines = call("get", root, "bool").splitlines()
    assert lines[2] == "3 elements: 2 True, 1 False" and lines[3].startswith("False  1") and "True  2" in lines[4]
    assert call("get", root, "empty").splitlines()[1:] == ["0 elements"]
    assert "2.5" in call("get", root, "scalar").splitlines()[1]
    assert call("get", root, "object").splitlines()[1:] == ["0  'text'", "1  3"]
    assert "x" in call("get", root, "td", "x")


def test_datasets_buffers_and_sharded_entries(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("frames", {"x": ((2,), torch.float32)}, capacity=100)
        data.extend({"x": torch.ones(5, 2)})
        buffer = memstore.ReplayBuffer(store, "ring", {"y": ((), torch.int64)}, capacity=8)
        buffer.extend({"y": torch.arange(3)})
        for rank in range(2):
            shard = memstore.TensorShard(torch.full((3, 4), rank), (6, 4), (3 * rank, 0))
            store.put_sharded("model", {"w": shard}, attempt="a", rank=rank, world_size=2, wait=False)
        del data, buffer
    assert "a dataset with 5 of 100 rows" in call("get", root, "frames") and "float32 [5, 2]" in call(
        "get", root, "frames"
    )
    assert "int64 [3]" in call("get", root, "ring") and "max 2" in call("get", root, "ring")
    assert [call_json("info", root, key)["rows"] for key in ("frames", "ring")] == [5, 3]
    assert [call_json("info", root, key)["capacity"] for key in ("frames", "ring")] == [100, 8]
    assert call("info", root, "ring").startswith("ring  a replay buffer with 3 rows in 8 slots, version 2, ")
    shown = call("get", root, "model", "w")
    assert "int64 [6, 4]" in shown and "[0 0 0 0]" in shown and "24 elements: 12 zero" in shown


@pytest.mark.parametrize("key", ["frames", "ring"])
def test_the_rows_that_are_there_are_written(root: str, tmp_path: Path, key: str) -> None:
    with memstore.open(root) as store:
        spec = {"a": {"x": ((2,), torch.float32)}, "y": ((), torch.int64)}
        rows = {"a": {"x": torch.ones(5, 2)}, "y": torch.arange(5)}
        data = store.create_dataset("frames", spec, capacity=10_000)
        buffer = memstore.ReplayBuffer(store, "ring", spec, capacity=10_000)
        data.extend(rows)
        buffer.extend(rows)
        del data, buffer
    assert "KiB written" in call("get", root, key, "-o", str(tmp_path / "x.pt"))
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["y"].tolist() == [0, 1, 2, 3, 4] and torch.equal(found["a"]["x"], torch.ones(5, 2))
    call("get", root, key, "-o", str(tmp_path / "x.safetensors"))
    assert set(safetensors.torch.load_file(tmp_path / "x.safetensors")) == {"a.x", "y"}
    call("get", root, key, "y", "-o", str(tmp_path / "y.pt"))
    assert torch.load(tmp_path / "y.pt", weights_only=True).tolist() == [0, 1, 2, 3, 4]
    assert all(os.path.getsize(path) < 10_000 for path in tmp_path.glob("*.pt"))


def test_nothing_is_unpickled_unasked(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = tmp_path / "canary"
    monkeypatch.setenv("MEMSTORE_TEST_CANARY", str(canary))
    with memstore.open(root, allow_pickle=True) as store:
        store.put("pickled", {"w": torch.ones(3), "bad": Ours()})
    shown = call("get", root, "pickled")
    assert "bad   <stored with pickle>" in shown and "w " in shown
    assert call("diff", root, "pickled", "pickled").startswith("equal")
    text = call("get", root, "pickled", "-o", str(tmp_path / "x.pt"), code=3)
    assert "say --allow-pickle if you trust" in " ".join(text.split()) and "allow_pickle=" not in text
    assert not canary.exists() and not (tmp_path / "x.pt").exists()
    call("get", root, "pickled", "-o", str(tmp_path / "x.pt"), "--allow-pickle")
    assert canary.exists()


def test_a_leaf_is_written_to_each_format(filled: str, tmp_path: Path) -> None:
    npy, pt, st = (str(tmp_path / f"w{ending}") for ending in (".npy", ".pt", ".safetensors"))
    for path in (npy, pt, st):
        assert "KiB written to" in call("get", filled, "policy", "layer/w", "-o", path)
    wanted = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    assert (np.load(npy) == wanted.numpy()).all()
    assert torch.equal(torch.load(pt, weights_only=True), wanted)
    assert torch.equal(safetensors.torch.load_file(st)["layer.w"], wanted)
    found = call_json("get", filled, "bare", "-o", npy, "--force")
    assert found == {"path": npy, "nbytes": os.path.getsize(npy)} and (np.load(npy) == np.arange(1000)).all()
    call("get", filled, "policy", "-o", pt, "--force")
    assert torch.load(pt, weights_only=True)["step"] == 7
    with memstore.open(filled) as store:
        store.put("half", torch.ones(3, dtype=torch.bfloat16))
    assert "numpy hasn't: write a .safetensors" in " ".join(
        call("get", filled, "half", "-o", npy, "--force", code=3).split()
    )
    assert (np.load(npy) == np.arange(1000)).all()  # what was there stays


@pytest.mark.parametrize("ending", [".npy", ".pt", ".safetensors"])
def test_what_get_wrote_is_put(filled: str, tmp_path: Path, ending: str) -> None:
    path = str(tmp_path / f"file{ending}")
    call("get", filled, "bare", "-o", path)
    assert call_json("put", filled, "again", path)["nbytes"] == 8000
    os.remove(path)  # it is a copy
    with memstore.open(filled) as store:
        value = store.get("again")
        value = value["tensor"] if ending == ".safetensors" else value
        assert torch.equal(value, torch.arange(1000))
        assert store.info("again").kind == "segment"


def test_put_expects_versions_and_unpickles_nothing_unasked(root: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.npy")
    np.save(path, np.ones(3))
    call("put", root, "key", path)
    assert "version 0 was expected" in " ".join(call("put", root, "key", path, "--expect-version", "0", code=3).split())
    assert call_json("put", root, "key", path, "--expect-version", "1")["version"] == 2
    torch.save({"w": Ours}, tmp_path / "bad.pt")
    text = " ".join(call("put", root, "key", str(tmp_path / "bad.pt"), code=3).split())
    assert "say --allow-pickle if you trust" in text
    (tmp_path / "x.dat").write_bytes(b"what is this")
    assert "say --format (" in " ".join(call("put", root, "key", str(tmp_path / "x.dat"), code=3).split())


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_what_a_person_sees_fits_the_window(filled: str, size: tuple[int, int]) -> None:
    for arguments in (("policy",), ("policy", "layer/w"), ("bare",)):
        seen = in_terminal("get", filled, *arguments, size=size)
        assert seen.code == 0 and all(
            len(line) <= size[0] for line in seen.text.replace("\r", "").split("\n") if "\x1b" not in line
        )


@pytest.mark.full
def test_torch_warns_nobody_who_only_looks(root: str) -> None:
    with memstore.open(root) as store, pytest.warns(UserWarning, match="ComplexHalf"):
        store.put("half", torch.ones(3).to(torch.complex32))
        warnings.warn("ComplexHalf", UserWarning, stacklevel=1)  # torch warns once
    done = subprocess.run([*COMMAND, "get", root, "half"], capture_output=True, text=True, check=True)
    assert done.stderr == "" and "complex32 [3]" in done.stdout


def test_an_object_is_whole_where_it_is_asked_for_alone(root: str) -> None:
    with memstore.open(root) as store:
        store.put("state", {"groups": [["word" * 3] * 20], "b": {"x": torch.ones(2)}})
        store.put("text", "word " * 40)
    assert call("get", root, "text").splitlines()[1] == repr("word " * 40)
    assert call("get", root, "state", "groups").splitlines()[1] == repr([["word" * 3] * 20])
    with memstore.open(root) as store:
        store.put("mixed", {"some name": "word " * 40, "x": torch.ones(2)})
    lines = [line.rstrip() for line in in_terminal("get", root, "mixed", size=(50, 24)).screen]
    (start,) = (i for i, line in enumerate(lines) if line.startswith("some name"))
    assert lines[start].endswith(" word") and lines[start + 1].startswith(" " * 11 + "word"), lines


def test_bars_of_plain_characters_where_there_are_no_others(filled: str) -> None:
    seen = in_terminal("get", filled, "bare", environment={"PYTHONIOENCODING": "ascii"})
    assert "#####" in seen.text and ".." in seen.text and seen.text.isascii()


_LIMITED = """
import resource, sys
from memstore.cli import main
sys.argv = ["memstore", *sys.argv[1:]]
try:
    main()
finally:
    text = open("/proc/self/status").read()
    sys.stderr.write(text[text.index("RssAnon") :].split()[1])
"""


@pytest.mark.full
def test_a_leaf_that_is_larger_than_the_memory(root: str, tmp_path: Path) -> None:
    """Its pages are the file's. The C library keeps some 130 MiB that were freed; a copy would take 256 MiB or more."""
    with memstore.open(root) as store:
        store.put("large", torch.ones(1 << 26, dtype=torch.float32))
        store.put("small", torch.ones(1 << 10, dtype=torch.float32))

    def memory(*arguments: str) -> int:
        command = [sys.executable, "-c", _LIMITED, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stderr) << 10

    for options in ((), ("--force", "-o", str(tmp_path / "x.npy"))):
        assert memory("get", root, "large", *options) - memory("get", root, "small", *options) < 200 << 20
    assert json.loads(call("get", root, "large", "--json"))["leaves"][0]["statistics"]["mean"] == 1


# --- datasets: listed, told, looked at, kept and deleted as any entry, and not exported -------------------------------


@pytest.fixture
def frames(root: str) -> Iterator[str]:
    with memstore.open(root, checksum=True) as store:
        data = store.create_dataset("frames", {"x": ((100,), torch.float32), "y": ((), torch.int64)}, capacity=1000)
        data.extend({"x": torch.ones(5, 100), "y": torch.arange(5)})
        store.put("weights", torch.ones(2000))
        del data  # which keeps the store open
    yield root


def test_a_dataset_is_told_as_what_it_is(frames: str) -> None:
    (listed, _) = json.loads(call("ls", frames, "--json"))
    assert (listed["key"], listed["kind"], listed["leaves"]) == ("frames", "dataset", 2)
    assert listed["nbytes"] >= 1000 * 408
    assert "dataset" in call("ls", frames)
    told = call("info", frames, "frames")
    assert "a dataset with 5 of 1,000 rows, version" in told and "[1000, 100]" in told
    assert json.loads(call("info", frames, "frames", "--json"))["kind"] == "dataset"
    assert call("stats", frames).split()[:2] == ["keys", "2"]


def test_a_dataset_is_looked_at_repaired_and_deleted(frames: str) -> None:
    assert call("verify", frames).startswith("1 checked, 1 without checksums, 0 damaged")
    assert call("repair", frames).startswith("2 keys recovered, 0 lost")
    with memstore.open(frames) as store:
        assert store.open_dataset("frames")[:]["y"].tolist() == [0, 1, 2, 3, 4]
    assert "1 deleted" in call("rm", frames, "frames")
    assert [entry["key"] for entry in json.loads(call("ls", frames, "--json"))] == ["weights"]


def test_a_dataset_is_refused_by_name_where_a_value_is_needed(frames: str, tmp_path: Path) -> None:
    for arguments in (("export", frames, "frames", str(tmp_path / "out")), ("cp", frames, "frames", frames, "copy")):
        assert "'frames' is a dataset" in call(*arguments, code=3)
    torch.save({"w": torch.ones(10)}, tmp_path / "w.pt")
    assert "'frames' is a dataset" in call("attach", frames, "frames", str(tmp_path / "w.pt"), code=3)
    assert not (tmp_path / "out").exists()
    with memstore.open(frames) as store:
        assert store.info("frames").kind == "dataset" and "copy" not in store


# --- `memstore diff` --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(root: str) -> Iterator[str]:
    with memstore.open(root) as store:
        value = {"w": torch.zeros(4, 4), "b": torch.ones(3), "n": 7, "same": torch.tensor([float("nan")])}
        store.put("one", value)
        changed = {**value, "w": torch.zeros(4, 4).index_fill(1, torch.tensor(2), 0.5), "b": torch.ones(2), "n": 8}
        store.put("two", {**changed, "more": torch.ones(1)})
    yield root


def test_keys_that_are_equal(two: str) -> None:
    assert call("diff", two, "one", "one") == "equal: 3 leaves and 1 object\n"
    assert call_json("diff", two, "one", "one") == []


def test_each_leaf_that_differs_is_told_by_how_much(two: str) -> None:
    found = {one["leaf"][0]: one["what"] for one in call_json("diff", two, "one", "two", code=1)}
    assert found == {
        "w": "4 of 16 elements differ, by up to 0.5",
        "b": "float32 [3] and float32 [2]",
        "n": "7 and 8",
        "more": f"only in 'two' of {two}",
    }
    lines = call("diff", two, "one", "two", code=1).splitlines()
    assert lines[0].split() == ["leaf", "difference"] and len(lines) == 5


def test_what_differs_is_told_within_its_column(two: str) -> None:
    lines = in_terminal("diff", two, "one", "two", size=(40, 24)).screen
    assert lines[1:3] == ["w     4 of 16 elements differ, by up to", "      0.5"]


def test_a_key_and_a_file_two_files_and_two_stores(two: str, tmp_path: Path) -> None:
    path, other, store = str(tmp_path / "a.npy"), str(tmp_path / "b.pt"), str(tmp_path / "store")
    np.save(path, np.arange(5.0))
    torch.save(torch.arange(5.0).double(), other)
    call("put", two, "array", path)
    assert call("diff", two, "array", path) == call("diff", path, other) == "equal: 1 leaf\n"
    call("cp", two, "one", store)
    said = "equal: 3 leaves and 1 object\n"
    assert call("diff", two, "one", store) == call("diff", two, "one", store, "one") == said
    assert "w" in call("diff", two, "two", store, "one", code=1)


def test_snapshots_are_files_too(two: str, tmp_path: Path) -> None:
    state = memstore.StateDict(x=torch.ones(3), step=2)
    memstore.Snapshot.take(f"{tmp_path}/a", {"state": state})
    memstore.Snapshot.take(f"{tmp_path}/b", {"state": memstore.StateDict(x=torch.zeros(3), step=2)})
    text = call("diff", f"{tmp_path}/a", f"{tmp_path}/b", code=1)
    assert "state/x" in text and "3 of 3 elements differ, by up to 1" in text and "step" not in text
    with memstore.open(two) as store:
        store.attach("attached", f"{tmp_path}/a")
    assert call("diff", two, "attached", f"{tmp_path}/a").startswith("equal")


@pytest.mark.parametrize(
    ("names", "code", "says"),
    [
        (("ROOT",), 2, "say ROOT KEY OTHER"),
        (("ROOT", "one", "nothing"), 4, "no key 'nothing'"),
        (("ROOT", "nothing", "one"), 4, "no key 'nothing'"),
        (("ROOT", "/dev/null"), 2, "is a store: say its KEY, and then the key or file to compare with"),
        (("/nowhere", "/dev/null"), 3, "there is no such file"),
        (("/nowhere", "one", "two"), 3, "exist"),
    ],
)
def test_what_can_not_be_compared(two: str, names: tuple[str, ...], code: int, says: str) -> None:
    found = call("diff", *(two if name == "ROOT" else name for name in names), code=code)
    assert says in " ".join(found.split())


def test_a_file_and_a_store_without_its_key(two: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    said = " ".join(call("diff", f"{tmp_path}/x.npy", two, code=3).split())
    assert said == f"memstore: {two} is a store: say which KEY of it is meant"


def test_long_objects_are_told_where_they_differ(root: str) -> None:
    with memstore.open(root) as store:
        store.put("one", {"text": "a" * 100 + "b"})
        store.put("two", {"text": "a" * 100 + "c" + "d" * 100})
    (found,) = call_json("diff", root, "one", "two", code=1)
    assert found["what"] == f"from character 101 on: ...b' and ...c{'d' * 59}..."


def test_a_key_that_is_in_one_store_only_is_told_with_the_other(root: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with memstore.open(root) as store, memstore.open(tmp_path / "other") as other:
        store.put("key", torch.ones(3))
        other.put("another", torch.ones(3))
    said = " ".join(call("diff", root, "key", f"{tmp_path}/other", code=4).split())
    assert said.startswith(f"memstore: {tmp_path}/other: no key 'key': ")
    said = " ".join(call("diff", root, f"{tmp_path}/x.npy", "key", code=2).split())
    assert said.endswith(f"x.npy' is a file, and 'key' a key of {root}: say ROOT, KEY, and then the file")


# --- keys that can't be found or copied -------------------------------------------------------------------------------


@pytest.fixture
def kinds(root: str) -> Iterator[str]:
    with memstore.open(root, allow_pickle=True) as store:
        store.put("a/plain", torch.ones(3))
        store.put("a/pickled", {"w": torch.ones(3), "o": object})
        store.put("b/1", torch.ones(3))
        store.put("b/2", torch.ones(3))
        store.create_dataset("b/rows", {"x": ((2,), torch.float32)}, capacity=10)
        part = memstore.TensorShard(torch.ones(3), (6,), (0,))
        store.put_sharded("waiting", {"w": part}, attempt="step 12", rank=0, world_size=2, wait=False)
    yield root


@pytest.mark.parametrize(
    ("prefix", "says"),
    [("b/", "'b/rows' is a dataset, "), ("a/", "'a/pickled': the value has leaves that were stored")],
)
def test_of_keys_that_cannot_be_copied_none_is(kinds: str, tmp_path: Path, prefix: str, says: str) -> None:
    assert says in " ".join(call("cp", kinds, prefix, f"{tmp_path}/new", "--prefix", code=3).split())
    assert not os.path.exists(f"{tmp_path}/new")


def test_a_copy_that_fails_says_how_much_it_has_copied(kinds: str, tmp_path: Path) -> None:
    with memstore.open(kinds) as store:
        store.put("c/1", torch.ones(3))
        store.put("c/2", torch.ones(1 << 20))
    memstore.open(tmp_path / "small", capacity="1MiB").close()
    said = " ".join(call("cp", kinds, "c/", f"{tmp_path}/small", "--prefix", code=3).split())
    assert "memstore: it ended after 1 of 2 keys had been copied" in said and "'c/2'" in said


@pytest.mark.parametrize(
    ("command", "others", "advice"),
    [("get", (), ""), ("info", (), ""), ("rm", (), "--prefix"), ("cp", ("TARGET",), "--prefix")],
)
def test_the_start_of_keys_is_told_as_such(
    kinds: str, tmp_path: Path, command: str, others: tuple[str, ...], advice: str
) -> None:
    words = [word.replace("TARGET", f"{tmp_path}/new") for word in others]
    said = " ".join(call(command, kinds, "b/", *words, code=4).split())
    assert "`memstore ls ROOT 'b/'` lists the 3 that start so" in said and advice in said
    assert not os.path.exists(f"{tmp_path}/new") and len(call_json("ls", kinds, "b/")) == 3


def test_an_attempt_that_does_not_wait_is_an_error_that_names_those_that_do(kinds: str) -> None:
    code, output, errors = in_child(run, ("abort", kinds, "waiting", "step 1"))
    assert (code, output) == (4, "")
    assert " ".join(errors.split()) == (
        "memstore: no attempt 'step 1' of 'waiting' waits for parts: of this key 'step 12' does"
    )
    assert "`memstore ls ROOT --pending` lists what does" in " ".join(call("abort", kinds, "x", "y", code=4).split())


def test_a_new_store_that_a_failed_put_leaves_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    full = memstore.errors.StoreFullError("no space left: nothing was changed", code=errno.ENOSPC)
    monkeypatch.setattr(memstore.Store, "put", lambda *_, **__: (_ for _ in ()).throw(full))
    said = " ".join(call("put", f"{tmp_path}/new", "key", f"{tmp_path}/x.npy", code=3).split())
    assert said.startswith(f"memstore: {tmp_path}/new is a new store, and stays, although this failed memstore: no ")
    assert "a new store" not in call("put", f"{tmp_path}/new", "key", f"{tmp_path}/x.npy", code=3)
