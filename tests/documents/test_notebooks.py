"""The notebooks run as a reader runs them, cell by cell, and show what they printed when they last did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents.pages import ROOT, is_missing

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
WRITE = "%%writefile "


def cells(notebook: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def code(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def as_program(notebook: Path) -> str:
    """The cells in their order. A cell that writes a file does so by Python."""
    parts: list[str] = []
    for text in map(code, cells(notebook)):
        name, _, rest = text.removeprefix(WRITE).partition("\n")
        parts.append(f"open({name!r}, 'w').write({rest!r})" if text.startswith(WRITE) else text)
    return "\n".join(parts)


def test_there_are_notebooks() -> None:
    assert [one.stem for one in NOTEBOOKS] == ["checkpoint-and-resume", "dataset-and-replay", "share-weights"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_shows_a_whole_run_without_an_error(notebook: Path) -> None:
    assert [cell["execution_count"] for cell in cells(notebook)] == list(range(1, len(cells(notebook)) + 1))
    outputs = [output for cell in cells(notebook) for output in cell["outputs"]]
    assert outputs and all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    for target in (text.split(")")[0] for cell in cells(notebook, "markdown") for text in code(cell).split("](")[1:]):
        assert (notebook.parent / target).is_file(), target


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook: Path, tmp_path: Path) -> None:
    if "matplotlib" in as_program(notebook) and is_missing("matplotlib"):
        pytest.skip("matplotlib isn't installed")
    (tmp_path / "notebook.py").write_text(as_program(notebook))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "HOME": str(tmp_path)}
    command = [sys.executable, "-W", "ignore::UserWarning", "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
