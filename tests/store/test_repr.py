"""What a REPL and a notebook show: short, escaped, and without reading a tensor."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, set_printoptions

import memstore
import memstore.errors
from memstore.integrations import dcp


@pytest.fixture
def filled(store: memstore.Store) -> memstore.Store:
    store.put("policy", TensorDict({"w": torch.ones(300, 7), "deep": {"b": torch.zeros(300)}}, [300]))
    store.put("<script>alert(1)</script>", 3)
    return store


def test_an_entry_is_a_line(filled: memstore.Store) -> None:
    info = filled.info("policy")
    said = f"'policy' version {info.version}: TensorDict[300] of 2 leaves, segment, 9.4 KiB"
    assert repr(info) == f"<memstore.EntryInfo {said}>"
    assert repr(filled) == f"<memstore.Store {filled.root} (mode 'a')>"


def test_a_notebook_shows_tables(filled: memstore.Store) -> None:
    shown = filled._repr_html_()
    assert shown.startswith("<table>") and "policy" in shown and "2 keys" in shown
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    entry = filled.info("policy")._repr_html_()
    assert "deep.b" in entry and "[300, 7]" in entry and "float32" in entry


def test_many_keys_and_leaves_are_cut(store: memstore.Store) -> None:
    store.put_many({f"{number:03}": number for number in range(100)})
    store.put("leaves", [torch.ones(1) for _ in range(100)])
    assert store._repr_html_().count("<tr>") == 31 and "101 keys, the first 30 shown" in store._repr_html_()
    assert store.info("leaves")._repr_html_().count("<tr>") == 31


def test_a_closed_store_says_so(store: memstore.Store) -> None:
    store.close()
    assert repr(store) == f"<memstore.Store {store.root} (closed)>"
    assert f"&lt;memstore.Store {store.root} (closed)&gt;" in store._repr_html_()  # as a tag it would not be shown


def test_views_show_shapes_and_read_nothing(filled: memstore.Store) -> None:
    view = filled.view("policy")
    before = memstore.bytes_read()
    assert type(view) is TensorDict and ("f32" in repr(view) or "float32" in repr(view))
    with set_printoptions(show_shape=True):  # tensordict's, which has no place for a leaf's key
        shown = repr(view)
    assert "w: StoredTensor(shape=torch.Size([300, 7]), device=cpu, dtype=torch.float32" in shown
    assert "b: StoredTensor(shape=torch.Size([300]), device=cpu, dtype=torch.float32" in shown
    version = filled.version("policy")
    said = f"StoredTensor(key='policy', version={version}, shape=(300, 7), dtype=torch.float32, lazy, 8.2 KiB)"
    assert repr(view["w"]) == said
    assert repr(view["w"][:3]) == said.replace("300", "3").replace("8.2 KiB", "84 B")
    assert memstore.bytes_read() == before


def test_a_view_in_pythons_containers_names_key_version_and_bytes(store: memstore.Store) -> None:
    version = store.put("policy", {"w": torch.ones(300, 7), "more": [torch.zeros(300)], "step": 3})
    before = memstore.bytes_read()
    leaf = f"StoredTensor(key='policy', version={version}, shape=%s, dtype=torch.float32, lazy, %s)"
    w, b = leaf % ("(300, 7)", "8.2 KiB"), leaf % ("(300,)", "1.2 KiB")
    assert repr(store.view("policy")) == f"{{'w': {w}, 'more': [{b}], 'step': 3}}"
    assert memstore.bytes_read() == before


@pytest.mark.embedded  # of several hosts, each counts what it has
def test_what_a_store_holds_is_a_table(filled: memstore.Store) -> None:
    stats = filled.stats()
    said = repr(stats).splitlines()
    assert said[0] == "memstore.StoreStats:" and said[1].split() == ["keys", "2"]
    assert any(line.split()[:3] == ["puts", "2", "by"] for line in said)
    assert len(said) == 11 and max(map(len, said)) < 80
    assert stats._repr_html_().count("<tr>") == 10 and "<th" not in stats._repr_html_()


@pytest.mark.embedded  # of several hosts, each counts what it has
def test_a_report_without_damage_is_a_line(filled: memstore.Store) -> None:
    report = filled.verify()
    assert repr(report) == "memstore.VerifyReport: nothing is damaged; 1 checked, 1 without checksums"
    assert "nothing is damaged" in report._repr_html_() and "<th" not in report._repr_html_()


def test_a_report_names_what_is_damaged() -> None:
    errors = [memstore.CorruptionError(key=f"key <{number}>", path="/a/b", detail="cut") for number in range(40)]
    report = memstore.VerifyReport(checked=3, unchecked=0, damaged=tuple(errors), ok=False)
    said = repr(report).splitlines()
    assert said[0] == "memstore.VerifyReport: 40 damaged, the first 30 shown; 3 checked, 0 without checksums"
    assert said[2].split(maxsplit=2) == ["key", "<0>", "/a/b  cut"] and len(said) == 32
    assert ">damage</th>" in report._repr_html_()
    assert "key &lt;0&gt;" in report._repr_html_() and "<0>" not in report._repr_html_()


@pytest.mark.embedded
def test_rows_are_tables(store: memstore.Store) -> None:
    spec = {"image": ((8, 8), torch.uint8), "more": {"label": ((), torch.int64)}}
    data = store.create_dataset("frames", spec, capacity=1000)
    buffer = memstore.ReplayBuffer(store, "replay", spec, capacity=1000)
    for rows, title in ((data, "memstore.Dataset 'frames'"), (buffer, "memstore.ReplayBuffer 'replay'")):
        said = str(rows).splitlines()
        assert said[0].startswith(f"{title}: 0 of 1,000 rows")
        assert [line.split() for line in said[2:]] == [
            ["image", "uint8", "[8,", "8]", "64", "B"],
            ["more.label", "int64", "[]", "8", "B"],
        ]
        assert "more.label" in rows._repr_html_() and len(repr(rows).splitlines()) == 1


@pytest.mark.embedded
def test_a_snapshot_is_a_table(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(4, 2), "progress": memstore.StateDict(step=3, note="<b>")}
    snapshot = memstore.Snapshot.take(tmp_path / "step-3", state)
    said = str(snapshot)
    assert "of 1 rank" in said and "0/model/weight" in said and "[2, 4]" in said
    assert "&lt;b&gt;" in snapshot._repr_html_() and "<b>" not in snapshot._repr_html_()
    missing = memstore.Snapshot(tmp_path / "nowhere")
    assert str(missing) == repr(missing)


def test_keys_are_drawn_as_a_tree(store: memstore.Store) -> None:
    store.put_many({"runs/1/policy": torch.ones(256), "runs/1/step": 1, "runs/2": {"a": torch.ones(2)}, "seed": 7})
    tree = store.tree()
    said = [re.sub(r"version \d+, .* old", "version N", line) for line in str(tree).splitlines()]
    assert said == [
        f"{store.root}: 4 keys, 1.0 KiB",
        "├── runs/  3 keys, 1.0 KiB",
        "│   ├── 1/  2 keys, 1.0 KiB",
        "│   │   ├── policy  1 tensor, 1.0 KiB, version N",
        "│   │   └── step    no tensor, 0 B, version N",
        "│   └── 2   1 tensor, 8 B, version N",
        "└── seed   no tensor, 0 B, version N",
    ]
    assert len(tree) == 4 and len(store.tree("runs/1/")) == 2
    assert str(store.tree("runs/1/")).splitlines()[1].startswith("├── policy")
    assert str(store.tree("run")).splitlines()[1].startswith("└── runs/  3 keys")
    assert tree._repr_html_().startswith("<pre style='font-family:monospace;white-space:pre'>")


def test_a_tree_of_odd_keys_is_drawn_too(store: memstore.Store) -> None:
    keys = ["/", "//", "a//b", "a/", "<b>", "/".join("x" * 250), *(f"many/{number}" for number in range(50))]
    store.put_many(dict.fromkeys(keys, 1))
    said = str(store.tree())
    assert "... 30 more" in said and "<b>" in said and "<b>" not in store.tree()._repr_html_()
    assert len(store.tree()) == len(keys)
    assert str(store.tree("nothing")) == f"{store.root}: 0 keys, 0 B, those that start with 'nothing'"


def test_help_shows_defaults_as_they_are_written() -> None:
    names = [name for name in memstore.__all__ if callable(getattr(memstore, name))]
    found = {
        f"{name}.{method}": inspect.signature(value)
        for name in names
        for method, value in [("", getattr(memstore, name)), *inspect.getmembers(getattr(memstore, name))]
        if inspect.isfunction(value) and value.__module__.startswith("memstore")
    }
    odd = re.compile(r" at 0x|Ellipsis|<class|<object|=384|functools")
    assert {name: str(one) for name, one in found.items() if odd.search(str(one))} == {}
    assert "default: 'Any' = ..." in str(found["Store.get"]) and "file_mode: 'int' = 0o600" in str(found["open."])


def test_keys_say_what_they_are_and_stay_lazy(store: memstore.Store) -> None:
    store.put_many({"a/1": 1, "a/2": 2})
    found = store.keys("a/")
    assert (
        repr(found)
        == f"<keys('a/') of {store.root}, read while they are iterated over: list(store.keys('a/')) has them>"
    )
    assert next(found) == "a/1" and list(found) == ["a/2"] and list(found) == []
    assert "keys() of" in repr(store.keys())


def test_items_and_values_say_what_they_are_and_stay_lazy(store: memstore.Store) -> None:
    store.put_many({"a": 1, "b": 2})
    items, values = store.items(), store.values()
    assert repr(items) == f"<items() of {store.root}, read while they are iterated over: dict(store.items()) has them>"
    assert "list(store.values()) has them" in repr(values)
    assert next(items) == ("a", 1) and next(values) == 1
    store.delete("b")
    assert list(items) == [] and list(values) == []


def test_a_tree_of_keys_with_line_ends_and_wide_letters_stays_aligned(store: memstore.Store) -> None:
    store.put_many({"new\nline": 1, "日本語": 2, "a": 3})
    lines = str(store.tree()).splitlines()
    assert [line.split("no tensor")[0] for line in lines[1:]] == [
        "├── a          ",
        "├── new\\nline  ",
        "└── 日本語     ",
    ]


def test_a_repair_says_what_it_did() -> None:
    report = memstore.RepairReport(("a", "b"), (), 2048)
    assert repr(report) == "memstore.RepairReport: 2 keys recovered, 0 lost; 2.0 KiB given back"
    lost = memstore.RepairReport(("a",), ("<b>", "c\nd"), 0)
    assert repr(lost).splitlines()[1:] == ["  lost", "  <b>", "  c\\nd"]
    assert "&lt;b&gt;" in lost._repr_html_() and "<b>" not in lost._repr_html_()


@pytest.mark.embedded
def test_rows_that_nobody_can_write_any_more_say_so(store: memstore.Store) -> None:
    data = store.create_dataset_from("frames", torch.ones(3, 2))
    data.seal()
    assert repr(data).startswith("<memstore.Dataset 'frames' (sealed): 3 of 3 rows of ")
    buffer = memstore.ReplayBuffer(store, "replay", torch.zeros(2), capacity=4)
    store.delete("replay")
    assert "'replay' (deleted): 0 of 4 rows" in repr(buffer) and "(deleted)" in buffer._repr_html_()


def test_a_put_that_waits_for_ranks_says_how_long(store: memstore.Store) -> None:
    shard = memstore.TensorShard(torch.ones(1, 4), global_shape=(2, 4), offsets=(0, 0))
    store.put_sharded("halves", shard, attempt="first", rank=0, world_size=2, wait=False)
    (one,) = store.pending()
    assert re.fullmatch(
        r"<memstore\.PendingInfo 'halves' attempt 'first': rank 0 of 2, [0-9.]+ K?i?B, expires in 10 min>", repr(one)
    )


@pytest.mark.embedded
def test_what_is_made_of_files_is_a_line(tmp_path: Path) -> None:
    snapshot = memstore.Snapshot.take(tmp_path / "step-3", {"rng": memstore.RNGState()})
    assert re.fullmatch(
        r"<memstore\.SnapshotMetadata: \d+ entries, .* of 1 rank, by memstore .*, \d+ s old>", repr(snapshot.metadata)
    )
    assert repr(memstore.RNGState()) == "memstore.RNGState()"
    assert repr(dcp.StorageReader(tmp_path)) == f"<memstore.integrations.dcp.StorageReader '{tmp_path}'>"
    assert repr(dcp.StorageWriter(tmp_path / "store", key="k")).endswith(f"StorageWriter 'k' in {tmp_path}/store>")


def test_tab_shows_what_users_call(store: memstore.Store) -> None:
    names = {"put", "get", "keys", "root"}
    assert names <= set(dir(store))
    task = memstore.aio.open(store.root)
    assert names <= set(dir(task)) and {"blocking", "lane_of", "end", "made"}.isdisjoint(dir(task))
    store.put("w", torch.ones(3))
    leaf = store.view("w")
    assert {"distribute", "shape", "sum"} <= set(dir(leaf)) and {"shown", "stored"}.isdisjoint(dir(leaf))


def test_the_module_shows_what_users_call() -> None:
    shown = dir(memstore)
    assert {*memstore.__all__, "aio", "convert", "integrations", "__version__"} <= set(shown)
    assert {"Any", "TYPE_CHECKING", "os", "importlib", "between_forks"}.isdisjoint(shown)
    first = inspect.getdoc(memstore)
    assert first is not None and "memstore.open(" in first.splitlines()[2]


# All that a page imports from, beside memstore itself.
PACKAGES = [*("aio", "convert", "deferred_init", "fake", "integrations.dcp", "integrations.torchstore")]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_shows_what_users_call(name: str) -> None:
    package = importlib.import_module(f"memstore.{name}")
    shown = {name for name in dir(package) if not name.startswith("__")}
    assert shown == set(package.__all__)


def test_the_errors_show_errors_alone() -> None:
    shown = {name for name in dir(memstore.errors) if not name.startswith("__")}
    assert {name for name in memstore.__all__ if name.endswith("Error")} <= shown
    assert all(issubclass(getattr(memstore.errors, name), memstore.MemstoreError) for name in shown)
    assert not any(name.startswith("_") for name in shown)


def test_notebooks_complete_keys_and_columns(store: memstore.Store) -> None:
    store.put_many({"policy": 1, "batch/2": 2, "ünï": 3})
    assert store._ipython_key_completions_() == ["batch/2", "policy", "ünï"]
    spec = {"obs": ((3,), torch.float32), "next": {"reward": ((), torch.float32), "done": ((), torch.bool)}}
    rows = store.create_dataset("rows", spec, capacity=4)
    assert rows._ipython_key_completions_() == ["obs", "next"]
    assert store.create_dataset("plain", ((3,), torch.float32), capacity=4)._ipython_key_completions_() == []
    store.close()
    assert store._ipython_key_completions_() == []  # and no error in the middle of a word


@pytest.mark.parametrize("room", ["convert", "errors", "integrations"])
def test_rooms_need_no_import_of_their_own(room: str) -> None:
    code = f"import memstore, sys; assert 'torch' not in sys.modules; memstore.{room}"
    subprocess.run([sys.executable, "-c", code], check=True)
