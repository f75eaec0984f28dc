"""A user's file passes the strict checks of pyright and mypy; and uses every public call."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import memstore

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What no file of a single process calls, or what is returned and never named.
NOT_CALLED = {"serve"}


def test_the_file_uses_every_public_name_and_every_method_of_a_store() -> None:
    text = (HERE / "user.py").read_text()
    names = {name for name in memstore.__all__ if not name.endswith("Error")} - NOT_CALLED
    assert not [name for name in sorted(names) if f"memstore.{name}" not in text]
    methods = {name for name in dir(memstore.Store) if not name.startswith("_")} - {"close", "set_policy"}
    assert not [name for name in sorted(methods) if not re.search(rf"\bstore\.{name}\b", text)]


NAMED: dict[str, Any] = {"snapshot": memstore.Snapshot, "manager": memstore.CheckpointManager}
NAMED |= {"cluster": memstore.Cluster, "follower": memstore.Follower, "pin": memstore.Pin}


@pytest.mark.parametrize("variable", NAMED)
def test_the_file_uses_every_method_of_the_other_classes(variable: str) -> None:
    cls = NAMED[variable]
    text, _, of_tasks = (HERE / "user.py").read_text().partition("async def tasks")
    assert of_tasks
    names = {name for name in dir(cls) if not name.startswith("_")}
    used = re.findall(rf"\b(?:{variable}|memstore\.{cls.__name__})\.(\w+)", text)
    assert sorted(names - set(used)) == []


def test_the_file_uses_what_tasks_call_most() -> None:
    of_tasks = (HERE / "user.py").read_text().partition("async def tasks")[2]
    wanted = ["memstore.aio.open(", "memstore.aio.follow("]
    wanted += [f"await store.{name}(" for name in ("put", "get", "view", "wait")]
    assert [name for name in wanted if name not in of_tasks] == []


def _checked(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)


@pytest.fixture(params=["pyright", "basedpyright"])
def pyright(request: pytest.FixtureRequest) -> str:
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} isn't installed")
    return request.param


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_pyright_finds_nothing_in_it(pyright: str, tmp_path: Path) -> None:
    shutil.copy(HERE / "user.py", tmp_path / "user.py")
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.10", "extraPaths": [str(ROOT)]}
    settings["include"] = ["user.py"]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = _checked([sys.executable, "-m", pyright, "--outputjson", "--pythonpath", sys.executable], tmp_path)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    lines = [f"{one['range']['start']['line'] + 1}: {one['message']}" for one in found["generalDiagnostics"]]
    assert lines == []


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_mypy_finds_nothing_in_it_and_all_mistakes(tmp_path: Path) -> None:
    if find_spec("mypy") is None:
        pytest.skip("mypy isn't installed")
    for name in ("user.py", "wrong.py"):
        shutil.copy(HERE / name, tmp_path / name)
    flags = ["--strict", "--python-version", "3.10", "--follow-imports=silent", "--no-error-summary"]
    done = _checked([sys.executable, "-m", "mypy", *flags, "user.py", "wrong.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), "wrong.py has an error in each line that says so"
