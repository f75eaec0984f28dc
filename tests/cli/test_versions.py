"""Earlier versions and quotas on the command line."""

from __future__ import annotations

import json

import torch

import memstore
from tests.cli.test_commands import call


def test_versions_are_listed_and_shown(root: str) -> None:
    with memstore.open(root) as store:
        versions = [store.put("k", torch.full((2, 3), number), history=2) for number in range(3)]
    listed = json.loads(call("versions", root, "k", "--json"))
    assert [one["version"] for one in listed] == versions[1:]
    assert str(versions[1]) in call("versions", root, "k")
    shown = json.loads(call("get", root, "k", "--version", str(versions[1]), "--json"))
    assert shown["version"] == versions[1] and len(shown["leaves"]) == 1
    path = f"{root}.npy"
    call("get", root, "k", "--version", str(versions[1]), "-o", path)
    call("get", root, "k", "--version", str(versions[0]), code=3)
    call("versions", root, "none", code=4)


def test_quotas_are_set_and_listed(root: str) -> None:
    with memstore.open(root) as store:
        store.put("a/1", torch.zeros(20_000))
    assert "no quotas" in call("quota", root)
    call("quota", root, "a/", "1MiB")
    (one,) = json.loads(call("quota", root, "--json"))
    assert (one["prefix"], one["quota"]) == ("a/", 1 << 20) and one["used"] > 80_000
    call("quota", root, "a/", code=2)
    call("quota", root, "a/", "--end")
    assert "no quotas" in call("quota", root)


def test_the_spill_folder_is_set_and_shown(root: str) -> None:
    with memstore.open(root, capacity="20MiB") as store:
        store.put("a", torch.zeros(1 << 21))
    assert "no folder is set" in call("spill", root)
    call("spill", root, f"{root}.spill")
    with memstore.open(root) as store:
        store.put_many({"b": torch.zeros(1 << 21), "c": torch.zeros(1 << 20)})
    found = json.loads(call("spill", root, "--json"))
    assert found["values"] == 1 and found["nbytes"] > 1 << 23 and found["folder"].startswith(f"{root}.spill/")
    (first, *others) = json.loads(call("ls", root, "--json"))
    assert first["spilled"] and not any(one["spilled"] for one in others)
    assert "on disk" in call("ls", "-l", root) and "moved to a disk" in call("info", root, "a")
    assert "spilled" in call("stats", root)
