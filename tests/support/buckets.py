"""Buckets for tests: servers as processes of their own, and a proxy of ours in front of them that makes trouble.

`S3Server` starts moto's server on loopback, `AzureServer` azurite, `GoogleStub` a stub of ours. `FaultProxy` passes
requests on to one, counts their bytes, and does to chosen ones what networks and services do: delays, cuts, failures
before or after the server has acted. Nothing is mocked in the process that is tested.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_STARTED_WITHIN = 60.0  # seconds, on a busy machine
KEYS = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class S3Server:
    """moto's server: as S3 does, it refuses a put of what is there, and says which bucket is missing."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _STARTED_WITHIN
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/moto-api/", timeout=5).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"moto's server did not start: exit code {self._process.poll()}")
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=30).close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


AZURITE = "3.35.0"
_ACCOUNT = "devstoreaccount1"  # azurite's, with the key that its pages have
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-08-06"


def azurite() -> Path:
    """Returns azurite's program, which is installed by npm into build/ if it isn't there.

    Raises RuntimeError, which says why it can't be.
    """
    folder = Path(__file__).parent.parent.parent / "build" / f"azurite-{AZURITE}"
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise RuntimeError("Node.js (node and npm), which azurite needs, isn't installed")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers want it, too
        if not program.exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"azurite@{AZURITE}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
            if not program.exists():
                raise RuntimeError(f"npm couldn't install azurite: {done.stderr.strip()[-300:]}")
    return program


class _Server:
    """A server on loopback, a process of its own."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _STARTED_WITHIN
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{command[0]} did not start: exit code {self._process.poll()}")
            time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


class AzureServer(_Server):
    """azurite, which keeps containers in memory."""

    def __init__(self) -> None:
        port = free_port()
        flags = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        super().__init__([str(azurite()), "--blobHost", "127.0.0.1", "--blobPort", str(port), *flags], port)

    def make_bucket(self, name: str) -> None:
        date = formatdate(usegmt=True)
        signed = f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
        text = ("PUT" + "\n" * 12 + signed).encode()
        signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text, hashlib.sha256).digest()).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": _VERSION,
            "Authorization": f"SharedKey {_ACCOUNT}:{signature}",
            "Content-Length": "0",
        }
        url = f"http://127.0.0.1:{self.port}/{_ACCOUNT}/{name}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30).close()

    @staticmethod
    def options(url: str) -> dict[str, Any]:
        return {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": f"{url}/{_ACCOUNT}"}


class GoogleStub(_Server):
    """A stub of Google's XML interface (`gcs_stub.py`), with the bucket "bucket"."""

    def __init__(self) -> None:
        port = free_port()
        super().__init__([sys.executable, "-m", "tests.support.gcs_stub", str(port)], port)

    @staticmethod
    def options(url: str) -> dict[str, Any]:
        account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
        key = json.dumps({**account, "private_key_id": ""})
        return {"service_account_key": key, "client_options": {"allow_http": True}}


@dataclass
class Request:
    """A request that passed the proxy.

    Attributes:
        sent, answered: the bytes of its body, and of the answer's.
    """

    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0
    answered: int = 0
    status: int = 0

    @property
    def name(self) -> str:
        """The last part of the object's name."""
        return self.path.partition("?")[0].rpartition("/")[2]

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=" in self.path


@dataclass
class Fault:
    """What is done to requests.

    Attributes:
        when: which requests.
        times: how many of them; then the fault is over.
        do: see `FaultProxy.fail`, `cut` and the like.
    """

    when: Callable[[Request], bool]
    times: int
    do: Callable[[Request, _Handler], bool]
    met: list[Request] = field(default_factory=list[Request])


