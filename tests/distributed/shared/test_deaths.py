"""A host of a store on shared storage dies, with its state folder: what it has put is read from its folder."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.serving import Cluster
from memstore.distributed.serving.supervision import holders, is_served
from memstore.engine import state_folder
from tests.distributed.serving.agents import eventually
from tests.distributed.shared.pairs import Pair
from tests.inside import root_of

BIG = torch.arange(50_000, dtype=torch.float32)


def die(pair: Pair, number: int) -> None:
    """All processes of a host end at once, and its state is lost. A person removes it."""
    store = pair.stores[number]
    with pair.on(number):
        state = state_folder(pair.root)
    store.close()
    for pid in holders(f"{state}/agent.lock"):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_served(state), "the agent ends")
    shutil.rmtree(pair.state(number))
    with pair.on(0):
        Cluster(pair.root).remove(pair.addresses[number])


def recovered(pair: Pair) -> dict[str, str]:
    """Names of what is lost, once all is recovered."""
    eventually(lambda: not pair.status().recovering, "all is recovered")
    return dict(pair.status().lost)


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.iterdir())}


def test_what_a_dead_host_has_put_is_read_from_its_folder(folder: Path) -> None:
    with Pair(folder, grace=60, hosts=3) as pair:
        a, b, c = pair.stores
        b.put("run/kept", BIG)
        b.put("run/replaced", BIG)
        b.put("run/replaced", BIG + 1)
        b.put("run/deleted", BIG)
        b.delete("run/deleted")
        b.put("run/small", BIG)
        b.put("run/small", 1)
        b.put("flat", BIG + 2)
        b.put_many({"run/one": BIG + 3, "run/two": BIG + 4})
        c.put("run/theirs", BIG + 5)
        b.put("run/over", BIG)
        c.put("run/over", BIG + 6)
        c.put("mine/first", 1)
        b.put("mine/lent", BIG + 7)
        whole = {
            "flat": BIG + 2,
            "mine/lent": BIG + 7,
            "run/kept": BIG,
            "run/one": BIG + 3,
            "run/over": BIG + 6,
            "run/replaced": BIG + 1,
            "run/theirs": BIG + 5,
            "run/two": BIG + 4,
        }
        versions = {key: a.info(key).version for key in whole}
        before = a.view("run/kept")
        dead, state = Path(root_of(b).segments), root_of(b).state
        files = content(dead)
        die(pair, 1)
        lost = recovered(pair)
        for store in (a, c):
            assert sorted(key for key in store if key != "mine/first") == sorted(whole)
            for key, value in whole.items():
                assert torch.equal(store.get(key), value) and store.info(key).version == versions[key], key
            for key in ("run/deleted", "run/small"):
                with pytest.raises(memstore.KeyNotFoundError):
                    store.get(key)
        assert "run" in lost and "flat" not in lost and "mine/lent" not in lost
        assert a.info("run/kept").recovered and not os.path.exists(state)
        assert content(dead) == files, "it is only read"

        # what was replaced since, by others, stays for who reads it
        a.put("run/kept", BIG + 9)
        assert torch.equal(before[-5:], BIG[-5:]) and torch.equal(c.get("run/kept"), BIG + 9)
        c.delete("run/one")
        assert content(dead) == files

        # its next life takes the place, once the others have copied what they name there
        pair.join(1)
        eventually(lambda: not dead.exists(), "the folder is removed")
        for store in (a, c):
            for key, value in (*whole.items(), ("run/kept", BIG + 9)):
                if key not in ("run/one", "run/kept"):
                    assert torch.equal(store.get(key), value) and store.info(key).version == versions[key], key
            assert torch.equal(store.get("run/kept"), BIG + 9) and "run/one" not in store
