"""The wheel and the sdist of this checkout, built as a release builds them, and environments to install them into."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Archives:
    wheel: Path
    sdist: Path

    @property
    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as file:
            return set(file.namelist())

    def read(self, name: str) -> str:
        """Of the wheel's files."""
        with zipfile.ZipFile(self.wheel) as file:
            return file.read(name).decode()

    @property
    def in_sdist(self) -> set[str]:
        """Without the folder that all are in."""
        with tarfile.open(self.sdist) as file:
            return {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}

    def unpacked(self, folder: Path) -> Path:
        with tarfile.open(self.sdist) as file:
            file.extractall(folder, filter="data")
        (there,) = folder.iterdir()
        return there


def build(folder: Path) -> Archives:
    """The sdist of this checkout, and the wheel out of that sdist: so it has all that a wheel takes."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(command, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Archives(wheel, sdist)


def install(archive: Path, folder: Path) -> Path:
    """Makes an environment with nothing but what the archive has, and, behind it, what is installed here.

    So it shows what the archive lacks, and downloads nothing. Returns its python.
    """
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    here = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    own = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (own / "behind.pth").write_text("\n".join(here) + "\n")  # plain paths: the .pth files there are not read
    run([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(archive)], folder)
    return python


def run(command: list[str], folder: Path, timeout: float = 250, **variables: str) -> str:
    """Runs it there, with nothing of this checkout on the path. Returns what it wrote."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = {**clean, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