class FaultProxy:
    """A proxy in front of a server, on loopback.

    Attributes:
        requests: all that came, in this order.
    """

    def __init__(self, server: S3Server | AzureServer | GoogleStub) -> None:
        self._upstream = server.port
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def clear(self) -> None:
        """Forgets requests and faults."""
        with self._lock:
            self.requests.clear()
            self._faults.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def fetched(self) -> int:
        """The bytes of all objects' answers."""
        return sum(one.answered for one in self.requests if one.method == "GET" and "?" not in one.path)

    def puts(self, mark: str = "") -> list[Request]:
        """The puts that succeeded, of objects with this in their names."""
        return [one for one in self.requests if one.method == "PUT" and mark in one.name and one.status < 300]

    # --- faults

    def fail(
        self, when: Callable[[Request], bool], status: int, code: str, *, times: int = 1, acts_first: bool = False
    ) -> Fault:
        """Answers with an error.

        Args:
            acts_first: the server gets the request, and does what it asks for.
        """

        def do(request: Request, handler: _Handler) -> bool:
            if acts_first:
                handler.forward(request, answer=False)
            text = f"<Error><Code>{code}</Code><Message>of the test</Message></Error>".encode()
            handler.answer(request, status, {}, text)
            return True

        return self._add(when, times, do)

    def cut(self, when: Callable[[Request], bool], *, times: int = 1, after: int | None = None) -> Fault:
        """Closes the connection: at once, or in the middle of the answer, after so many bytes of it."""

        def do(request: Request, handler: _Handler) -> bool:
            if after is not None:
                handler.forward(request, cut_after=after)
            handler.close_connection = True
            with contextlib.suppress(OSError):
                handler.connection.shutdown(socket.SHUT_RDWR)
            return True

        return self._add(when, times, do)

    def delay(self, when: Callable[[Request], bool], seconds: float, *, times: int = 1) -> Fault:
        def do(request: Request, handler: _Handler) -> bool:
            time.sleep(seconds)
            return False

        return self._add(when, times, do)

    def call(self, when: Callable[[Request], bool], what: Callable[[Request], Any], *, times: int = 1) -> Fault:
        """Calls something in the moment before the server gets the request."""

        def do(request: Request, handler: _Handler) -> bool:
            what(request)
            return False

        return self._add(when, times, do)

    def _add(self, when: Callable[[Request], bool], times: int, do: Any) -> Fault:
        fault = Fault(when, times, do)
        with self._lock:
            self._faults.append(fault)
        return fault

    # --- of the handlers

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if len(fault.met) < fault.times and fault.when(request):
                    fault.met.append(request)
                    return fault
        return None

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    @property
    def upstream(self) -> int:
        return self._upstream


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy
    _body: bytes

    def handle_any(self) -> None:
        request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        self._body = self.rfile.read(int(request.headers.get("content-length", 0)))
        request.sent = len(self._body)
        fault = self.proxy.fault_for(request)
        self.proxy.note(request)  # before it is answered: afterwards the test may have gone on
        if fault is None or not fault.do(request, self):
            self.forward(request)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

    def forward(self, request: Request, *, answer: bool = True, cut_after: int | None = None) -> None:
        """Has the server answer, and passes that on."""
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, self._body or None, dict(self.headers.items()))
            reply = upstream.getresponse()
            body = reply.read()
        finally:
            upstream.close()
        if answer:
            headers = {name: value for name, value in reply.getheaders() if name.lower() not in _OF_CONNECTIONS}
            self.answer(request, reply.status, headers, body, cut_after=cut_after)

    def answer(
        self, request: Request, status: int, headers: dict[str, str], body: bytes, *, cut_after: int | None = None
    ) -> None:
        request.status, request.answered = status, 0 if self.command == "HEAD" else len(body)
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        size = (
            headers.get("Content-Length", headers.get("content-length", "0")) if self.command == "HEAD" else len(body)
        )
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut_after is None else body[:cut_after])

    def log_message(self, format: str, *args: Any) -> None:
        pass


_OF_CONNECTIONS = {"connection", "transfer-encoding", "keep-alive", "date", "server"}


def _handler_of(proxy: FaultProxy) -> type[_Handler]:
    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    return Handler


def options_for(url: str, **more: Any) -> dict[str, Any]:
    """The `storage_options` for a server of these."""
    return {**KEYS, "endpoint": url, **more}


def without_clouds() -> None:
    """Removes what says in the environment where buckets are."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        del os.environ[name]
