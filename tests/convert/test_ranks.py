"""Checkpoints that real ranks have saved: their parts become whole tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from memstore.convert import convert
from tests.convert.on_ranks import SAVED, save_sharded, whole_model, whole_tensors
from tests.ranks.launcher import Ranks


@pytest.mark.full
def test_what_four_ranks_have_saved_becomes_one_file(ranks4: Ranks, folder: str) -> None:
    assert ranks4.run(save_sharded, folder) == [True] * 4
    expected = {f"model.{name}": tensor for name, tensor in whole_model().state_dict().items()}
    expected |= {f"tensors.{name}": tensor for name, tensor in whole_tensors().items()}
    for saved in SAVED:
        convert(f"{folder}/{saved}", f"{folder}/{saved}.safetensors")
        found = load_file(f"{folder}/{saved}.safetensors")
        assert sorted(found) == sorted(expected), saved
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (saved, name)
