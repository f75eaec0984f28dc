"""Where snapshots are taken, in these tests."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.buckets import FaultProxy, S3Server


@pytest.fixture
def path() -> Iterator[str]:
    """A path in memory, at which nothing is yet."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder:
        yield f"{folder}/snapshot"


_places = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto's server, a process of its own, with the bucket "bucket"."""
    server = S3Server()
    try:
        server.make_bucket("bucket")
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def s3_proxied(s3_server: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server)
    yield proxy
    proxy.close()


@pytest.fixture
def s3_proxy(s3_proxied: FaultProxy) -> FaultProxy:
    """A proxy in front of the server, which does nothing to requests yet."""
    s3_proxied.clear()
    return s3_proxied


@pytest.fixture
def url() -> str:
    """A place in the bucket, at which nothing is yet."""
    return f"s3://bucket/run-{os.getpid()}-{next(_places)}/step-1"
