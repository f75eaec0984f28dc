"""The live page over HTTP, without a browser: who may ask, what is told, and that nothing can be changed."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import torch

import memstore
import memstore.ui
from memstore.ui import LivePage
from tests.distributed.serving.agents import two_hosts

TOKEN = "a token of some length"


class Answer:
    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.code, self.heads, self.body = found.status, found.headers, found.read()

    def json(self) -> Any:
        assert self.heads["Content-Type"] == "application/json"
        return json.loads(self.body)


def ask(page: LivePage, path: str, method: str = "GET", **heads: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in heads.items()})
        return Answer(connection.getresponse())
    finally:
        connection.close()


@contextmanager
def events(page: LivePage, query: str = "") -> Iterator[Iterator[Any]]:
    """The states that a stream sends, each as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", f"/events?{query}")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/event-stream"

    def states() -> Iterator[Any]:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    try:
        yield states()
    finally:
        answer.close()
        connection.close()


def keys_of(state: Any) -> dict[str, Any]:
    return {one["key"]: one for one in state["keys"]}


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_stream_has_the_stores_figures_and_follows_it(scratch: str) -> None:
    with memstore.open(scratch, capacity="1GiB") as store, memstore.ui.serve(scratch) as page:
        store.put("policy", {"w": torch.zeros(30, 40)})
        store.put("lr", 0.1)
        with events(page) as states:
            state = next(states)
            assert state["root"] == scratch and state["stats"]["keys"] == 2
            assert state["stats"]["live_bytes"] == store.stats().live_bytes
            assert state["stats"]["capacity"] == 1 << 30
            policy = keys_of(state)["policy"]
            info = store.info("policy")
            assert (policy["version"], policy["nbytes"], policy["created"]) == (info.version, info.nbytes, info.created)
            assert (policy["type"], policy["leaves"]) == ("dict", 1)
            assert os.getpid() in [one["pid"] for one in state["holders"]]
            version = store.put("policy", torch.zeros(7))
            until = time.monotonic() + 60
            for state in states:
                if keys_of(state)["policy"]["version"] == version and keys_of(state)["policy"]["rate"]:
                    break
                assert time.monotonic() < until
            assert state["puts_rate"] > 0 and state["versions"] == version
            assert keys_of(state)["lr"]["rate"] == 0


