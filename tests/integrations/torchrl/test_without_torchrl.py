"""Where torchrl isn't installed, the error says what to install."""

from __future__ import annotations

import importlib.util

import pytest

import memstore
from memstore.integrations import torchrl


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is not None, reason="torchrl is installed")
@pytest.mark.parametrize("name", torchrl.__all__)
def test_without_torchrl_the_error_names_it(name: str) -> None:
    with pytest.raises(memstore.MissingPackageError, match="pip install 'torchrl"):
        getattr(torchrl, name)
    assert isinstance(memstore.MissingPackageError("text"), ImportError)


def test_other_names_are_missing_as_ever() -> None:
    assert not hasattr(torchrl, "other")
