"""Models of `transformers`: small ones of many families, made deferred and eagerly; and one without its memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from tests.deferred_init.modules import assert_made_as, deferred, eager, in_any_order

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.full  # transformers takes seconds to import

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
TOKENS = {"input_ids": torch.arange(12).view(2, 6)}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}
SOUND = {"input_values": torch.linspace(-1, 1, 2 * 2000).view(2, 2000)}

Family = tuple[str, str, dict[str, Any], dict[str, torch.Tensor]]
FAMILIES: dict[str, Family] = {
    "bert": ("BertModel", "BertConfig", SMALL, TOKENS),
    "bert, masked": ("BertForMaskedLM", "BertConfig", SMALL, TOKENS),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}, TOKENS),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}, TOKENS),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, "num_key_value_heads": 2}, TOKENS),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 2}, TOKENS),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2},
        TOKENS,
    ),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99, "sinusoidal_pos_embds": True},
        TOKENS,
    ),
    "t5": (
        "T5EncoderModel",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99},
        TOKENS,
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 4},
        TOKENS,
    ),
    "vit": ("ViTModel", "ViTConfig", {**SMALL, "image_size": 32, "patch_size": 8}, PIXELS),
    "resnet": ("ResNetModel", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, PIXELS),
    "swin": (
        "SwinModel",
        "SwinConfig",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "image_size": 32, "patch_size": 2, "window_size": 4},
        PIXELS,
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {**SMALL, "conv_dim": (16,) * 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        SOUND,
    ),
}


def maker(name: str, **more: Any) -> Callable[[], torch.nn.Module]:
    cls, config, options, _ = FAMILIES[name]

    def make() -> torch.nn.Module:
        return getattr(transformers, cls)(getattr(transformers, config)(**options, **more)).eval()

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_small_models_are_made_and_compute_as_without_deferral(name: str) -> None:
    make, inputs = maker(name), FAMILIES[name][3]
    expected, made, backwards = eager(make), deferred(make), deferred(make)
    materialize_module(made)
    in_any_order(backwards, [11, 3, 7])
    for one in (made, backwards):
        assert_made_as(expected, one)
    with torch.no_grad():
        assert torch.equal(made(**inputs)[0], expected(**inputs)[0])


def test_the_dtype_of_a_configuration_is_kept() -> None:
    def make() -> torch.nn.Module:
        options = FAMILIES["llama"][2]
        config = transformers.LlamaConfig(**options, dtype=torch.bfloat16)
        return transformers.AutoModelForCausalLM.from_config(config)

    expected, made = eager(make), deferred(make)
    materialize_module(made)
    assert_made_as(expected, made)
    assert made.lm_head.weight.dtype == torch.bfloat16


def test_a_folder_that_transformers_saved_is_a_source_and_the_other_way_round(tmp_path: Path) -> None:
    make = maker("gpt2")
    expected = eager(make, seed=9)
    expected.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    made = deferred(make)
    done = materialize_module(made, source=str(tmp_path / "saved"))
    assert not [name for name in done.replayed if not name.endswith(".bias")], "its mask is no weight"
    with torch.no_grad():
        assert torch.equal(made(**TOKENS)[0], expected(**TOKENS)[0])
    made.save_pretrained(tmp_path / "again")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "again").eval()
    assert_made_as(expected, loaded)


def test_what_from_pretrained_makes_is_real_inside_of_deferral_too(tmp_path: Path) -> None:
    """It makes its model on meta, and puts tensors of the file into that."""
    expected = eager(maker("bert"), seed=9)
    expected.save_pretrained(tmp_path)
    made = deferred_init(transformers.BertModel.from_pretrained, tmp_path).eval()
    materialize_module(made)
    with torch.no_grad():
        assert torch.equal(made(**TOKENS)[0], expected(**TOKENS)[0])


def test_berts_own_configuration() -> None:
    def make() -> torch.nn.Module:
        return transformers.BertModel(transformers.BertConfig())

    expected, made = eager(make), deferred(make)
    materialize_module(made.encoder.layer[7])
    materialize_module(made)
    assert_made_as(expected, made)


def test_a_model_that_this_machine_could_not_make_is_recorded_without_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    made = deferred_init(transformers.LlamaForCausalLM, config)
    assert sum(one.numel() for one in made.parameters()) > 68e9
    materialize_module(made.model.norm)
    materialize_module(made.model.rotary_emb)
    assert is_deferred(made) and not is_deferred(made.model.norm)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, f"{grown >> 10} MiB, of 256 GiB"