def test_gets_are_told_of_the_process_that_serves_the_page(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("a", 1)
    memstore.metrics.count_calls()
    try:
        with memstore.ui.serve(scratch) as page, events(page) as states:
            assert next(states)["gets_rate"] is None, "nothing was counted"
            until = time.monotonic() + 60
            with memstore.open(scratch) as store:
                for state in states:
                    store.get("a")
                    if state["gets_rate"]:
                        break
                    assert time.monotonic() < until
    finally:
        memstore.metrics.stop_calls()


def test_buffers_attempts_quotas_and_checkpoints_are_told(scratch: str, tmp_path: Path) -> None:
    with memstore.CheckpointManager(tmp_path / "run", async_=False) as manager:
        manager.save(100, {"model": torch.nn.Linear(20, 20)})
    unfinished = tmp_path / "run" / "step-000200"
    unfinished.mkdir()
    whole = sum(file.stat().st_size for file in (tmp_path / "run" / "step-000100").iterdir())
    (unfinished / "x.safetensors").write_bytes(bytes(whole // 2))
    with memstore.open(scratch) as store:
        limiter = memstore.RateLimiter(1.0, 1, 100.0)
        buffer = memstore.ReplayBuffer(store, "buffer", {"x": ((), torch.int64)}, capacity=8, rate_limiter=limiter)
        buffer.extend({"x": torch.arange(5)})
        part = {"w": memstore.TensorShard(torch.zeros(5), (10,), (0,))}
        store.put_sharded("sharded", part, attempt="one", rank=0, world_size=2, wait=False)
        store.set_quota("a/", "1MiB")
        with memstore.ui.serve(scratch, checkpoints=[str(tmp_path / "run")]) as page, events(page) as states:
            state = next(states)
            (rows,) = state["rows"]
            assert (rows["key"], rows["rows"], rows["capacity"], rows["added"]) == ("buffer", 5, 8, 5)
            assert [(one["key"], one["ranks"], one["world_size"]) for one in state["pending"]] == [("sharded", [0], 2)]
            assert [(one["prefix"], one["quota"]) for one in state["quotas"]] == [("a/", 1 << 20)]
            steps = {one["step"]: one for one in state["steps"]}
            assert steps[100]["state"] == "whole" and steps[200]["state"] == "being written"
            assert 0.2 < steps[200]["part"] < 0.9
            buffer.extend({"x": torch.arange(6)})
            until = time.monotonic() + 60
            for state in states:
                if state["rows"][0]["added"] == 11 and state["rows"][0]["added_rate"]:
                    break
                assert time.monotonic() < until


def test_an_entry_has_its_leaves_and_the_shards_of_each(scratch: str) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        for rank in range(2):
            part = {"w": memstore.TensorShard(torch.ones(4, 6), (8, 6), (4 * rank, 0))}
            store.put_sharded("a key/ü", part, attempt="one", rank=rank, world_size=2, wait=bool(rank))
        found = ask(page, f"/entry?key={quote('a key/ü')}").json()
        (leaf,) = found["leaves"]
        assert (leaf["name"], leaf["dtype"], leaf["shape"], leaf["nbytes"]) == ("w", "float32", [8, 6], 192)
        assert leaf["shards"] == [
            {"offsets": [0, 0], "shape": [4, 6], "rank": 0},
            {"offsets": [4, 0], "shape": [4, 6], "rank": 1},
        ]
        assert (found["version"], found["kind"]) == (store.version("a key/ü"), "sharded")
        missing = ask(page, "/entry?key=nothing")
        assert missing.code == 404 and "nothing" in missing.json()["error"]


def test_keys_come_in_pages(scratch: str) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        store.put_many({f"run/{number:03}": number for number in range(250)} | {"other": 1})
        first = ask(page, "/state?prefix=run/&limit=100").json()
        assert first["more"] and [one["key"] for one in first["keys"]] == [f"run/{at:03}" for at in range(100)]
        last = ask(page, "/state?prefix=run/&limit=100&after=run/199").json()
        assert not last["more"] and [one["key"] for one in last["keys"]] == [f"run/{at:03}" for at in range(200, 250)]
        assert ask(page, "/state?limit=1").json()["keys"][0]["key"] == "other"
        assert len(ask(page, "/state?limit=99999").json()["keys"]) == 251
        for odd in ("-1", "x", "", "0", "²"):
            assert ask(page, f"/state?limit={quote(odd)}").code == 200
        troubled = ask(page, f"/state?prefix={'x' * 1000}").json()
        assert troubled["keys"] == [] and not troubled["more"]


def test_a_store_that_is_removed_and_made_again(scratch: str) -> None:
    memstore.open(scratch).close()
    with memstore.ui.serve(scratch) as page, events(page) as states:
        assert "gone" not in next(states)
        memstore.destroy(scratch)
        gone = next(state for state in states if "gone" in state)
        assert scratch in gone["gone"]
        assert ask(page, "/metrics").code == 503 and ask(page, "/entry?key=a").code in (404, 503)
        with memstore.open(scratch) as store:
            store.put("again", 1)
            back = next(state for state in states if "gone" not in state)
            assert keys_of(back)["again"]["version"] == 1


def test_metrics_have_the_calls_of_the_process_that_serves(scratch: str) -> None:
    memstore.metrics.count_calls()
    try:
        with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
            store.put("a", 1)
            store.get("a")
            answer = ask(page, "/metrics")
            assert answer.heads["Content-Type"].startswith("text/plain; version=0.0.4")
            assert re.search(rb'^memstore_calls_total\{call="get"\} [1-9]', answer.body, re.MULTILINE)
            assert b'memstore_key_version{key="a"} 1' in answer.body
    finally:
        memstore.metrics.stop_calls()


# --- who may ask ------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(scratch: str) -> Iterator[LivePage]:
    memstore.open(scratch).close()
    with memstore.ui.serve(scratch) as made:
        yield made


PATHS = ("/", "/page.js", "/page.css", "/state", "/events", "/entry?key=a", "/metrics")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1", "", "10.0.0.1"])
def test_a_name_that_is_led_here_gets_nothing(page: LivePage, path: str, name: str) -> None:
    answer = ask(page, path, Host=name)
    assert answer.code == 403 and b"memstore.json" not in answer.body


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1:1", "[::1]:80", "LOCALHOST:8000"])
def test_a_name_of_the_loopback_is_served(page: LivePage, name: str) -> None:
    assert ask(page, "/state", Host=name).code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_offered(page: LivePage, method: str) -> None:
    for path in PATHS:
        assert ask(page, path, method).code == 501


def test_the_store_isnt_changed_by_looks(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("a", torch.zeros(5000))
    before = {path: path.stat().st_mtime_ns for path in Path(scratch).rglob("*") if path.name != "lock.mdb"}
    with memstore.ui.serve(scratch) as page:
        for path in PATHS:
            if path != "/events":
                ask(page, path)
        with events(page) as states:
            next(states), next(states)
    after = {path: path.stat().st_mtime_ns for path in Path(scratch).rglob("*") if path.name != "lock.mdb"}
    assert after == before


@pytest.mark.parametrize("path", PATHS)
def test_with_a_token_nobody_is_served_without_it(scratch: str, path: str) -> None:
    memstore.open(scratch).close()
    with memstore.ui.serve(scratch, token=TOKEN) as page:
        assert ask(page, path).code == 401
        assert ask(page, path, Cookie="memstore_token=another").code == 401
        assert ask(page, path, Authorization="Bearer another").code == 401
        assert ask(page, path, Authorization=f"Basic {TOKEN}").code == 401
        joined = "&" if "?" in path else "?"
        assert ask(page, f"{path}{joined}token=an%C3%B6ther").code == 401
        if path != "/events":
            assert ask(page, path, "HEAD", Authorization=f"Bearer {TOKEN}", Host="any.example").code in (200, 404)


def test_a_token_becomes_a_cookie_and_leaves_the_address(scratch: str) -> None:
    memstore.open(scratch).close()
    with memstore.ui.serve(scratch, token=TOKEN) as page:
        split = urlsplit(page.url)
        entered = ask(page, f"{split.path}?{split.query}")
        assert entered.code == 303 and entered.heads["Location"] == "/"
        cookie = entered.heads["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert ask(page, "/state", Cookie=cookie.partition(";")[0]).code == 200
        away = ask(page, f"//evil.example/?{split.query}")
        assert away.code == 303 and away.heads["Location"] == "/"


def test_beyond_this_host_it_takes_a_token(scratch: str) -> None:
    memstore.open(scratch).close()
    for host in ("0.0.0.0", "::", "192.0.2.1", "host.example", ""):
        with pytest.raises(ValueError, match="token"):
            memstore.ui.serve(scratch, host=host)
    with pytest.raises(ValueError, match="8 characters"):
        memstore.ui.serve(scratch, token="short")
    with memstore.ui.serve(scratch, host="0.0.0.0", token=TOKEN) as page:
        assert ask(page, "/state", Authorization=f"Bearer {TOKEN}").code == 200


def test_answers_forbid_scripts_of_others(page: LivePage) -> None:
    for path in ("/", "/state", "/nothing"):
        policy = ask(page, path).heads["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert ask(page, path).heads["X-Content-Type-Options"] == "nosniff"
    text = ask(page, "/").body.decode()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text), "nothing inline"
    script = ask(page, "/page.js").body.decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_no_file_beside_the_pages_own_is_sent(page: LivePage) -> None:
    for path in (
        "/../server.py",
        "/static/page.js",
        "/%2e%2e/server.py",
        "/page.js/..",
        "//etc/passwd",
        "/memstore.json",
    ):
        assert ask(page, path).code == 404


# --- bad luck ---------------------------------------------------------------------------------------------------------


def test_odd_requests_end_no_server(page: LivePage) -> None:
    for text in (
        b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"\0" * 500,
        b"GET",
    ):
        with socket.create_connection(("127.0.0.1", page.port)) as sock:
            sock.sendall(text)
    assert ask(page, "/state").code == 200


def test_streams_are_bounded_and_end_with_the_server(scratch: str) -> None:
    memstore.open(scratch).close()
    page = memstore.ui.serve(scratch)
    connections: list[http.client.HTTPConnection] = []
    for _ in range(32):
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
        connection.request("GET", "/events")
        assert connection.getresponse().status == 200
        connections.append(connection)
    assert ask(page, "/events").code == 503
    page.close()
    page.close()
    for connection in connections:
        connection.close()
    until = time.monotonic() + 60
    while any(one.name.startswith("memstore ui") for one in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_command_serves_until_it_is_told_to_end(scratch: str) -> None:
    with memstore.open(scratch) as store:
        store.put("a", 1)
    command = [sys.executable, "-m", "memstore", "ui", scratch, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port = urlsplit(url).port
        assert port is not None
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/state")
        assert json.load(connection.getresponse())["keys"][0]["key"] == "a"
        connection.close()
        taken = subprocess.run([*command[:-1], str(port)], capture_output=True, text=True)
        assert taken.returncode == 2 and "--port" in taken.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_the_command_makes_a_token_for_other_hosts(scratch: str) -> None:
    memstore.open(scratch).close()
    command = [sys.executable, "-m", "memstore", "ui", scratch, "--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        split = urlsplit(process.stdout.readline().strip())
        assert len(split.query) > len("token=") + 16
        process.kill()


def test_a_wrong_root_is_told_at_once(scratch: str) -> None:
    done = subprocess.run([sys.executable, "-m", "memstore", "ui", scratch], capture_output=True, text=True)
    assert done.returncode == 3 and scratch in done.stderr
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.full
def test_the_hosts_of_a_store_are_told(scratch: str, tmp_path: Path) -> None:
    with two_hosts(Path(scratch).parent, tmp_path) as (first, second, store, other):
        store.put("policy", torch.zeros(1 << 18))
        other.get("policy")
        with memstore.ui.serve(second.root) as page, events(page) as states:
            state = next(found for found in states if sum(host["sent"] for host in found["hosts"]) >= 1 << 20)
            assert {host["address"] for host in state["hosts"]} == {first.address, second.address}
            assert all(host["alive"] for host in state["hosts"])
            assert keys_of(state)["policy"]["version"] == store.version("policy"), "keys of all hosts are shown"
            second_host = second.process
            first.process.kill()
            silent = next(found for found in states if not all(host["alive"] for host in found["hosts"]))
            (gone,) = [host for host in silent["hosts"] if not host["alive"]]
            assert gone["address"] == first.address and gone["trouble"]
            assert second_host.poll() is None
            until = time.monotonic() + 12  # datasets are looked for each 10 s, on all hosts
            for found in states:
                assert "gone" not in found
                if time.monotonic() > until:
                    break
