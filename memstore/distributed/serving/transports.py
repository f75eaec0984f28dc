"""Which way bytes take: what a host is served with, and what it has."""

from __future__ import annotations

import os
import subprocess
import sys

from memstore.distributed.actors import need_monarch
from memstore.errors import TransportUnavailableError

TRANSPORTS = ("auto", "rdma", "tcp", "monarch")
# A process of its own: an agent must not import Monarch.
_PROBE = "import sys; from memstore.distributed.rdma import has_ibverbs; sys.exit(not has_ibverbs())"
_DEVICES = "/sys/class/infiniband"
_PROBE_WITHIN = 60.0  # seconds: a cold disk


def needs_monarch(transport: str, *, has_monarch: bool) -> bool:
    """Whether Monarch is to run in the index process for it.

    Args:
        has_monarch: it runs there in any case.
    """
    return transport in ("rdma", "monarch") or (transport == "auto" and has_monarch and _may_have_ibverbs())


def check_transport(transport: str, version: str) -> None:
    """Before anything is made. It doesn't import Monarch: a child process looks.

    Args:
        version: of Monarch; empty: it isn't installed.

    Raises:
        ValueError: there is no such transport.
        MissingPackageError: it takes Monarch.
        TransportUnavailableError: "rdma", and this host has no ibverbs.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}: expected one of {', '.join(TRANSPORTS)}")
    if transport in ("rdma", "monarch"):
        need_monarch(version)
    if transport == "rdma" and not has_rdma():
        raise TransportUnavailableError(
            "this host has no RDMA that Monarch could use (ibverbs): serve it with transport='tcp', or with 'auto', "
            "which takes what there is"
        )


def transport_of(transport: str, *, has_ibverbs: bool) -> str:
    """What a process in which Monarch runs has: "rdma", "monarch" or "tcp"."""
    if transport == "auto":
        return "rdma" if has_ibverbs else "tcp"
    return transport


def has_rdma() -> bool:
    """Whether Monarch finds ibverbs on this host: where there may be some, a child process looks."""
    return _may_have_ibverbs() and _has_ibverbs()


def _may_have_ibverbs() -> bool:
    """A first look, which costs nothing."""
    try:
        return bool(os.listdir(_DEVICES))
    except OSError:
        return False


def _has_ibverbs() -> bool:
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], stdin=subprocess.DEVNULL, timeout=_PROBE_WITHIN)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
