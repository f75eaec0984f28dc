"""A headless Chromium, driven by its DevTools protocol over a pipe: no package is needed for that."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds: a busy machine takes its time


def find() -> str | None:
    """The path of a browser of this machine; None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page. Use it in a `with`."""

    def __init__(self, path: str, folder: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, theirs_too = os.pipe()
        flags = (
            "--headless=new",
            "--no-sandbox",  # the tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        )
        wrapper = f'exec "$0" "$@" about:blank 3<&{theirs} 4>&{theirs_too}'  # the protocol is spoken at 3 and 4
        self._process = subprocess.Popen(
            ["bash", "-c", wrapper, path, *flags],
            pass_fds=(theirs, theirs_too),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_too)
        self._last, self._left, self.events = 0, b"", list[dict[str, Any]]()
        self._session: str | None = None

    def __enter__(self) -> Browser:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0.0))
            assert ready, "the browser says nothing"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._left += data
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)

    # --- the page

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the size of the window, and the scheme of colours that its user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits until an expression on the page is true, and returns it."""
        end = time.monotonic() + PATIENCE
        while not (found := self.value(script)):
            assert time.monotonic() < end, (
                f"{script} stays {found!r}; the page: {self.value('document.body.innerText')}"
            )
            time.sleep(0.05)
        return found

    def press(self, key: str, *, text: str = "") -> None:
        """Presses a key, such as "Tab", "Enter" or "/"."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        more: dict[str, Any] = {"text": text or "\r"} if text or key == "Enter" else {}
        code = codes.get(key, ord(key[0]))
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Writes a PNG of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """The errors that the page has logged or thrown."""
        self.value("1")
        found: list[str] = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                if "net::ERR_" in event["params"]["entry"]["text"]:
                    continue  # the server of a test has ended, and the page listens still
                found.append(event["params"]["entry"]["text"])
        return found
