"""A Redis server of our own on a unix socket, nothing written to disk. Values go as safetensors bytes."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any, ClassVar

import torch

from tests.benchmarks.peers import Peer, needs

START_SECONDS = 10.0


class RedisServer(Peer):
    id: ClassVar[str] = "redis"
    name: ClassVar[str] = "Redis"
    settings: ClassVar[str] = "unix socket, no persistence, values serialised by safetensors"

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("redis-server") is None:
            return "no redis-server on this machine"
        return needs("redis", "safetensors")

    def setup(self) -> None:
        import redis
        import safetensors.torch as serializer

        self._serializer = serializer
        socket = self.root / "redis.sock"
        options = ("--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", self.root)
        self._server = subprocess.Popen(["redis-server", *map(str, options)], stdout=subprocess.DEVNULL)
        self._client = redis.Redis(unix_socket_path=str(socket))
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._client.ping()
                return
            except redis.exceptions.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def put(self, key: str, value: Any) -> None:
        tensors = {"": value} if isinstance(value, torch.Tensor) else value
        self._client.set(key, self._serializer.save(tensors))

    def get(self, key: str) -> Any:
        tensors = self._serializer.load(self._client.get(key))
        return tensors[""] if tensors.keys() == {""} else tensors

    def drop(self, key: str) -> None:
        self._client.delete(key)

    def close(self) -> None:
        if hasattr(self, "_server"):
            self._server.terminate()
            self._server.wait(START_SECONDS)
