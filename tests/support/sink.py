"""A server for measurements: it takes what is put as S3 would, and forgets the bytes of pieces as they come.

moto serves some 100 MB/s, which measures moto. This one reads bodies into one buffer a connection. It keeps small
objects, so that takes are published, and of large ones the sizes; an object that was kept can be fetched.

    python -m tests.support.sink PORT
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_KEPT = 1 << 20  # bytes: larger objects are forgotten
_BUFFER = 1 << 20


class SinkServer:
    """The server, as a process of its own."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process = subprocess.Popen([sys.executable, "-S", __file__, str(self.port)])
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            if time.monotonic() > deadline:
                raise RuntimeError("the sink did not start")
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class _Sink:
    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.kept: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(_BUFFER))
        head = b""
        with connection, contextlib.suppress(OSError, ValueError):
            while True:
                while b"\r\n\r\n" not in head:
                    got = connection.recv(1 << 16)
                    if not got:
                        return
                    head += got
                text, _, rest = head.partition(b"\r\n\r\n")
                first, *lines = text.decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                size = int(headers.get("content-length", 0))
                if headers.get("expect") == "100-continue":
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body, head = self._body(connection, rest, size, buffer)
                status, more, answer = self._answer(method, target, headers, size, body)
                lines = [f"HTTP/1.1 {status}", f"Content-Length: {more.pop('size', len(answer))}"]
                lines += [f"{name}: {value}" for name, value in more.items()]
                connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode() + answer)

    def _body(self, connection: socket.socket, rest: bytes, size: int, buffer: memoryview) -> tuple[bytes, bytes]:
        if size <= _KEPT:
            while len(rest) < size:
                rest += connection.recv(size - len(rest))
            return rest[:size], rest[size:]
        left = size - len(rest)
        while left > 0:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        return b"", b""

    def _answer(
        self, method: str, target: str, headers: dict[str, str], size: int, body: bytes
    ) -> tuple[str, dict[str, Any], bytes]:
        parts = urlsplit(target)
        path, query = unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)
        with self.lock:
            if method == "PUT":
                if headers.get("if-none-match") == "*" and path in self.sizes:
                    return "412 Precondition Failed", {}, b""
                self.sizes[path] = size
                if size <= _KEPT:
                    self.kept[path] = body
                return "200 OK", {"ETag": f'"{len(self.sizes)}"'}, b""
            if method == "GET" and "list-type" in query:
                prefix = f"{path}/{query['prefix'][0]}"
                found = [(one[len(path) + 1 :], n) for one, n in self.sizes.items() if one.startswith(prefix)]
                rows = "".join(
                    f"<Contents><Key>{one}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>x</ETag><Size>{n}</Size></Contents>"
                    for one, n in found
                )
                text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
                return "200 OK", {"Content-Type": "application/xml"}, text.encode()
            if method == "POST":
                gone = body.decode()
                self.sizes = {one: n for one, n in self.sizes.items() if f"<Key>{one.split('/', 2)[2]}<" not in gone}
                return "200 OK", {"Content-Type": "application/xml"}, b"<DeleteResult></DeleteResult>"
            if path not in self.sizes:
                return "404 Not Found", {}, b""
            about = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"x"'}
            if method == "HEAD":
                return "200 OK", {**about, "size": self.sizes[path]}, b""
            return "200 OK", about, self.kept.get(path, b"")


def main(port: int) -> None:
    sink = _Sink()
    with socket.create_server(("127.0.0.1", port), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=sink.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
