"""How a store is removed, moved or made anew under those who have it open."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch

import memstore
from tests.inside import root_of

INLINE, SEGMENT = torch.arange(8), torch.arange(5000)


def make(root: str) -> None:
    with memstore.open(root) as store:
        store.put_many({"key": INLINE, "segment": SEGMENT})


def make_anew(root: str) -> None:
    shutil.rmtree(root)
    make(root)


def empty_and_make_anew(root: str) -> None:
    """What remains possible where the folder is a mount point."""
    for name in os.listdir(root):
        shutil.rmtree(f"{root}/{name}") if os.path.isdir(f"{root}/{name}") else os.unlink(f"{root}/{name}")
    make(root)


def move_and_make_anew(root: str) -> None:
    os.rename(root, f"{root}.aside")
    make(root)


def begin_anew(root: str) -> None:
    with memstore.open(root, "w") as store:
        store.put_many({"key": INLINE, "segment": SEGMENT})


def move_the_parent(root: str) -> None:
    os.rename(os.path.dirname(root), f"{os.path.dirname(root)}.aside")


def put_a_file_there(root: str) -> None:
    shutil.rmtree(root)
    Path(root).write_text("text")


def remove_slowly(root: str) -> None:
    """The bytes of values first."""
    for name in sorted(os.listdir(f"{root}/segments")):
        os.unlink(f"{root}/segments/{name}")
        time.sleep(0.05)
    shutil.rmtree(root)


WAYS = [
    shutil.rmtree, make_anew, empty_and_make_anew, move_and_make_anew, move_the_parent, put_a_file_there, begin_anew,
    memstore.destroy,
]  # fmt: skip


def move_away(store: memstore.Store) -> None:
    os.rename(store.root, f"{store.root}.aside")
    look_again(store)


def look_again(store: memstore.Store) -> None:
    """As if its process had done nothing for a tenth of a millisecond."""
    while time.monotonic() <= root_of(store).look_again:
        pass
