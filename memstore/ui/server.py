"""The live page: its content, once a second, and the server that sends it.

`Watcher` looks at the store: numbers for all who listen, a page of keys for each, and rates. What needs the maps of all
processes of the host, or other hosts, is looked at every five seconds.

The server is HTTP of the standard library, a thread for each request. It answers GET and HEAD only. Who may ask:
without a token, requests that name this host by a loopback name; so a web page that leads its own name to 127.0.0.1
(DNS rebinding) gets nothing. With a token, who has it: as `?token=`, which becomes a cookie, or as
`Authorization: Bearer`. The page's script makes elements and text, and never HTML of what a store says.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

from memstore._threads import between_forks
from memstore._version import __version__
from memstore.engine import absolute_path, index, numbers_of_store
from memstore.errors import HomeUnavailableError, KeyNotFoundError, MemstoreError
from memstore.listing import Keyspace, open_keyspace, opened
from memstore.metrics import PROMETHEUS_TYPE, KeyFigures, StoreLook, calls, key_page, look_at, prometheus

if TYPE_CHECKING:
    from typing_extensions import Self

# --- Looks, and what listeners are sent ------------------------------------------------------------------------------


T = TypeVar("T")

EVERY = 1.0  # seconds
_LOOK_EVERY = 5.0  # seconds
_WINDOW = 10.0  # seconds over which rates are taken
_ROWS_EVERY = 10.0  # seconds between two searches for datasets and replay buffers, among
_SEARCHED = 200_000  # keys; they take about a second
_LEAVES = 500  # of one entry
_SHARDS = 2000
_TIMEOUT = 5.0  # seconds


class KeyRates:
    """Growth a second of numbers, over the last ten seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def note(self, numbers: Mapping[str, float], now: float) -> dict[str, float]:
        """Takes the numbers of this moment. Returns the rates of those that were there before."""
        while len(self._seen) > 1 and self._seen[0][0] < now - _WINDOW:
            self._seen.popleft()
        self._seen.append((now, dict(numbers)))
        found: dict[str, float] = {}
        for name, value in numbers.items():
            first = next(((at, one[name]) for at, one in self._seen if name in one), None)
            if first is not None and now > first[0]:
                found[name] = max(value - first[1], 0.0) / (now - first[0])
        return found


