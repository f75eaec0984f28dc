"""What `serve` and its launchers tell each other, and what a launcher does without Monarch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memstore
from memstore.distributed.meshes.launching import Launching, ips_in
from memstore.distributed.meshes.messages import (
    LONGEST,
    VERSION,
    HostFailed,
    HostSeen,
    LookAtRoot,
    OrderDone,
    StartAgent,
    Started,
    Try,
    Undo,
    decode_order,
    decode_report,
    encode,
)
from memstore.errors import CorruptionError
from tests.distributed.serving.agents import Agents


def test_orders_and_reports_come_back_as_they_were() -> None:
    for order in (
        LookAtRoot(VERSION, "/dev/shm/x"),
        Try(("tcp://10.0.0.1:1",), b"t" * 16, 5),
        StartAgent("10.0.0.1", 0, "", ("tcp://10.0.0.2:7411",), True, b"s" * 32, "auto", True, False, 10.0, None, 9),
    ):
        assert decode_order(encode(order)) == order
    for report in (OrderDone(), HostFailed("host", "NotServedError", "why")):
        assert decode_report(encode(report)) == report


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for decode in (decode_order, decode_report):
        try:
            decode(data)
        except CorruptionError as error:
            assert "another version" in str(error)


def test_a_message_that_would_be_too_large_is_refused_before_it_is_sent() -> None:
    with pytest.raises(
        ValueError, match=r"a message of 1,\d\d\d,\d\d\d bytes .* may have 1,048,576: serve fewer hosts"
    ):
        encode(Try(("tcp://10.0.0.1:1" * 100,) * (LONGEST // 1600), b"", 0))


def test_too_long_a_root_or_secret_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(ValueError, match="a root of 5,000 characters"):
        memstore.serve(None, "/" + "x" * 4999)
    for secret in ("short", "x" * 4097):
        with pytest.raises(memstore.SecretError, match="the secret that was given has .* 32 to 4096"):
            memstore.serve(None, "/dev/shm/never", secret=secret)
    with pytest.raises(ValueError, match="transport 'pigeon' is none of"):
        memstore.serve(None, "/dev/shm/never", transport="pigeon")  # pyright: ignore[reportArgumentType]


def test_a_launcher_answers_another_version_with_what_is_here(scratch: str) -> None:
    for order in (encode(LookAtRoot(VERSION + 1, scratch)), b"\x92\x07\xc0"):
        failed = decode_report(Launching().answer(order))
        assert isinstance(failed, HostFailed) and failed.error == "FormatVersionError", failed
        assert f"memstore {memstore.__version__}" in failed.text
    assert not Path(scratch).exists()


def test_a_launcher_looks_and_has_nothing_to_undo(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE_ADDRESS", "tcp://10.9.8.7:4242")
    launching = Launching(("192.0.2.1",))
    found = decode_report(launching.answer(encode(LookAtRoot(VERSION, scratch))))
    assert isinstance(found, HostSeen) and (found.ips, found.port, found.is_named) == (("10.9.8.7",), 4242, True)
    assert found.roster is None and not found.is_served and found.secret == b""
    assert Path(scratch, "memstore.json").exists()
    assert decode_report(launching.answer(encode(Undo()))) == OrderDone()
    assert not Path(scratch).exists()  # it has made that itself
    monkeypatch.delenv("MEMSTORE_ADDRESS")
    monkeypatch.setenv("MEMSTORE_PORT", "many")
    failed = decode_report(launching.answer(encode(LookAtRoot(VERSION, scratch))))
    assert isinstance(failed, HostFailed) and "MEMSTORE_PORT is a port" in failed.text
    assert not Path(scratch).exists()


def test_a_launcher_that_could_not_look_leaves_the_store_in_its_working_folder(
    scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memstore.open(scratch).close()
    monkeypatch.chdir(scratch)
    launching = Launching(("192.0.2.1",))
    failed = decode_report(launching.answer(encode(LookAtRoot(VERSION, f"{scratch}/no/parent"))))
    assert isinstance(failed, HostFailed) and failed.error == "NotAStoreError"
    assert decode_report(launching.answer(encode(Undo()))) == OrderDone()
    memstore.open(scratch, "r").close()


def test_a_launcher_whose_look_is_overtaken_by_an_undo_leaves_nothing(scratch: str) -> None:
    launching = Launching(("192.0.2.1",))
    assert decode_report(launching.answer(encode(Undo()))) == OrderDone()
    assert isinstance(decode_report(launching.answer(encode(LookAtRoot(VERSION, scratch)))), HostSeen)
    assert not Path(scratch).exists()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_launcher_that_has_made_a_cluster_of_one_leaves_none_unless_it_has_a_key(
    agents: Agents, scratch: str, *, is_alone: bool
) -> None:
    """Also where another job has made the folder just before."""
    assert isinstance(decode_report(Launching().answer(encode(LookAtRoot(VERSION, scratch)))), HostSeen)
    launching = Launching()
    assert isinstance(decode_report(launching.answer(encode(LookAtRoot(VERSION, scratch)))), HostSeen)
    order = StartAgent("127.0.0.1", 0, "", (), True, bytes(32), "tcp", True, True, None, None, 60_000)
    assert isinstance(decode_report(launching.answer(encode(order))), Started)
    other = StartAgent(
        "127.0.0.1", 0, "", ("tcp://127.0.0.9:1",), False, bytes(32), "tcp", True, True, None, None, 60_000
    )
    second = Launching()
    assert isinstance(decode_report(second.answer(encode(LookAtRoot(VERSION, scratch)))), HostSeen)
    failed = decode_report(second.answer(encode(other)))
    assert isinstance(failed, HostFailed) and "serve them again when that has ended" in failed.text
    if not is_alone:
        with memstore.open(scratch) as store:
            store.put("k", 1)
    assert decode_report(launching.answer(encode(Undo()))) == OrderDone()
    assert Path(scratch, "memstore.json").exists() is not is_alone


def test_a_launcher_leaves_a_store_that_was_there(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memstore.open(scratch).close()
    launching = Launching(("192.0.2.1",))
    assert isinstance(decode_report(launching.answer(encode(LookAtRoot(VERSION, scratch)))), HostSeen)
    assert decode_report(launching.answer(encode(Undo()))) == OrderDone()
    monkeypatch.setenv("MEMSTORE_PORT", "many")
    assert isinstance(decode_report(launching.answer(encode(LookAtRoot(VERSION, scratch)))), HostFailed)
    memstore.open(scratch, "r").close()


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        ("l<zH>.anon-0<tE>@anon-0<tE>.tcp://10.77.0.1:22222", ("10.77.0.1",)),
        ("l<zH>.anon-0<tE>@anon-0<tE>.tcp://[fd00::1]:22222", ("fd00::1",)),
        ("l<zH>.anon-0<tE>@anon-0<tE>.ipc://@OaeJLOjH3IWvp6FeY6dxud8B", ()),
        ("l<zH>.anon-0<tE>@anon-0<tE>.tcp://host0:22222", ()),
    ],
)
def test_monarchs_address_of_a_host_is_its_first_one(actor: str, expected: tuple[str, ...]) -> None:
    assert ips_in(actor) == expected
