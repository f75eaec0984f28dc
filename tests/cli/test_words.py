"""Exit codes are those that are documented, and errors speak of options, and not of arguments of methods."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from memstore.cli.commands import cli
from memstore.cli.messages import WORDS, in_words, message_without_store
from tests.children import in_child
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import COMMAND, call, call_json, run
from tests.users import USER, as_user, needs_root

API = re.compile(r"[a-z_]=|mode '|memstore\.(?!json)[a-z]+|\bstore\.[a-z]+|with_|[a-z]\(|[a-z]+_(many|version)")
SYSTEM = r"^\[Errno"  # how Python begins what the system says


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root, allow_pickle=True) as store:
        store.put("key", torch.ones(3))
        store.put("complex", {"w": torch.ones(3), "o": object, "c": torch.ones(2, dtype=torch.complex128)})
        store.create_dataset("frames", {"x": ((2,), torch.float32)}, capacity=10)
        memstore.ReplayBuffer(store, "ring", {"y": ((), torch.int64)}, capacity=8)
        part = memstore.TensorShard(torch.ones(3), (6,), (0,))
        store.put_sharded("waiting", {"w": part}, attempt="a", rank=0, world_size=2, wait=False)
    yield root


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("info", "ROOT", "nothing"), 4, "no key 'nothing'"),
        (("get", "ROOT", "nothing"), 4, ""),
        (("get", "ROOT", "waiting"), 4, ""),
        (("get", "ROOT", "key", "leaf"), 4, ""),
        (("rm", "ROOT", "nothing"), 4, ""),
        (("cp", "ROOT", "nothing", "TMP/target"), 4, ""),
        (("export", "ROOT", "nothing", "TMP/x"), 4, ""),
        (("verify", "ROOT", "nothing"), 4, ""),
        (("diff", "ROOT", "key", "nothing"), 4, ""),
        (("abort", "ROOT", "nothing", "a"), 4, ""),
        (("export", "ROOT", "complex", "TMP/x"), 3, ""),
        (("export", "ROOT", "complex", "TMP/x", "--format", "torch"), 3, ""),
        (("export", "ROOT", "key", "TMP/x", "--format", "torch", "--max-shard-size", "5GB"), 2, ""),
        (("export", "ROOT", "key", "TMP/x", "--max-shard-size", "5QB"), 2, ""),
        (("export", "ROOT", "key", "TMP/x", "--max-shard-size", "-5"), 2, ""),
        (("export", "ROOT", "key", "TMP/x.pt", "--format", "safetensors"), 2, ""),
        (("serve", "TMP/none", "--address", "127.0.0.1:1"), 2, ""),
        (("repair", "ROOT", "--timeout", "nan"), 2, ""),
        (("repair", "ROOT", "--timeout", "-1"), 2, ""),
        (("watch", "ROOT", "--interval", "nan"), 2, ""),
        (("info", "ROOT", ""), 2, "key"),
        (("put", "ROOT", "", "TMP/x.npy"), 2, ""),
        (("get", "ROOT", "key", "--allow-pickle"), 2, ""),
        (("get", "ROOT", "key", "-o", "TMP/x.npy", "--bins", "3"), 2, ""),
        (("export", "ROOT", "frames", "TMP/x"), 3, ""),
        (("export", "ROOT", "ring", "TMP/x"), 3, ""),
        (("cp", "ROOT", "ring", "TMP/target"), 3, ""),
        (("ls", "TMP"), 3, ""),
        (("ls", "TMP/none"), 3, "doesn't exist"),
        (("get", "TMP/none", "key"), 3, ""),
        (("attach", "ROOT", "k", "TMP/none.pt"), 3, ""),
        (("repair", "TMP"), 3, ""),
        (("get", "ROOT", "complex", "o", "-o", "TMP/x.npy"), 3, ""),
        (("watch", "ROOT", "--interval", "0"), 2, ""),
        (("watch", "ROOT", "--count", "-1"), 2, ""),
        (("put", "ROOT", "key", "TMP/x.npy", "--expect-version", "-1"), 2, ""),
        (("ls", "ROOT", "--pending", "--sort", "size"), 2, ""),
        (("get", "ROOT"), 2, ""),
        (("diff", "ROOT"), 2, ""),
        (("rm", "ROOT"), 2, "Missing argument"),
        (("frobnicate",), 2, "No such command"),
        (("ls", "ROOT", "--bogus"), 2, "No such option"),
        (("cp", "ROOT", "a", "b", "c", "--prefix"), 2, "keep their names"),
        (("cp", "ROOT", "key", "ROOT"), 2, "copy 'key' onto itself: say another TARGET or TARGET_KEY"),
        (("cp", "ROOT", "k", "ROOT", "--prefix"), 2, "copy each key onto itself"),
        (("ls", "/dev/null"), 3, "not a folder"),
        (("info", "ROOT", "complx"), 4, "no key 'complx': did you mean 'complex'?"),
        (("get", "ROOT", "complx"), 4, "no key 'complx': did you mean 'complex'?"),
        (("get", "ROOT", "complex/w"), 4, "'complex' is a key, and 'w' a part of its value: say KEY and LEAF apart"),
        (("get", "ROOT", "zzz"), 4, "`memstore ls` lists the 4 that the store has"),
        (("rm", "ROOT", "key", "zzz"), 4, "nothing was deleted; --missing-ok leaves out what isn't there"),
        (("info", "ROOT", "waiting"), 4, "`memstore abort` gives it up"),
        ((), 2, ""),
        (("--help",), 0, ""),
        (("ls", "--help"), 0, ""),
    ],
)
def test_codes_and_words(filled: str, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    places = {"ROOT": filled, "TMP": str(tmp_path)}
    words = [re.sub("^(ROOT|TMP)", lambda match: places[match[1]], word) for word in arguments]
    said = call(*words, code=code)
    assert "Traceback" not in said and says in said
    if code > 2 and arguments[0] != "abort":  # which tells what it found
        assert said.startswith("memstore: ") and not API.search(said.replace("memstore: ", "")), said
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("rm", "ROOT", "run/*", "--prefix"), 0, "0 deleted"),
        (("clear", "ROOT", "run/*", "--yes"), 0, "0 deleted"),
        (("cp", "ROOT", "run/*", "TMP/target", "--prefix"), 0, "nothing was copied"),
        (("watch", "ROOT", "run/*", "--count=1"), 0, "no keys; 0.0 puts/s"),
        (("rm", "ROOT", "run/*"), 4, ""),
        (("cp", "ROOT", "run/*", "TMP/target"), 4, ""),
        (("verify", "ROOT", "run/*"), 4, ""),
    ],
)
def test_a_pattern_is_told_in_words_and_by_no_warning_of_python(
    filled: str, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    words = [word.replace("ROOT", filled).replace("TMP", str(tmp_path)) for word in arguments]
    found, output, errors = in_child(run_without_warnings, tuple(words))
    assert found == code and says in output
    hint = "a prefix is plain text, and not a pattern: 'run/' means all keys that start so"
    assert (f"memstore: {hint}" if not code else "not a pattern") in " ".join(errors.split())


def run_without_warnings(arguments: tuple[str, ...]) -> tuple[object, str, str]:
    """For a child. A warning is an error there."""
    warnings.simplefilter("error")
    return run(arguments)


REWORDED = """
x.npy isn't of the format 'torch': it looks like 'npy', so leave format= out
x.npy isn't of the format 'torch': it looks like 'npy', so leave --format out

