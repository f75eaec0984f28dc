"""What users download: the wheel and the sdist hold what they should, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import memstore
from tests.packaging.archives import ROOT, Archives, build, install, run

pytest.importorskip("build")  # comes with the extra `test`
pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")

INFO = f"memstore_torch-{memstore.__version__}.dist-info"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    return build(tmp_path_factory.mktemp("archives"))


def tracked() -> set[str]:
    """The files of the checkout that git has, and that are still there."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a checkout of git")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_the_wheel_has_the_package_and_nothing_else(archives: Archives) -> None:
    package = {name for name in archives.in_wheel if not name.startswith(f"{INFO}/")}
    assert all(name.startswith("memstore/") for name in package)
    assert "memstore/py.typed" in package, "the types are not seen by who installs it"
    lacking = {name for name in tracked() if name.startswith("memstore/")} - package
    assert not lacking, f"not in the wheel: {sorted(lacking)}"
    assert not [name for name in package if "__pycache__" in name or name.endswith(".pyc")]
    assert f"{INFO}/licenses/LICENSE" in archives.in_wheel


def test_the_wheel_says_what_it_needs(archives: Archives) -> None:
    said = HeaderParser().parsestr(archives.read(f"{INFO}/METADATA"))
    assert (said["Name"], said["Version"]) == ("memstore-torch", memstore.__version__)
    assert {line.partition(", ")[0] for line in said.get_all("Project-URL", [])} >= {"Repository", "Changelog"}
    assert said["License-Expression"] == "BSD-3-Clause"
    needed = [Requirement(line) for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {one.name for one in needed} == {"torch", "tensordict", "lmdb", "msgspec", "xxhash", "numpy"}
    assert {"cli", "cluster", "test"} <= set(said.get_all("Provides-Extra", []))
    assert "memstore = memstore.cli:main" in archives.read(f"{INFO}/entry_points.txt")


def test_its_readme_has_links_that_an_index_can_follow(archives: Archives) -> None:
    said = HeaderParser().parsestr(archives.read(f"{INFO}/METADATA"))
    assert said["Description-Content-Type"] == "text/markdown"
    read_me = said.get_payload()
    images, links = (set(re.findall(mark + r"\[[^\]]*\]\(([^)]+)\)", read_me)) for mark in ("!", "(?<!!)"))
    urls = dict(line.split(", ", 1) for line in said.get_all("Project-URL", []))
    repository = urls["Repository"]
    assert images and all(one.startswith(f"{repository}/raw/main/docs/images/") for one in images), images
    assert len(links) > 10 and all(one.startswith("https://") for one in links), links
    for one in images | links:
        path = re.sub(f"^{repository}/(raw|blob)/main/", "", one).partition("#")[0]
        assert path.startswith("https://") or (ROOT / path).exists(), one


def test_the_sdist_has_all_that_git_has(archives: Archives) -> None:
    """The tests, too, with what they read: who packages memstore runs them out of it."""
    lacking = tracked() - archives.in_sdist
    assert not lacking, f"not in the sdist: {sorted(lacking)}"
    strange = {name.partition("/")[0] for name in archives.in_sdist} - {name.partition("/")[0] for name in tracked()}
    assert strange == {"PKG-INFO"}


@pytest.mark.full
def test_the_index_takes_the_archives(archives: Archives) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", str(archives.wheel), str(archives.sdist)]
    assert run(command, ROOT).count("PASSED") == 2


IMPORT_ALL = """
import importlib, pkgutil, sys, memstore
assert memstore.__file__.startswith(sys.prefix), memstore.__file__
others = set()
for found in pkgutil.walk_packages(memstore.__path__, "memstore.", onerror=lambda name: None):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert not error.name.startswith("memstore"), error
            others.add(error.name)
print(sorted(others), "memstore.cli.commands" in sys.modules)
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_works_where_it_is_installed(kind: str, archives: Archives, tmp_path: Path) -> None:
    python = install(getattr(archives, kind), tmp_path / "environment")
    absent, has_commands = run([str(python), "-c", IMPORT_ALL], tmp_path).rsplit(maxsplit=1)
    assert has_commands == "True" and "memstore" not in absent
    example = archives.unpacked(tmp_path / "unpacked") / "examples" / "put_get.py"
    assert "got version 1 12.0" in run([str(python), str(example)], tmp_path)
    command = str(python.parent / "memstore")
    assert memstore.__version__ in run([command, "--version"], tmp_path)
    (tmp_path / "stores").mkdir()
    assert "get of 1 KiB" in run([command, "bench", str(tmp_path / "stores")], tmp_path)


@pytest.mark.full
def test_the_tests_run_out_of_the_sdist(archives: Archives, tmp_path: Path) -> None:
    there = archives.unpacked(tmp_path)
    some = ["tests/engine/format/test_record.py", "tests/store/test_put_get.py", "tests/documents/test_references.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some]
    assert " passed" in run(command, there, PYTHONPATH=str(there))