class Watcher:
    """Looks at one store, at most once a second however many ask.

    Args:
        root: the store's folder.
        checkpoints: folders of a CheckpointManager, or URLs.
    """

    def __init__(self, root: str, checkpoints: Sequence[str] = ()) -> None:
        self.root, self.checkpoints = root, tuple(checkpoints)
        self._lock = threading.Lock()
        self._store: Keyspace | None = None
        self._look: StoreLook | None = None
        self._looked_at = self._told_at = float("-inf")
        self._found: dict[str, Any] = {}
        self._rates = KeyRates()
        self._row_keys: tuple[str, ...] = ()
        self._searched_at = float("-inf")

    def use(self, action: Callable[[Keyspace], T]) -> T:
        """Calls `action` with the opened store, which is opened anew after an error. Raises what `action` raises."""
        with self._lock:
            if self._store is None:
                self._store = open_keyspace(self.root, "r", timeout=_TIMEOUT)
            try:
                return action(self._store)
            except MemstoreError:
                store, self._store = self._store, None
                with contextlib.suppress(MemstoreError, OSError):
                    store.close()
                raise

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def summary(self) -> dict[str, Any]:
        """Returns what isn't about single keys, of the last second. Without a store it says "gone": why."""
        try:
            return self.use(self._summary)
        except (MemstoreError, OSError) as error:
            self._rates, self._row_keys, self._searched_at = KeyRates(), (), float("-inf")
            self._look, self._told_at = None, float("-inf")
            return {"at": time.time(), "root": self.root, "gone": str(error)}

    def _summary(self, store: Keyspace) -> dict[str, Any]:
        now, root = time.monotonic(), opened(store)
        root.check_in_place()
        if now - self._told_at < EVERY * 0.9:
            return self._found
        look = self._look
        if look is None or now - self._looked_at >= _LOOK_EVERY:
            look = self._look = look_at(store, checkpoints=self.checkpoints)
            self._looked_at = now
        fresh = numbers_of_store(root)
        troubles = look.troubles
        try:
            buffers = self._rows(store, fresh.keys, now)
        except HomeUnavailableError as error:
            buffers, troubles = [], (*troubles, str(error))
        numbers: dict[str, float] = {"versions": fresh.versions}
        for one in buffers:
            numbers[f"added {one['key']}"] = one["added"] or one["rows"] or 0
            if one["sampled"] is not None:
                numbers[f"sampled {one['key']}"] = one["sampled"]
        hosts = [] if look.cluster is None else [asdict(host) for host in look.cluster.hosts]
        for host in hosts:
            numbers |= {f"sent {host['address']}": host["sent"], f"received {host['address']}": host["received"]}
        counted = calls()  # of this process, if it counts them: a get leaves no trace in the store
        if counted:
            numbers["gets"] = counted["get"].count if "get" in counted else 0
        rates = self._rates.note(numbers, now)
        for one in buffers:
            one["added_rate"] = rates.get(f"added {one['key']}")
            one["sampled_rate"] = rates.get(f"sampled {one['key']}")
        for host in hosts:
            host["sent_rate"] = rates.get(f"sent {host['address']}")
            host["received_rate"] = rates.get(f"received {host['address']}")
        self._told_at = now
        self._found = {
            "at": time.time(),
            "root": look.root,
            "stats": {**asdict(look.stats), "keys": fresh.keys, "live_bytes": fresh.live_bytes},
            "versions": fresh.versions,
            "puts_rate": rates.get("versions"),
            "gets_rate": rates.get("gets", 0.0) if counted else None,
            "holders": [asdict(one) for one in look.holders],
            "pending": [asdict(one) for one in look.pending],
            "quotas": [asdict(one) for one in look.quotas],
            "hosts": hosts,
            "lost": {} if look.cluster is None else look.cluster.lost,
            "steps": [asdict(one) for one in look.steps],
            "rows": buffers,
            "troubles": troubles,
        }
        return self._found

    def _rows(self, store: Keyspace, keys: int, now: float) -> list[dict[str, Any]]:
        """Returns the datasets and replay buffers. They are looked for now and then, since that reads all keys."""
        if now - self._searched_at >= _ROWS_EVERY * max(1.0, keys / 10_000):
            self._searched_at = now
            found: list[str] = []
            for number, (key, record) in enumerate(index.records_from(lambda: opened(store), b"", _TIMEOUT)):
                if number >= _SEARCHED:
                    break
                if record.is_mutable:
                    found.append(key.decode())
            self._row_keys = tuple(found)
        pages = (key_page(store, key, limit=1) for key in self._row_keys)
        wanted = set(self._row_keys)
        return [asdict(one) for page in pages for one in page if one.key in wanted and one.capacity is not None]


