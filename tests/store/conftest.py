"""The stores that tests of a Store work on: those of the backend that is tested. See `backends.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memstore
from tests.store.backends import BACKENDS, SERVED, open_store, testing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "embedded: of a Store in a folder of this host, and of no other backend")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_embedded = metafunc.definition.get_closest_marker("embedded") is not None
    if len(BACKENDS) > 1 and not is_embedded:
        names = [pytest.param(name, marks=pytest.mark.full if name in SERVED else ()) for name in BACKENDS]
        metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = getattr(request, "param", "embedded")
    served = SERVED.get(name)
    if served is not None:
        served.start()
    with testing(BACKENDS[name]):
        yield name
    if served is not None:
        served.end_test()


@pytest.fixture
def store(root: str) -> Iterator[memstore.Store]:
    with open_store(root, timeout=10.0) as opened:
        yield opened
