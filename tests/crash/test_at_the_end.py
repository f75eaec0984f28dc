"""The end of an interpreter that still has stores open: nothing is printed, whatever is taken apart first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What `os` has goes last of all, when the modules of memstore have lost their names: they were imported later.
PROGRAM = """
import builtins, os, sys
import torch
import memstore

folder = sys.argv[1]
store = memstore.open(f"{folder}/store")
store.put("key", {"w": torch.ones(5000), "x": 1})
snapshot = memstore.Snapshot.take(f"{folder}/taken", {"state": memstore.StateDict(w=torch.ones(3000))})
pending = memstore.Snapshot.async_take(f"{folder}/pending", {"state": memstore.StateDict(w=torch.ones(3000))})
pending.wait()
replay = memstore.ReplayBuffer(store, "replay", {"x": torch.zeros(3)}, capacity=8)
dataset = store.create_dataset("rows", {"x": torch.zeros(3)}, capacity=8)
for rows in (replay, dataset):
    rows.extend({"x": torch.ones(2, 3)})
os.kept = [store, store.get("key"), store.view("key"), store.ref("key"), store.keys()]
os.kept += [snapshot, snapshot.get_manifest(), memstore.Snapshot(f"{folder}/taken"), snapshot.view(), pending]
os.kept += [replay, replay.sample(2), dataset, dataset[:2]]
builtins.modules = [os, *(module for name, module in sys.modules.items() if name.startswith("memstore"))]
"""


def test_nothing_is_said(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