k: which only allow_pickle=True can store
k: which only --allow-pickle can store

served in place: attach it with copy=True
served in place: attach it with --copy

get it there, or put it with attach(copy=True)
get it there, or put it with `memstore attach --copy`

x can't be written by this process: open it with mode 'r'
x can't be written by this process: this command writes to the store

/a is a snapshot, and no store: memstore.Snapshot reads it, store.attach serves it
/a is a snapshot, and no store: `memstore snapshot` looks into it, `memstore attach` serves it

'k' was replaced each time it was read, until the timeout: open the store with mode 'r+', which may wait
'k' was replaced each time it was read, until the timeout: try it again

the store has none yet; wait('k') waits for its first put
the store has none yet

[Errno 13] Permission denied: '/a'
/a: Permission denied

full: open the store once with a larger capacity=, which all processes then have; nothing
full: no command sets the capacity: a program that opens the store with a larger one sets it for all; nothing

as keys of one text have. put_many and delete_many take keys host by host with atomic=False; get such keys one by one
as keys of one text have: run the command once for each such text

no RDMA: serve it with transport='tcp', or with 'auto', which takes what there is
no RDMA: say --transport tcp, or auto

serve an empty folder, or one with durability='disk'
serve an empty folder, or a store on a disk, made with the durability 'disk'

readers too must be able to write its catalog's lock.mdb: create it with file_mode=0o660
readers too must be able to write its catalog's lock.mdb: whoever creates it must do so with the file mode 0o660

