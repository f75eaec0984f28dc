"""The command line, as people and scripts meet it: in processes of its own, some of them in a terminal.

Most are forked from this one, which has torch: to import it takes seconds, and many on a busy machine.
"""

from __future__ import annotations

import doctest
import io
import itertools
import json
import math
import os
import platform
import pty
import resource
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import TensorDict

import memstore
from memstore import LeafInfo, ShardInfo
from memstore._wording import size as as_size
from memstore.cli import main, stores
from memstore.cli.group import keys_of, quoted, starts_of, words_of
from memstore.cli.render import ShardLayout, number_layouts, picture
from tests.children import in_child
from tests.cli.terminals import in_terminal
from tests.documents.pages import ROOT, Snippet, snippets

COMMAND = [sys.executable, "-m", "memstore"]


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root, checksum=True) as store:
        store.put("policy/weights", {"layer": {"w": torch.ones(64, 64), "b": torch.zeros(64)}, "step": 7})
        store.put("policy/td", TensorDict({"x": torch.ones(3, 2000), "deep": {"y": torch.zeros(3)}}, [3]))
        store.put("count", torch.tensor(3))
        store.put("new\nline[bold]🐍", torch.ones(3))
        store.put("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    yield root


def call(*arguments: str, code: int = 0) -> str:
    found, output, errors = in_child(run, arguments)
    assert found == code, (found, output, errors)
    return errors if code > 1 and not output else output


def run(arguments: tuple[str, ...]) -> tuple[object, str, str]:
    """For a child. Returns the exit code, and what it wrote."""
    sys.argv = ["memstore", *arguments]
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    return code, *(stream.buffer.getvalue().decode() for stream in (output, errors))


def start(*arguments: str) -> str:
    """In a fresh process, which has nothing of this one."""
    return subprocess.run([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout


def call_json(*arguments: str, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code))


def test_ls_lists_sorted_keys(filled: str) -> None:
    lines = call("ls", filled).splitlines()
    assert lines[0].split() == ["key", "type", "content", "size", "version", "age"]
    assert [line.split()[0] for line in lines[1:-1]] == [
        "count",
        "jagged",
        r"new\nline[bold]🐍",
        "policy/td",
        "policy/weights",
    ]
    assert "16.2 KiB" in lines[-2] and "dict  " in lines[-2] and "2 leaves" in lines[-2] and "int64 []" in lines[1]
    assert lines[-1].startswith("5 keys, ")
    assert len(call("ls", filled, "policy/").splitlines()) == 4
    found = call_json("ls", filled, "pol")
    assert [one["key"] for one in found] == ["policy/td", "policy/weights"]
    assert found[1]["leaves"] == 2 and found[1]["nbytes"] == 64 * 64 * 4 + 64 * 4


def test_info_shows_the_tree_of_leaves(filled: str) -> None:
    text = call("info", filled, "policy/weights")
    assert "layer" in text and "float32 [64, 64]" in text and "step  int" in text and ".safetensors" in text
    assert "TensorDict[3]" in call("info", filled, "policy/td")
    assert "values" in call("info", filled, "jagged")  # with torch
    found = call_json("info", filled, "policy/weights")
    assert found["leaves"][0]["name"] == ["layer", "w"] and found["leaves"][0]["dtype"] == "float32"
    assert found["kind"] == "segment" and len(found["files"]) == 1


def test_stats_say_who_holds_what(filled: str) -> None:
    with memstore.open(filled) as store:
        held = store.get("policy/td")
        store.delete("policy/td")
        found = json.loads(start("stats", filled, "--json"))
        assert found["keys"] == 4 and found["pinned_bytes"] > 24_000 and found["pinned_by"] == [os.getpid()]
        shown = start("stats", filled)
        assert f"by pid {os.getpid()}" in shown and all(line == line.rstrip() for line in shown.splitlines())
        del held


def test_verify_finds_damage_and_repair_says_what_is_lost(filled: str) -> None:
    assert call("verify", filled).startswith("5 checked")
    with memstore.open(filled) as store:
        (path,) = store.info("policy/td").files
    with open(path, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    found = call_json("verify", filled, code=1)
    assert len(found["damaged"]) == 1 and "policy/td" in found["damaged"][0]
    assert "damaged  'policy/td'" in call("verify", filled, code=1)
    assert call("verify", filled, "count").startswith("1 checked")
    call("rm", filled, "policy/td")
    assert "4 keys recovered, 0 lost" in call("repair", filled)
    assert call_json("verify", filled)["checked"] == 4


@pytest.mark.parametrize("damage", [os.unlink, lambda path: Path(path).write_bytes(b"?" * 8192)], ids=["gone", "junk"])
def test_verify_tells_damage_with_which_a_store_can_not_be_opened(root: str, damage: Callable[[str], object]) -> None:
    with memstore.open(root) as store:
        store.put("weights", torch.ones(1000))
    damage(f"{root}/catalog/local/data.mdb")
    said = call("ls", root, code=3)
    assert "data.mdb" in said and "run `memstore repair`" in " ".join(said.split())
    (found,) = call_json("verify", root, code=1)["damaged"]
    assert "data.mdb" in found
    lines = call("verify", root, code=1).splitlines()
    assert lines[0].startswith("damaged  ") and "data.mdb" in lines[0] and lines[-1] == "0 checked, 1 damaged"
    copy = f"{root}-copy"
    shutil.copytree(root, copy)
    code, output, errors = in_child(run, ("repair", root))  # small values lie in the catalog alone
    assert code == 1 and output.startswith("1 key recovered, 0 lost, and perhaps others, ")
    assert "memstore: " in errors and "others may be lost, and nobody can say which" in " ".join(errors.split())
    found = call_json("repair", copy, code=1)
    assert found["may_have_lost_more"] and "nobody can say which" in found["warnings"][0] and not found["lost"]
    assert call_json("verify", root)["ok"]
    assert call_json("repair", root)["warnings"] == []


def test_gc_rm_and_cp(filled: str, tmp_path: Path) -> None:
    with memstore.open(filled) as store:
        store.put("policy/td", torch.zeros(5000))
    assert call_json("gc", filled)["freed_bytes"] > 24_000
    assert call_json("rm", filled, "count", "jagged") == {"deleted": 2}
    call("rm", filled, "count", "policy/td", code=4)
    assert call_json("rm", filled, "count", "--missing-ok") == {"deleted": 0}
    target = str(tmp_path / "target")
    assert "2 copied" in call("cp", filled, "policy/", target, "--prefix")
    assert list(call_json("cp", filled, "policy/td", target, "other")) == ["other"]
    with memstore.open(target) as store:
        assert list(store) == ["other", "policy/td", "policy/weights"]
        assert (store.get("policy/weights")["layer"]["w"] == 1).all()
    assert "an empty prefix would delete every key" in call("rm", target, "", "--prefix", code=2)
    assert call_json("rm", target, "policy/", "--prefix") == {"deleted": 2}


def test_names_of_leaves_are_whole_in_any_window(root: str) -> None:
    name = ".".join(["cross_attention"] * 10)
    with memstore.open(root) as store:
        store.put("model", {name: torch.ones(3, 4)})
    assert f"{name}  float32 [3, 4]\n" in call("info", root, "model")
    assert f"{name}  float32 [3, 4]" in "".join(in_terminal("info", root, "model").screen)


def test_attach_and_export(filled: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    call("export", filled, "policy/weights", str(path), code=3)  # "step" is no tensor
    assert call_json("export", filled, "policy/td", str(path))["nbytes"] == path.stat().st_size
    call("export", filled, "policy/td", str(tmp_path / "folder"), "--format", "memmap")
    call("export", filled, "policy/weights", str(tmp_path / "weights.pt"))  # torch's, by its ending
    assert torch.load(tmp_path / "weights.pt")["step"] == 7
    call("export", filled, "policy/td", str(tmp_path / "x.npy"), code=2)
    assert "in place" in call("attach", filled, "adopted", str(path))
    assert call_json("attach", filled, "folder", str(tmp_path / "folder"))["nbytes"] == 24_012
    found = {one["key"]: one["kind"] for one in call_json("ls", filled)}
    assert found["adopted"] == found["folder"] == "adopted"
    assert str(path) in call("info", filled, "adopted")
    for one in call_json("ls", filled):  # without the headers of files
        size = as_size(one["nbytes"])
        assert call_json("info", filled, one["key"])["nbytes"] == one["nbytes"]
        assert f"version {one['version']}, {size}, " in call("info", filled, one["key"])
    with memstore.open(filled) as store:
        assert (store.get("folder")["x"] == 1).all()
    assert call_json("verify", filled)["unchecked"] == 2
    call("attach", filled, "bad", "/dev/null", code=3)


def test_watch_follows(filled: str) -> None:
    seen = in_terminal("watch", filled, "pol", "--interval", "0.05", interrupt="puts/s,")
    assert seen.code == 130, seen.text[-500:]
    assert any(line.startswith("policy/td") for line in seen.screen) and "\x1b[?25h" in seen.text  # the cursor is back


def test_bench_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_SECONDS", 0.01)  # a measurement
    found = call_json("bench", str(tmp_path))
    assert {one["what"] for one in found["results"]} >= {"put of 1 KiB", "get of 1 KiB"}
    assert all(one["seconds"] > 0 for one in found["results"]) and os.listdir(tmp_path) == []
    assert found["versions"]["python"] == platform.python_version() and found["versions"]["torch"] == torch.__version__
    assert found["memory"] > 1 << 28 and platform.release() in found["system"]
    shown = call("bench", str(tmp_path))
    assert "GB/s" in shown and all(line == line.rstrip() for line in shown.splitlines())
    call("bench", str(tmp_path / "nowhere"), code=2)


def test_what_a_person_sees(filled: str) -> None:
    seen = in_terminal("ls", filled)
    assert seen.code == 0 and seen.screen[0].startswith("key") and "\x1b[1m" in seen.text
    assert any("├── " in line or "└── " in line for line in in_terminal("info", filled, "policy/weights").screen)
    seen = in_terminal("info", filled, "nothing")
    assert seen.code == 4 and "memstore: no key 'nothing'" in "\n".join(seen.screen)


def test_what_only_looks_starts_quickly_and_without_torch(filled: str, tmp_path: Path) -> None:
    snapshot = str(tmp_path / "step-1")
    memstore.Snapshot.take(snapshot, {"state": memstore.StateDict(x=torch.ones(3))})
    stores = (("ls",), ("info", "policy/td"), ("stats",), ("top",), ("watch", "--count", "2", "--interval", "0.01"))
    commands = [(command, filled, *others) for command, *others in stores]
    for arguments in (*commands, ("snapshot", "info", snapshot), ("checkpoints", str(tmp_path))):
        script = "import sys, atexit; from memstore.cli import main; sys.argv = ['memstore', *sys.argv[1:]]\n" + (
            "atexit.register(lambda: sys.stderr.write(' '.join(sys.modules)))\nmain()"
        )
        before = _seconds_of_children()
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
        assert "torch" not in done.stderr.split() and "tensordict" not in done.stderr.split()
        assert _seconds_of_children() - before < 1.0  # it takes 0.2, and torch takes 2


def _seconds_of_children() -> float:
    """Of the processor, which a busy machine gives later, but not more of."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_without_its_libraries_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['click'] = None\nfrom memstore.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "pip install click rich" in done.stderr


@pytest.fixture
def sharded(root: str) -> Iterator[str]:
    def put(key: str, ranks: range) -> None:
        for rank in ranks:
            value = {"w": memstore.TensorShard(torch.full((3, 4), rank), (6, 4), (3 * rank, 0)), "b": torch.ones(3)}
            store.put_sharded(key, value, attempt="step 7", rank=rank, world_size=2, wait=False)

    with memstore.open(root, checksum=True) as store:
        put("model", range(2))
        put("next", range(1))
    yield root


def test_info_shows_which_rank_has_put_what(sharded: str) -> None:
    text = call("info", sharded, "model")
    assert "w  int64 [6, 4]  (1)" in text and "b  float32 [3]  rank 0" in text and text.count(".safetensors") == 2
    assert "(1)  [6, 4]  right: dim 0\n0                           3                           6\n┌─────" in text
    assert "│             0             │             1             │" in text
    assert "204 B" in text.splitlines()[0]
    plain = in_terminal("info", sharded, "model", environment={"PYTHONIOENCODING": "ascii"})
    assert plain.text.isascii() and any(line.startswith("+-----") for line in plain.screen), plain.screen
    assert any(line.startswith("|     ") for line in plain.screen) and r"\u" not in plain.text
    found = call_json("info", sharded, "model")
    assert [(one["rank"], one["offsets"], one["shape"]) for one in found["leaves"][0]["shards"]] == [
        (0, [0, 0], [3, 4]),
        (1, [3, 0], [3, 4]),
    ]
    assert [one["file"] for one in found["leaves"][0]["shards"]] == found["files"]
    (listed,) = call_json("ls", sharded)
    assert (listed["kind"], listed["nbytes"]) == ("sharded", found["nbytes"]) == ("sharded", 204)


def test_sharded_puts_that_wait_are_listed_and_given_up(sharded: str) -> None:
    lines = call("ls", sharded, "--pending").splitlines()
    assert lines[0].split() == ["key", "attempt", "parts", "missing", "size", "expires", "in"]
    assert lines[1].split()[:7] == ["next", "step", "7", "1", "of", "2", "1"] and len(lines) == 2
    (found,) = call_json("ls", sharded, "ne", "--pending")
    assert (found["key"], found["attempt"], found["world_size"], found["ranks"]) == ("next", "step 7", 2, [0])
    assert call_json("ls", sharded, "model", "--pending") == []
    assert f"pending   {found['nbytes'] / 1024:.1f} KiB" in call("stats", sharded)
    assert call_json("abort", sharded, "next", "step 8", code=4) == {"aborted": False}
    assert call("abort", sharded, "next", "step 7") == "given up\n"
    assert call_json("ls", sharded, "--pending") == []
    assert call_json("abort", sharded, "next", "step 7", code=4) == {"aborted": False}
    assert call_json("ls", sharded)[0]["key"] == "model"


# --- pictures of shards: they fit their width, and show which rank has put what ---------------------------------------


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> ShardLayout:
    """Ranks in the order of their offsets."""
    cuts = [[size * i // part for i in range(part + 1)] for size, part in zip(shape, parts, strict=True)]
    boxes = itertools.product(*map(itertools.pairwise, cuts))
    return shape, tuple(
        (tuple(start for start, _ in box), tuple(stop - start for start, stop in box), rank)
        for rank, box in enumerate(boxes)
    )


def test_a_tensor_cut_along_two_dimensions() -> None:
    assert picture(grid((1024, 512), (2, 2)), 32) == [
        "[1024, 512]  down: dim 0  right: dim 1",
        "     0          256        512",
        "   0 ┌──────────┬──────────┐",
        "     │    0     │    1     │",
        " 512 ├──────────┼──────────┤",
        "     │    2     │    3     │",
        "1024 └──────────┴──────────┘",
    ]


@pytest.mark.parametrize(("shape", "parts", "dim"), [((12,), (3,), 0), ((12, 5), (3, 1), 0), ((5, 12), (1, 3), 1)])
def test_a_tensor_cut_along_one_dimension(shape: tuple[int, ...], parts: tuple[int, ...], dim: int) -> None:
    assert picture(grid(shape, parts), 24) == [
        f"{list(shape)}  right: dim {dim}",
        "0      4      8      12",
        "┌──────┬──────┬──────┐",
        "│  0   │  1   │  2   │",
        "└──────┴──────┴──────┘",
    ]


def test_sizes_that_differ_and_boxes_that_are_no_grid() -> None:
    shards = (((0, 0), (6, 4), 0), ((0, 4), (6, 12), 1), ((6, 0), (6, 16), 12))
    assert picture(((12, 16), shards), 40) == [
        "[12, 16]  down: dim 0  right: dim 1",
        "   0       4                        16",
        " 0 ┌───────┬────────────────────────┐",
        "   │   0   │           1            │",
        " 6 ├───────┴────────────────────────┤",
        "   │               12               │",
        "12 └────────────────────────────────┘",
    ]


def test_the_middle_of_many_is_left_out() -> None:
    assert picture(grid((640,), (64,)), 40) == [
        "[640]  right: dim 0",
        "0    10   20   30  610  620  630  640",
        "┌────┬────┬────┬───┬────┬────┬────┐",
        "│ 0  │ 1  │ 2  │ … │ 61 │ 62 │ 63 │",
        "└────┴────┴────┴───┴────┴────┴────┘",
    ]
    assert len(picture(grid((640, 640), (64, 64)), 80)) < 24


def test_more_than_two_dimensions() -> None:
    lines = picture(grid((8, 4, 6), (4, 2, 3)), 80)
    assert [line for line in lines if line.startswith("at ")] == ["at 0 of dim 0", "at 2 of dim 0", "at 4 of dim 0"]
    assert lines[-1] == "... and 1 more" and any("│       17        │" in line for line in lines)


@given(st.data(), st.integers(20, 200))
def test_any_layout(data: st.DataObject, width: int) -> None:
    parts = tuple(data.draw(st.lists(st.integers(1, 40), min_size=0, max_size=4)))
    shape = tuple(part * data.draw(st.integers(1, 1000)) for part in parts)
    assume(math.prod(parts) <= 1000)
    lines = picture(grid(shape, parts), width)
    body = [line for line in lines if set(line) & set("│┌└├")]
    assert all(len(line) <= max(width, 40) for line in body)
    assert len(body) <= 3 * 20 and "0" in "".join(lines)


def test_leaves_that_lie_alike_have_one_picture() -> None:
    def leaf(name: str, *shards: ShardInfo) -> LeafInfo:
        return LeafInfo((name,), torch.float32, (4,), 16, shards)

    halves = [ShardInfo((0,), (2,), 0, "x"), ShardInfo((2,), (2,), 1, "y")]
    other = [ShardInfo((0,), (2,), 1, "x"), ShardInfo((2,), (2,), 0, "y")]
    found = number_layouts(
        [leaf("a", *halves), leaf("b", *halves), leaf("c", *other), leaf("d", ShardInfo((0,), (4,), 3, "z")), leaf("e")]
    )
    assert found.notes == {("a",): "(1)", ("b",): "(1)", ("c",): "(2)", ("d",): "rank 3"}
    lines = list(found.pictures(80))
    assert [line for line in lines if line.startswith("(")] == ["(1)  [4]  right: dim 0", "(2)  [4]  right: dim 0"]


# --- shells complete keys: what they are offered, and what stands on the line then ------------------------------------


KEYS = ["count", "policy/td", "policy/weights", "with space", "a:b", "it's", "line\nbreak", "über"]


@pytest.fixture
def named(root: str) -> Iterator[str]:
    with memstore.open(root) as store:
        store.put_many({key: {"layer": {"w": torch.ones(3), "b": torch.ones(2)}} for key in KEYS})
    yield root


def offered(line: str) -> list[str]:
    code, output, errors = in_child(_ask, line)
    assert (code, errors) == (0, "")
    return [line for line in output.splitlines() if line]


def _ask(line: str) -> tuple[object, str, str]:
    """In a child: the environment is its own."""
    os.environ.update({"_MEMSTORE_COMPLETE": "bash_complete", "COMP_LINE": line})
    return run(())


def test_commands_keys_and_leaves_are_offered(named: str) -> None:
    assert {"plain,get", "plain,gc"} <= set(offered("memstore g"))
    assert offered(f"memstore info {named} pol") == ["plain,policy/td", "plain,policy/weights"]
    assert offered(f"memstore get {named} count layer/") == ["plain,layer/w", "plain,layer/b"]
    assert offered(f"memstore rm {named} count wi") == ["plain,with\\ space"]
    assert offered(f'memstore info {named} "with s') == ["plain,with space"]
    assert offered(f"memstore diff {named} count pol") == ["plain,policy/td", "plain,policy/weights"]
    assert offered("memstore info /nowhere/at/all x") == []
    assert offered("memstore info /no") == ["file,/no"]


def test_what_waits_is_offered_to_be_given_up(named: str) -> None:
    part = memstore.TensorShard(torch.ones(3), (6,), (0,))
    with memstore.open(named) as store:
        for key, attempt in (("model", "one"), ("model", "other"), ("next", "two")):
            store.put_sharded(key, {"w": part}, attempt=attempt, rank=0, world_size=2, wait=False)
    assert offered(f"memstore abort {named} ") == ["plain,model", "plain,next"]
    assert offered(f"memstore abort {named} model o") == ["plain,one", "plain,other"]


def test_keys_that_no_shell_can_be_sent_are_left_out(named: str) -> None:
    assert keys_of(named, "") == sorted(set(KEYS) - {"line\nbreak"}, key=str.encode)
    assert keys_of(named, "line") == [] and keys_of("/nowhere", "") == [] and keys_of("", "") == []


def test_of_many_keys_their_starts_are_offered() -> None:
    keys = [f"run/{kind}/{i}" for kind in ("eval", "train") for i in range(200)]
    assert starts_of(keys, 0) == ["run/"] and starts_of(keys, 4) == ["run/eval/", "run/train/"]
    found = starts_of([f"frame-{i:04}" for i in range(5000)], 0)
    assert 10 <= len(found) <= 100 and all(one.startswith("frame-") for one in found)
    assert all(any(key.startswith(one) for one in found) for key in (f"frame-{i:04}" for i in range(5000)))


@pytest.mark.parametrize(
    ("line", "words", "last"),
    [
        ("memstore ls /a ", ["ls", "/a"], ""),
        ("memstore ls /a b", ["ls", "/a"], "b"),
        (r"memstore ls /a b\ c", ["ls", "/a"], "b c"),
        ("memstore ls '/a b' \"c d", ["ls", "/a b"], "c d"),
        ("memstore ls /a x:y", ["ls", "/a"], "x:y"),
        ("memstore ", [], ""),
    ],
)
def test_lines_are_split_as_shells_do(line: str, words: list[str], last: str) -> None:
    assert words_of(line) == (words, last)


def test_bash_gets_what_stands_behind_a_colon_and_quotes() -> None:
    assert quoted("a:b c", "memstore ls /a a:") == r"b\ c"
    assert quoted("it's", "memstore ls /a it") == r"it\'s"
    assert quoted("with space", 'memstore ls /a "wi') == "with space"
    assert quoted("key with", r"memstore rm /a it\'s key") == r"key\ with", "no quote is open"
    assert quoted("it's", "memstore ls /a 'it") == r"it'\''s"
    assert quoted('$5 "x"', 'memstore ls /a "') == r"\$5 \"x\""


class Shell:
    """An interactive shell in a terminal, with a `memstore` that runs this checkout."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            home, path = str(folder), f"{folder}:{os.environ['PATH']}"
            os.environ.update(
                TERM="dumb", PS1="$ ", HOME=home, INPUTRC="/dev/null", ZDOTDIR=home, XDG_CONFIG_HOME=home, PATH=path
            )
            os.execvp(command[0], command)

    def type(self, text: str, until: str, within: float = 240.0) -> str:
        os.write(self.fd, text.encode())
        seen, deadline = "", time.monotonic() + within
        while until not in seen and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.2)[0]:
                seen += os.read(self.fd, 1 << 16).decode(errors="replace")
        assert until in seen, seen
        return seen

    def close(self) -> None:
        os.close(self.fd)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


@pytest.fixture
def bash(tmp_path: Path) -> Iterator[Shell]:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    script = tmp_path / "memstore"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m memstore "$@"\n')
    script.chmod(0o700)
    shell = Shell(["bash", "--norc", "--noprofile", "-i"], tmp_path)
    shell.type('eval "$(memstore completion bash)"; echo re""ady\n', "ready")
    yield shell
    shell.close()


COMPLETED = [("a:", "a:b "), ("with", r"with\ space "), ("policy/w", "policy/weights "), ("it", r"it\'s ")]


@pytest.mark.parametrize(
    "lines", [COMPLETED[:2], pytest.param([*COMPLETED[2:], ("'with s", "with space' ")], marks=pytest.mark.full)]
)
def test_bash_completes_keys_on_its_line(named: str, bash: Shell, lines: list[tuple[str, str]]) -> None:
    for typed, becomes in lines:
        bash.type(f"memstore info {named} {typed}\t", becomes)
        bash.type("\x15", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_of_their_shells(shell: str) -> None:
    script = call("completion", shell)
    assert f"_MEMSTORE_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


# --- the page on the command line shows what its commands write -------------------------------------------------------


PAGE = ROOT / "docs/command-line.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def sessions() -> list[Snippet]:
    return [one for one in snippets(PAGE) if one.language == "console" and one.not_run is not None]


def test_sessions_that_need_torch_show_what_is_written(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with memstore.open(root, checksum=True) as store:
        store.put("run/policy", {"layer": {"w": torch.ones(64, 64), "b": torch.arange(-32.0, 32.0)}, "step": 7})
        store.put("run/reward", torch.tensor(3.0))
    assert len(sessions()) == 2
    for session in sessions():
        for part in session.code.removeprefix("$ ").split("\n$ "):
            command, _, said = part.partition("\n")
            _, *words = shlex.split(command.replace("/dev/shm/looked-into", root))
            _, shown, errors = in_child(run, tuple(words))
            said = said.replace("/dev/shm/looked-into", root)
            assert doctest.OutputChecker().check_output(f"{said.rstrip()}\n", shown, FLAGS), (command, shown, errors)
    assert os.path.exists("biases.npy")
