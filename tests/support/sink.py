"""A server for measurements: it takes what is put as S3 would, and forgets the bytes of pieces as they come.

moto serves some 100 MB/s, which measures moto. This one reads bodies into one buffer a connection. It keeps small
objects, so that takes are published, and of large ones the sizes; with "keep", it keeps all. What was kept can be
fetched, by ranges, too. It copies objects, and takes multipart uploads, which others make.

    python -m tests.support.sink PORT [keep]
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_KEPT = 1 << 20  # bytes: larger objects are forgotten
_BUFFER = 1 << 20


class SinkServer:
    """The server, as a process of its own."""

    def __init__(self, *, keep: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process = subprocess.Popen([sys.executable, "-S", __file__, str(self.port), *["keep"] * keep])
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

    def counted(self) -> tuple[int, int]:
        """Returns how many bytes of bodies came, and how many were answered, since this was asked last."""
        with urllib.request.urlopen(f"{self.url}/-/counted", timeout=30) as reply:
            came, answered = reply.read().split()
        return int(came), int(answered)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class _Sink:
    def __init__(self, kept: int) -> None:
        self.most_kept = kept
        self.came = self.answered = 0
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
        if size <= self.most_kept:
            body = bytearray(rest)
            while len(body) < size:
                body += connection.recv(size - len(body))
            return bytes(body[:size]), bytes(body[size:])
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
            if path == "/-/counted":
                text = f"{self.came} {self.answered}".encode()
                self.came = self.answered = 0
                return "200 OK", {}, text
            self.came += size
            if method == "PUT" and "x-amz-copy-source" in headers:
                source = "/" + unquote(headers["x-amz-copy-source"]).lstrip("/")
                if source not in self.sizes:
                    return "404 Not Found", {}, b"<Error><Code>NoSuchKey</Code></Error>"
                self.sizes[path] = self.sizes[source]
                if source in self.kept:
                    self.kept[path] = self.kept[source]
                return "200 OK", {}, b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>"
            if method == "PUT" and "partNumber" in query:
                return "200 OK", {"ETag": '"part"'}, b""
            if method == "POST" and "uploads" in query:
                bucket, _, key = path[1:].partition("/")
                text = (
                    f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key><UploadId>1</UploadId>"
                    "</InitiateMultipartUploadResult>"
                )
                return "200 OK", {"Content-Type": "application/xml"}, text.encode()
            if method == "POST" and "uploadId" in query:
                self.sizes[path] = 0
                text = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
                return "200 OK", {"Content-Type": "application/xml"}, text.encode()
            if method == "PUT":
                if headers.get("if-none-match") == "*" and path in self.sizes:
                    return "412 Precondition Failed", {}, b""
                self.sizes[path] = size
                if size <= self.most_kept:
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
                self.sizes = {
                    one: n for one, n in self.sizes.items() if f"<Key>{one[1:].partition('/')[2]}<" not in gone
                }
                return "200 OK", {"Content-Type": "application/xml"}, b"<DeleteResult></DeleteResult>"
            if path not in self.sizes:
                return "404 Not Found", {}, b""
            about = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"x"'}
            if method == "HEAD":
                return "200 OK", {**about, "size": self.sizes[path]}, b""
            found = memoryview(self.kept.get(path, b""))
            start, _, stop = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
            answer = bytes(found[int(start) : int(stop or len(found)) + 1])
            self.answered += len(answer)
            if "range" in headers:
                last = int(start) + len(answer) - 1
                about["Content-Range"] = f"bytes {start}-{last}/{len(found)}"
                return "206 Partial Content", about, answer
            return "200 OK", about, answer


def main(port: int, keep: bool) -> None:
    sink = _Sink(1 << 40 if keep else _KEPT)
    with socket.create_server(("127.0.0.1", port), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=sink.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["keep"])