which this process can't use (no driver); pass device='cpu', or import what registers it
which this process can't use (no driver): run this where it is

/a.pt: format='torch' writes .pt files, and format='safetensors' doesn't
/a.pt: --format torch writes .pt files, and --format safetensors doesn't

/a.npy: numpy.save(path, store.get(key)) writes .npy files, and format='torch' doesn't
/a.npy: `memstore get ROOT KEY LEAF -o FILE` writes .npy files, and --format torch doesn't

a.npy: its header can't be read: the magic string is not correct; expected b'\\x93NUMPY', got b'what i': put
a.npy: its header can't be read: it doesn't begin as a .npy file does: put

'k' in the catalog: 'utf-8' codec can't decode byte 0xff in position 3: invalid start byte
'k' in the catalog: no text, for 0xff at byte 3

tensor: it is of torch.bfloat16, which numpy hasn't: write a .safetensors or .pt
it is of bfloat16, which numpy hasn't: write a .safetensors or .pt

value['layer'][0]['w']: it is no tensor
'layer/0/w': it is no tensor

/a.npy is an array of numpy, which isn't converted: load it with numpy.load
/a.npy is an array of numpy, which isn't converted: load it in a program

root is the path of a folder, and not ''
ROOT is the path of a folder, and not ''

say another address (--address; of memstore.join MEMSTORE_ADDRESS), or end it
say another address (--address), or end it

close the store everywhere, and run memstore.repair
close the store everywhere, and run `memstore repair`

/a/~: it doesn't exist: "~" is taken as a name: os.path.expanduser makes your home folder of it
/a/~: it doesn't exist: a shell takes "~" as your home folder only outside of quotes
"""


@pytest.mark.parametrize("pair", REWORDED.strip().split("\n\n"))
def test_a_message_is_reworded(pair: str) -> None:
    text, said = pair.split("\n")
    assert in_words(text) == said


def _texts(path: Path) -> Iterator[str]:
    """All texts in a file, with 'x' where values go."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "'x'" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.full
def test_what_is_reworded_is_what_the_library_says() -> None:
    package = Path(memstore.__file__).parent
    files = (path for path in package.rglob("*.py") if "cli" not in path.parts)
    texts = "\n".join(text for path in files for text in _texts(path))
    texts = texts.replace("'x' is the path of a folder", "root is the path of a folder")  # the name of an argument
    unsaid = [pattern for pattern, _ in WORDS if not re.search(pattern, texts, re.MULTILINE)]
    assert unsaid == [pattern for pattern, _ in WORDS if pattern.startswith(SYSTEM)]


def test_a_list_in_a_message_is_shown_in_lines(root: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "a": 1, "b": 2}, tmp_path / "x.pt")
    said = call("convert", f"{tmp_path}/x.pt", f"{tmp_path}/x.safetensors", code=3).splitlines()
    assert said[1:] == ["  'a': int, and no tensor", "  'b': int, and no tensor"]


def test_a_full_store_is_told_without_arguments(root: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(1 << 18))
    with memstore.open(root, capacity="1MiB"):
        pass
    said = " ".join(call("put", root, "x", str(tmp_path / "x.npy"), code=3).split())
    assert "no command sets the capacity" in said and not API.search(said), said


def test_wrong_usage_is_told_in_whole_words(filled: str) -> None:
    seen = in_terminal("ls", filled, "--sort", "weight")
    assert seen.code == 2
    assert " ".join(seen.screen).rstrip().endswith("is not one of 'key', 'size', 'age', 'version', 'type'.")


