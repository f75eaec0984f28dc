"""Memory as it is on a host that has been in use: the page cache is full of files, and free memory lies in pieces.

    python -m tests.benchmarks large-fresh snapshot dcp remote replay-write --crowded
    python -m tests.benchmarks.crowding -- COMMAND ...     # runs anything meanwhile

In such memory a huge page has to be made room for, or be taken back from the host of a virtual machine. What is fast
only on a machine that was just started, or in memory that was just given back, shows here.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import machine

_SHARE = 1 / 3  # of all memory: what is to be in the page cache
_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)  # bytes of files
_LEFT = 4 << 30  # bytes of memory that stay available


@contextmanager
def crowded(disk: Path, *, share: float = _SHARE) -> Iterator[str]:
    """Fills the page cache with files in a folder on a disk, which go afterwards. Yields what memory is like then.

    Twice as much is written, and every second file removed: so the room between what stays comes in all sizes. And no
    contestant finds memory that was just given back (`machine.back_memory`).

    Raises SystemExit where memory or disk have no room for it.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = int(total * share)
    if available() < wanted + _LEFT or shutil.disk_usage(disk).free < 3 * wanted:
        raise SystemExit(
            f"--crowded puts {wanted / 2**30:.0f} GiB of files into the page cache: there is no room for it"
        )
    folder = Path(tempfile.mkdtemp(prefix="memstore-crowding-", dir=disk))
    try:
        _fill(folder, wanted)
        _read(folder)
        with machine.not_backed():
            yield f"{_meminfo('Cached') / 2**30:.0f} GiB of files in the page cache, in pieces; not backed before a put"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, wanted: int) -> None:
    chance = random.Random(0)
    content = os.urandom(max(_SIZES))
    kept, number = 0, 0
    while kept < wanted and available() > _LEFT:
        pair = [folder / f"{number}", folder / f"{number + 1}"]
        size = chance.choice(_SIZES)
        for path in pair:
            path.write_bytes(content[:size])
        pair[1].unlink()
        kept, number = kept + size, number + 2


def _read(folder: Path) -> None:
    scratch = bytearray(max(_SIZES))
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            file.readinto(scratch)


def available() -> int:
    """Bytes of memory that the kernel would find for a process."""
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] != ["--"] or len(arguments) < 2:
        print("usage: python -m tests.benchmarks.crowding -- COMMAND ...", file=sys.stderr)
        return 2
    with crowded(Path(os.environ.get("TMPDIR", "/var/tmp"))) as what:
        print(what, file=sys.stderr, flush=True)
        return subprocess.run(arguments[1:]).returncode


if __name__ == "__main__":
    sys.exit(main())
