"""A store that an earlier version wrote is read, verified, repaired and written by this one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors
import torch

import memstore
from memstore.engine.root.folder import FORMAT, decode_settings
from tests.children import Child, Wire
from tests.kept.kept import archive, put_parts, sharded_values, unpack, values
from tests.support.equality import assert_same

FORMATS = range(1, FORMAT + 1)
DIGESTS = {  # SHA-256 of the archives
    1: "9b00443d88e82615aa3742d029c8522adabe596e982d6a99196a5772fa843621",
    2: "0bc11460a134f784c339581cc0bc6e29e9c465567b73ee6ffccde8cacf71b6a8",
}


@pytest.fixture(params=FORMATS)
def number(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def kept(number: int, root: str) -> str:
    unpack(number, root)
    return root


def test_every_format_is_kept(number: int) -> None:
    assert archive(number).exists(), "python -m tests.kept.kept makes it; then it is kept for ever"


def test_what_is_kept_never_changes(number: int) -> None:
    """A store that was made again would show only that this version reads what this version writes."""
    assert hashlib.sha256(archive(number).read_bytes()).hexdigest() == DIGESTS[number]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_it_is_read(kept: str, number: int, mode: str) -> None:
    with memstore.open(kept, mode, verify=True) as store:
        assert sorted(store) == sorted(values(number))
        for key, value in values(number).items():
            assert_same(value, store.get(key))
            assert store.info(key).key == key


def test_it_is_whole(kept: str, number: int) -> None:
    with memstore.open(kept) as store:
        report = store.verify()
        assert report.ok and report.checked == len(values(number)) and not report.damaged


def test_it_is_written(kept: str) -> None:
    with memstore.open(kept) as store:
        before = store.version("segment")
        assert store.put("segment", torch.ones(5000)) > before
        store.delete("large")
        store.put("new", torch.ones(1 << 19))
        assert store.gc() >= 0
        assert (store.get("segment") == 1).all() and "large" not in store


def test_it_is_repaired_from_its_files(kept: str, number: int) -> None:
    (Path(kept) / "catalog" / "local" / "data.mdb").write_bytes(b"\xff" * 8192)
    report = memstore.repair(kept)
    with memstore.open(kept, verify=True) as store:
        assert sorted(store) == sorted(report.recovered)
        assert len(store) >= (9 if number == 1 else 13)
        for key in store:
            assert_same(values(number)[key], store.get(key))


def test_its_files_are_read_without_memstore(kept: str) -> None:
    found = {}
    for path in (Path(kept) / "segments").iterdir():
        with safetensors.safe_open(path, "pt") as file:
            if " state=live " in file.metadata()["memstore"]:
                found[file.metadata()["key"]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(found["tensordict"]["x"], values()["tensordict"]["x"])
    assert torch.equal(found["state"]["layer.weight"], values()["state"]["layer.weight"])


def test_ranks_go_on_with_it(kept: str, number: int) -> None:
    """A store of format 1 becomes one of format 2 then."""
    with memstore.open(kept, verify=True) as store:
        before = {key: store.version(key) for key in store}
        assert store.pending() == ()
        put_parts(store, "next")
        for key, value in sharded_values().items():
            assert store.version(key) > before.get(key, 0)
            assert_same(value, store.get(key))
        assert store.verify().ok
    assert decode_settings((Path(kept) / "memstore.json").read_bytes(), "it").features == ("sharded",)


def test_an_earlier_version_refuses_it(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(2, root)
    monkeypatch.setattr("memstore.engine.root.folder.FORMAT", 1)
    for call in (lambda: memstore.open(root), lambda: memstore.open(root, "r"), lambda: memstore.repair(root)):
        with pytest.raises(memstore.FormatVersionError) as raised:
            call()
        assert str(raised.value) == (
            f"{root}/memstore.json has format 2, and this version of memstore reads up to 1: upgrade memstore"
        )


def test_a_feature_of_a_later_version_is_refused(scratch: str) -> None:
    unpack(2, scratch)
    path = Path(scratch) / "memstore.json"
    path.write_text(path.read_text().replace('"sharded"', '"sharded", "braided"'))
    with pytest.raises(memstore.FormatVersionError, match="has the feature braided, which this version .* upgrade it"):
        memstore.open(scratch)


def test_a_reader_of_before_sees_versions_that_are_kept_since(kept: str) -> None:
    """It has opened a store without the table of these, and may not make one."""
    with memstore.open(kept, "r") as reader:
        before = reader.version("inline")
        assert reader.versions("inline") == (before,)
        with Child(_put_with_history, kept) as child:
            after = child.receive()
        assert reader.versions("inline") == (before, after)
        assert_same(values()["inline"], reader.get("inline", version=before))
    with memstore.open(kept) as store:
        assert store.verify().ok


def _put_with_history(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        wire.send(store.put("inline", 1, history=2))