def test_a_bug_is_no_damage(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, with which Python ends, says that something was damaged."""
    monkeypatch.setattr("memstore.cli.stores.open_keyspace", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in call("gc", filled, code=3)


@pytest.mark.parametrize("arguments", [("ls",), ("info", "key"), ("stats",), ("ls", "--json")])
def test_a_pipe_that_ends_early_is_no_error(filled: str, arguments: tuple[str, ...]) -> None:
    command, *others = arguments
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, command, filled, *others], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_output_is_no_error(filled: str) -> None:
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *COMMAND, "ls", filled], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.full
def test_a_full_disk_for_the_output_is_not_the_stores(filled: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "get", filled, "key"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 3 and done.stderr == b"memstore: No space left on device\n"


@needs_root
def test_what_may_not_be_read_or_written_is_refused_in_words(filled: str, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o711)
    (tmp_path / "closed").mkdir(mode=0o700)
    code, _, errors = as_user(USER, [], run, ("ls", filled))
    assert code == 3 and "belongs to user" in errors or "can't be reached" in errors
    with memstore.open(filled) as store, pytest.raises(PermissionError) as caught:
        as_user(USER, [], _export, store.get("key"), str(tmp_path / "closed/x.safetensors"))
    assert caught.value.filename2 is None and "closed/x.safetensors" in str(caught.value)


def _export(value: object, path: str) -> None:
    with tempfile.TemporaryDirectory() as parent, memstore.open(f"{parent}/store") as store:
        store.put("key", value)
        store.export("key", path)


def test_a_store_that_may_only_be_read(filled: str) -> None:
    user = ["setpriv", "--reuid=65534", "--clear-groups", "--no-new-privs"] if os.geteuid() == 0 else []
    if user and (
        not shutil.which("setpriv") or subprocess.run([*user, sys.executable, "-c", ""], check=False).returncode
    ):
        pytest.skip("root may write anywhere, and no other user can run this Python")
    with memstore.open(filled) as store:
        store.abort("waiting", "a")
    for folder, _, files in os.walk(filled):
        for name in files:
            os.chmod(f"{folder}/{name}", 0o444)
        os.chmod(folder, 0o555)
    done = subprocess.run([*user, *COMMAND, "gc", filled], capture_output=True, text=True, check=False)
    for folder, _, files in os.walk(filled):
        os.chmod(folder, 0o700)
        for name in files:
            os.chmod(f"{folder}/{name}", 0o600)
    assert (
        done.returncode == 3
        and "Traceback" not in done.stderr
        and not API.search(done.stderr.replace("memstore: ", ""))
    )


def test_the_help_has_each_command_in_a_section_with_what_it_does() -> None:
    lines = call("--help").splitlines()
    entries = re.sub(
        r"\n {4,}", " ", "\n".join(lines[lines.index("Look:") :])
    ).splitlines()  # a text may take two lines
    described = dict(line.split(maxsplit=1) for line in entries if line.startswith("  "))
    assert set(described) == set(cli.commands)
    assert all(text.endswith(".") and not text.endswith("...") for text in described.values()), described
    assert all(len(line) <= 80 for line in lines)


# --- where there is no store, and what a repair says while it waits ---------------------------------------------------


def test_a_mistyped_root_names_the_store_beside_it(tmp_path: Path) -> None:
    memstore.open(tmp_path / "weights").close()
    said = " ".join(call("gc", f"{tmp_path}/wieghts", code=3).split())
    assert said == (
        f"memstore: there is no store at {tmp_path}/wieghts: the folder doesn't exist; did you mean {tmp_path}/weights?"
    )
    assert not (tmp_path / "wieghts").exists()


def test_a_folder_of_stores_names_them(tmp_path: Path) -> None:
    memstore.open(tmp_path / "store").close()
    text = f"{tmp_path} is no store: it has no memstore.json; mode 'a' creates one in an empty folder"
    assert message_without_store(text, "ls") == (
        f"there is no store at {tmp_path}: the folder has 'store', and no memstore.json; did you mean {tmp_path}/store?"
    )


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("ls", "`memstore put`, or a program that opens it, makes one"),
        ("status", "`memstore serve` makes one, and serves it"),
        *((command, f"`memstore {command}` needs one: check the path") for command in ("repair", "verify", "gc", "rm")),
    ],
)
def test_the_advice_fits_the_command(tmp_path: Path, command: str, advice: str) -> None:
    (tmp_path / "empty").mkdir()
    found = " ".join(call(command, f"{tmp_path}/empty", *(["key"] if command == "rm" else []), code=3).split())
    assert found == f"memstore: there is no store at {tmp_path}/empty: the folder is empty; {advice}"


@pytest.mark.parametrize(
    ("command", "arguments", "advice"),
    [
        ("ls", (), "check the path"),
        ("verify", (), "check the path"),
        ("put", ("key", "FILE"), "check the path, or create ROOT/at first"),
    ],
)
def test_a_missing_parent_is_named(tmp_path: Path, command: str, arguments: tuple[str, ...], advice: str) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    words = [f"{tmp_path}/x.npy" if word == "FILE" else word for word in arguments]
    found = " ".join(call(command, f"{tmp_path}/none/at/all", *words, code=3).split())
    what = f"there is no store at {tmp_path}/none/at/all: the folder {tmp_path}/none doesn't exist"
    assert found == f"memstore: {what}; {advice.replace('ROOT', f'{tmp_path}/none')}"


def test_a_mistyped_parent_names_the_store(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    memstore.open(tmp_path / "runs/first").close()
    text = f"{tmp_path}/rusn/first: the parent folder {tmp_path}/rusn doesn't exist: create it first"
    assert (message_without_store(text, "ls") or "").endswith(f"; did you mean {tmp_path}/runs/first?")


@pytest.mark.parametrize("arguments", [("get", "policy", "STORE"), ("rm", "policy", "STORE")])
def test_a_store_that_is_not_said_first_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    memstore.open(tmp_path / "runs").close()
    words = [word.replace("STORE", f"{tmp_path}/runs") for word in arguments]
    said = " ".join(call(*words, code=3).split())
    assert said.endswith(f"; '{tmp_path}/runs' is a store: say it first, as ROOT")


@pytest.mark.parametrize("arguments", [("STORE", "FILE", "key"), ("FILE", "key", "STORE"), ("FILE", "STORE", "key")])
@pytest.mark.parametrize("command", ["put", "attach"])
def test_a_file_in_the_place_of_another_argument_is_named(
    tmp_path: Path, command: str, arguments: tuple[str, ...]
) -> None:
    memstore.open(tmp_path / "runs").close()
    np.save(tmp_path / "x.npy", np.ones(3))
    places = {"STORE": f"{tmp_path}/runs", "FILE": f"{tmp_path}/x.npy"}
    said = " ".join(call(command, *(places.get(word, word) for word in arguments), code=2).split())
    assert said.endswith("say ROOT, KEY, and then the file") and f"{tmp_path}/x.npy" in said


def test_a_path_within_a_store_names_it(tmp_path: Path) -> None:
    root = f"{tmp_path}/runs"
    memstore.open(root).close()
    said = " ".join(call("ls", f"{root}/segments", code=3).split())
    assert said == f"memstore: there is no store at {root}/segments: it lies within the store {root}: say that as ROOT"
    said = " ".join(call("get", f"{root}/model/w", "b", code=3).split())
    assert said.endswith(f"it lies within the store {root}: say that as ROOT, and 'model/w' as the KEY")


def test_a_snapshot_in_the_place_of_a_store_and_a_store_in_that_of_a_snapshot(tmp_path: Path) -> None:
    memstore.open(tmp_path / "runs").close()
    memstore.Snapshot.take(str(tmp_path / "step-1"), {"progress": memstore.StateDict(step=1)})
    said = " ".join(call("ls", f"{tmp_path}/step-1", code=3).split())
    assert said.endswith("is a snapshot, and no store: `memstore snapshot` looks into it, `memstore attach` serves it")
    said = " ".join(call("snapshot", "ls", f"{tmp_path}/runs", code=3).split())
    assert said.endswith("is a store, and no snapshot: `memstore ls` lists its keys")


def test_a_home_folder_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'takes "~" as your home folder only outside of quotes' in " ".join(call("ls", "~/run", code=3).split())


def test_other_messages_are_left_as_they_are() -> None:
    assert message_without_store("/a is not a folder", "ls") is None
    assert message_without_store("a: the parent folder b doesn't exist: create it first", "ls") is not None


def test_a_repair_says_for_whom_it_waits(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.cli.stores._PATIENCE", 0.01)
    with memstore.open(root):
        said = " ".join(call("repair", root, "--timeout", "0.11", code=3).split())
    assert said.count("to close the store") == 2 and "It waits up to 0.1 s more" in said


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_store_without_its_settings_is_damaged(tmp_path: Path, is_gone: bool) -> None:
    (tmp_path / "one").mkdir()
    memstore.open(tmp_path / "two").close()
    root, settings = f"{tmp_path}/one", tmp_path / "one/memstore.json"
    with memstore.open(root) as store:
        store.put("key", np.ones(3))
    if is_gone:
        settings.unlink()
    else:
        settings.write_bytes(b"")
    what = f"{settings}: missing: put it back, or" if is_gone else f"{settings} is foreign or damaged: "
    assert what in " ".join(call("verify", root, code=1).split())
    assert call_json("verify", root, code=1)["damaged"][0].startswith(what)
    said = " ".join(call("ls", root, code=3).split())
    assert f"{settings} is " in said and "put" in said and "did you mean" not in said
    assert ("run `memstore repair`" in said) is is_gone
    call("verify", f"{tmp_path}/none", code=3)
