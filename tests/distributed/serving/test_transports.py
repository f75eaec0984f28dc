"""A host is served with a transport that it has, or refused before anything is made."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from memstore.distributed.serving import supervision
from memstore.distributed.serving.supervision import check_transport
from memstore.errors import MissingPackageError, TransportUnavailableError
from tests.distributed.serving.agents import agents_in

_VERSION = "0.7.0"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel would name RDMA devices: none."""
    path = tmp_path / "infiniband"
    monkeypatch.setattr(supervision, "_DEVICES", str(path))
    return path


def test_without_devices_there_is_no_rdma(devices: Path) -> None:
    for path in (devices, devices / "none"):
        with pytest.raises(TransportUnavailableError, match=r"no RDMA.*ibverbs.*transport='tcp'"):
            check_transport("rdma", _VERSION)
        path.mkdir(exist_ok=True)


@pytest.mark.full
@pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")
def test_a_device_that_monarch_does_not_find_is_none(devices: Path) -> None:
    """A child process asks Monarch."""
    (devices / "mlx5_0").mkdir(parents=True)
    with pytest.raises(TransportUnavailableError):
        check_transport("rdma", _VERSION)


@pytest.mark.parametrize("transport", ["rdma", "monarch"])
def test_without_monarch_there_is_neither(transport: str) -> None:
    with pytest.raises(MissingPackageError, match="torchmonarch"):
        check_transport(transport, "")


def test_others_need_nothing() -> None:
    for transport in ("auto", "tcp"):
        check_transport(transport, "")
    with pytest.raises(ValueError, match=r"'udp': expected one of auto, rdma, tcp, monarch"):
        check_transport("udp", _VERSION)


def test_an_agent_refuses_it_and_makes_nothing(tmp_path: Path) -> None:
    with agents_in(tmp_path / "roots", tmp_path) as agents:
        code, text = agents.start("a", "--transport", "udp").ended()
        assert code == 2 and "'udp'" in text
        if not Path("/sys/class/infiniband").exists():
            code, text = agents.start("b", "--transport", "rdma").ended()
            assert code != 0 and "no RDMA" in text
        assert not (tmp_path / "roots").exists()
