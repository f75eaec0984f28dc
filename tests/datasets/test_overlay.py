"""Datasets on overlay, as a container's own folders are: there a mapping keeps no lock, so files stay open."""

from __future__ import annotations

import pickle

import pytest
import torch

import memstore
from tests.children import in_child
from tests.leaks import find_leaks, open_files
from tests.overlay import on_overlay


@pytest.mark.parametrize("one_file_system", [True, False])
def test_a_dataset_lives_as_elsewhere(one_file_system: bool) -> None:
    on_overlay(_live, one_file_system=one_file_system)


def _live(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", ((1000,), torch.float32), capacity=100)
        assert in_child(_extend, root, pickle.dumps(data)) == range(2)
        assert data.extend(torch.full((1, 1000), 2.0)) == range(2, 3)
        data.flush()
        held, view = data[1:3], store.view("data")
        assert data[:][:, 0].tolist() == view[:, 0].tolist() == [1, 1, 2]
        data.seal()
        with pytest.raises(memstore.MutableEntryError):
            data.extend(torch.zeros(1, 1000))
        for number in range(3):  # none of them takes the file of what is held
            store.put("other", torch.full((100, 1000), float(number)))
            store.gc()
        assert held[:, 0].tolist() == [1, 2] and store.get("data")[:, 0].tolist() == [1, 1, 2]
        del data, held, view
        assert [path for path in open_files(root) if "/segments/" in path] == []
    assert find_leaks(root) == []


def _extend(root: str, packed: bytes) -> range:
    with memstore.open(root) as store:
        added = store.open_dataset("data").extend(torch.ones(1, 1000))
        pickle.loads(packed).extend(torch.ones(1, 1000))
        return range(added.start, added.stop + 1)
