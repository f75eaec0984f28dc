"""A stub of the part of Google Cloud Storage's XML interface that obstore uses: no emulator of it runs with obstore.

It has puts (also only if there is nothing, or a certain generation), gets of ranges, looks, copies, lists and removals
of objects in one bucket, in memory. Signatures are not looked at. What it does is what Google's pages say of these
requests, so tests with it show that memstore and obstore agree with those pages, and not with the service.

    python -m tests.support.gcs_stub PORT
"""

from __future__ import annotations

import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]] = {}  # by name, with the generation
    generation = 0
    lock = threading.Lock()

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = headers or {}
        for name, value in more.items():
            self.send_header(name, value)
        if "Content-Length" not in more:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self.lock:
            if bucket != BUCKET:
                self._fail(404, "NoSuchBucket")
            elif self.command == "GET" and not name:
                self._list(query)
            elif self.command == "PUT":
                self._put(name, body)
            elif name not in self.objects:
                self._fail(404, "NoSuchKey")
            elif self.command == "DELETE":
                del self.objects[name]
                self._answer(204)
            else:
                self._get(*self.objects[name])

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _do

    def _put(self, name: str, body: bytes) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != self.objects.get(name, (b"", 0))[1]:
            return self._fail(412, "PreconditionFailed")
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            place = unquote(source).lstrip("/").partition("/")[2]
            if place not in self.objects:
                return self._fail(404, "NoSuchKey")
            body = self.objects[place][0]
        _Handler.generation += 1
        self.objects[name] = body, self.generation
        text = b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>" if source is not None else b""
        return self._answer(200, text, {"ETag": f'"{self.generation}"', "x-goog-generation": str(self.generation)})

    def _get(self, body: bytes, generation: int) -> None:
        headers = {"ETag": f'"{generation}"', "x-goog-generation": str(generation), "Last-Modified": _DATE}
        headers["Content-Type"] = "application/octet-stream"
        if self.command == "HEAD":
            return self._answer(200, b"", {**headers, "Content-Length": str(len(body))})
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if found is None:
            return self._answer(200, body, headers)
        start, stop = int(found[1]), min(int(found[2] or len(body)) + 1, len(body))
        if start >= len(body):
            return self._fail(416, "InvalidRange")
        return self._answer(
            206, body[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"}
        )

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rows: list[str] = []
        folders: set[str] = set()
        for name, (body, generation) in sorted(self.objects.items()):
            rest = name[len(prefix) :]
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            rows.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f'<ETag>"{generation}"</ETag><Size>{len(body)}</Size></Contents>'
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)]
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(port: int) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
