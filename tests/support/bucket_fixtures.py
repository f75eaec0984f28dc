"""Fixtures of tests with buckets: a server for the session, a proxy in front of it, a place where nothing is yet."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.buckets import FaultProxy, S3Server, options_for

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
def s3_options(s3_proxy: FaultProxy) -> dict[str, Any]:
    return options_for(s3_proxy.url)


@pytest.fixture
def url() -> str:
    """A place in the bucket, at which nothing is yet."""
    return f"s3://bucket/run-{os.getpid()}-{next(_places)}/step-1"


@pytest.fixture
def s3_environment(s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment by which calls without options find the server."""
    variables = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_proxy.url,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