class PageListener:
    """One who watches a page of keys.

    Args:
        prefix: of the keys.
        after: the key before the first one; "" begins with the first.
        limit: how many.
    """

    def __init__(self, watcher: Watcher, prefix: str, after: str, limit: int) -> None:
        self._watcher, self._prefix, self._after, self._limit = watcher, prefix, after, limit
        self._rates = KeyRates()
        self._versions: dict[str, int] = {}
        self._changes: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Returns the summary, and the page of keys with the changes a second that were seen of each."""
        found = dict(self._watcher.summary())
        if "gone" in found:
            return found
        try:
            page = self._watcher.use(
                lambda store: key_page(store, self._prefix, self._after or None, limit=self._limit + 1)
            )
        except (MemstoreError, OSError) as error:
            return {**found, "keys": [], "more": False, "troubles": [*found["troubles"], str(error)]}
        keys = page[: self._limit]
        rates = self._changes_of(keys)
        told = [{**asdict(one), "rate": rates.get(one.key)} for one in keys]
        return {**found, "keys": told, "more": len(page) > self._limit}

    def _changes_of(self, keys: Sequence[KeyFigures]) -> dict[str, float]:
        for one in keys:
            before = self._versions.get(one.key)
            if before is not None and before != one.version:
                self._changes[one.key] = self._changes.get(one.key, 0.0) + 1
            self._versions[one.key] = one.version
        return self._rates.note({one.key: self._changes.get(one.key, 0.0) for one in keys}, time.monotonic())


def entry(root: str, key: str) -> dict[str, Any]:
    """Describes one key: its leaves, and the shards of each. Raises what `Store.info` raises.

    It loads torch, which takes seconds the first time.
    """
    with between_forks():
        from memstore.store.opening import open as open_store
    with open_store(root, "r", timeout=_TIMEOUT) as store:
        info = store.info(key)
    shards = 0
    leaves: list[dict[str, Any]] = []
    for leaf in info.leaves[:_LEAVES]:
        parts = leaf.shards[: max(_SHARDS - shards, 0)]
        shards += len(parts)
        leaves.append(
            {
                "name": ".".join(map(str, leaf.name)),
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "shape": leaf.shape,
                "nbytes": leaf.nbytes,
                "shards": [{"offsets": one.offsets, "shape": one.shape, "rank": one.rank} for one in parts],
            }
        )
    return {
        "key": info.key,
        "version": info.version,
        "kind": info.kind,
        "nbytes": info.nbytes,
        "created": info.created,
        "structure": info.structure,
        "owner": info.owner,
        "leaves": leaves,
        "more": max(len(info.leaves) - _LEAVES, 0),
    }


# --- The server ------------------------------------------------------------------------------------------------------


_LISTENERS = 32  # streams at once
_KEYS = 100  # a page
_MOST_KEYS = 500
_LAST = 3.0  # seconds for the streams to end
_PATIENCE = 30.0  # seconds for a client that sends or takes nothing
_COOKIE = "memstore_token"
_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


class LivePage:
    """A live page that is being served, until `close`. Made by `memstore.ui.serve`.

    Attributes:
        url: where to look at it; with the token, if it has one.
        port: its port.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="memstore ui", daemon=True)
        self._thread.start()
        self.port: int = server.server_address[1]
        host = server.asked_host
        host = f"[{host}]" if ":" in host else "localhost" if host in ("0.0.0.0", "") else host
        query = "" if server.token is None else f"?{urlencode({'token': server.token})}"
        self.url = f"http://{host}:{self.port}/{query}"

    def wait(self) -> None:
        """Waits until it is closed, by another thread or an interrupt."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def close(self) -> None:
        """Ends it, and the streams of all who look. May be called again."""
        if self._server.is_ending.is_set():
            return
        self._server.is_ending.set()
        self._server.shutdown()
        self._server.server_close()
        deadline = monotonic() + _LAST
        for _ in range(_LISTENERS):  # the streams end, so that nobody looks into the folder any more
            if not self._server.streams.acquire(timeout=max(0.0, deadline - monotonic())):
                break
        self._server.watcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<memstore.ui.LivePage of {self._server.watcher.root} at port {self.port}>"


def serve(
    root: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    checkpoints: Sequence[str] = (),
) -> LivePage:
    """Serves the live page of a store, and /metrics for Prometheus, from threads of this process. It only reads.

    In a process that works with the store, /metrics has the calls that `memstore.metrics.count_calls` counts.

    Args:
        root: the store's folder. It may be removed and made again while the page is served.
        host: the address at which to listen. One that isn't of the loopback takes a token.
        port: the port; 0: any free one.
        token: what everybody has to know who looks. None: all processes of this host may, **of other users, too**.
        checkpoints: folders of a CheckpointManager, or URLs of buckets, to be shown too.

    Raises:
        ValueError: `host` isn't of the loopback, and there is no token; or the token is shorter than 8 characters.
        OSError: the port is taken.

    Example:
        >>> import memstore, tempfile, urllib.request
        >>> root = tempfile.mkdtemp()
        >>> with memstore.open(root) as store, memstore.ui.serve(root) as page:
        ...     version = store.put("lr", 0.1)
        ...     text = urllib.request.urlopen(page.url + "metrics").read().decode()
        >>> 'memstore_key_version{key="lr"} 1' in text
        True
    """
    if token is None and not is_loopback(host):
        raise ValueError(f"host {host!r} can be reached from other hosts: give a token, or leave host out")
    if token is not None and len(token) < 8:
        raise ValueError("a token has 8 characters at least: secrets.token_urlsafe() makes one")
    return LivePage(_Server(Watcher(absolute_path(root), checkpoints), host, port, token))


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is this host's own, which nobody else can reach."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, watcher: Watcher, host: str, port: int, token: str | None) -> None:
        self.watcher, self.token, self.asked_host = watcher, token, host
        self.is_ending = threading.Event()
        self.streams = threading.BoundedSemaphore(_LISTENERS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that went away."""


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = f"memstore/{__version__}", ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no line for each request."""

    def _answer(self) -> None:
        split = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        if not self._may_ask(asked):
            return
        if "token" in asked and self.server.token is not None:
            self._enter(split.path)
        elif split.path in _STATIC:
            name, kind = _STATIC[split.path]
            self._send((files("memstore.ui") / "static" / name).read_bytes(), kind)
        elif split.path in ("/events", "/state"):
            self._tell_state(asked, is_stream=split.path == "/events")
        elif split.path == "/entry":
            self._tell_entry(asked.get("key", ""))
        elif split.path == "/metrics":
            self._tell_metrics()
        else:
            self._refuse(404, "there is no such page")

    # --- who may ask

    def _may_ask(self, asked: dict[str, str]) -> bool:
        token = self.server.token
        if token is None:
            if is_loopback(_name_in(self.headers.get("Host", ""))):
                return True
            self._refuse(403, f"this page is {self.server.asked_host}'s own, and was asked for as another host's")
            return False
        given = asked.get("token") or self._cookie()
        scheme, _, word = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = word.strip()
        if hmac.compare_digest(given.encode(), token.encode()):
            return True
        self._refuse(401, "this page takes its token: open the address that `memstore ui` has printed")
        return False

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _enter(self, path: str) -> None:
        """Makes a cookie of a token, so that it stands in no address any more."""
        self.send_response(303)
        cookie = SimpleCookie({_COOKIE: self.server.token or ""})
        cookie[_COOKIE]["httponly"], cookie[_COOKIE]["samesite"], cookie[_COOKIE]["path"] = True, "Strict", "/"
        self.send_header("Set-Cookie", cookie[_COOKIE].OutputString())
        self.send_header("Location", path if path in _STATIC else "/")
        self._end_heads(0)

    # --- answers

    def _end_heads(self, length: int | None) -> None:
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _send(self, body: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self._end_heads(len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_json(self, value: Any, code: int = 200) -> None:
        self._send(_as_json(value), "application/json", code)

    def _refuse(self, code: int, why: str) -> None:
        self._send(f"{why}\n".encode(), "text/plain; charset=utf-8", code)

    def _tell_metrics(self) -> None:
        server = self.server
        try:
            text = server.watcher.use(lambda store: prometheus(store, checkpoints=server.watcher.checkpoints))
        except (MemstoreError, OSError) as error:
            self._refuse(503, str(error))
        else:
            self._send(text.encode(), PROMETHEUS_TYPE)

    def _tell_entry(self, key: str) -> None:
        try:
            found = entry(self.server.watcher.root, key)
        except KeyNotFoundError as error:
            self._send_json({"error": str(error)}, 404)
        except (MemstoreError, OSError, ValueError) as error:
            self._send_json({"error": str(error)}, 503)
        else:
            self._send_json(found)

    def _tell_state(self, asked: dict[str, str], *, is_stream: bool) -> None:
        limit = asked.get("limit", "")
        number = min(max(int(limit), 1), _MOST_KEYS) if limit.isascii() and limit.isdigit() else _KEYS
        listener = PageListener(self.server.watcher, asked.get("prefix", ""), asked.get("after", ""), number)
        if not is_stream or self.command == "HEAD":
            self._send_json(listener.state())
        elif self.server.streams.acquire(False):
            try:
                self._stream(listener)
            finally:
                self.server.streams.release()
        else:
            self._refuse(503, f"{_LISTENERS} pages are open already: close some")

    def _stream(self, listener: PageListener) -> None:
        """Sends the state once a second, until the client goes or the server ends."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self._end_heads(None)
        try:
            while not self.server.is_ending.is_set():
                self.wfile.write(b"data: " + _as_json(listener.state()) + b"\n\n")
                self.wfile.flush()
                self.server.is_ending.wait(EVERY)
        except OSError:  # the client has gone
            self.close_connection = True


def _name_in(host: str) -> str:
    """Returns the name in a Host header, without its port; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
