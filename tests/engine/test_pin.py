"""A pin keeps one version of a key, here and on its way to another process. Refs and views are tested elsewhere."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from memstore.engine.pin import Pin, PinOptions
from memstore.engine.protocols.elsewhere import MappedEntry
from memstore.engine.protocols.get import hold
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import ReadOnlyError, VersionGoneError
from tests.engine import bytes_store

OPTIONS = PinOptions("r+", 10.0, verify=True, allow_pickle=False, lease=7.0)
OLD, NEW = b"a" * 5000, b"b" * 5000


def pin_of(root: Root, options: PinOptions = OPTIONS) -> Pin:
    (held,) = hold(root, [b"key"], deadline_after(10), may_lock=True)
    assert held is not None
    return Pin(root, "key", held.record, held, options)


def data_of(held: MappedEntry | None) -> bytes:
    assert held is not None and held.mapping is not None
    return np.asarray(held.mapping)[held.record.start :][: held.record.nbytes].tobytes()


def test_it_keeps_its_version_and_maps_it_anew(tmp_path: Path) -> None:
    with bytes_store.opened(str(tmp_path / "store")) as root:
        bytes_store.put(root, b"key", OLD)
        pin = pin_of(root)
        for _ in range(3):
            bytes_store.put(root, b"key", NEW)
        again = pin.map()
        assert data_of(pin.held) == data_of(again) == OLD
        assert again is not None and pin.held is not None and again.mapping is not pin.held.mapping


def test_what_arrives_is_mapped_and_has_the_options(tmp_path: Path) -> None:
    with bytes_store.opened(str(tmp_path / "store")) as root:
        bytes_store.put(root, b"key", OLD)
        sent = pickle.dumps(pin_of(root))
        for _ in range(3):
            bytes_store.put(root, b"key", NEW)
        pin = pickle.loads(sent)
        assert data_of(pin.held) == OLD
        assert (pin.key, pin.options, pin.root) == ("key", OPTIONS, root)


def test_a_pin_that_comes_late_has_nothing_and_says_why(tmp_path: Path) -> None:
    with bytes_store.opened(str(tmp_path / "store")) as root:
        bytes_store.put(root, b"key", OLD)
        sent = pickle.dumps(pin_of(root, PinOptions("r+", 10.0, verify=False, allow_pickle=False, lease=0.0)))
        for _ in range(3):
            bytes_store.put(root, b"key", NEW)
        pin = pickle.loads(sent)
        assert pin.held is None and pin.map() is None
        error = pin.gone()
        assert isinstance(error, VersionGoneError) and "lease of 0 s" in str(error)


def test_a_reader_gives_no_leases(tmp_path: Path) -> None:
    with bytes_store.opened(str(tmp_path / "store")) as root:
        bytes_store.put(root, b"key", OLD)
        pin = pin_of(root, PinOptions("r", 10.0, verify=False, allow_pickle=False))
        with pytest.raises(ReadOnlyError, match="lease"):
            pickle.dumps(pin)
