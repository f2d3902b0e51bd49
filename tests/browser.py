"""A headless Chromium that shows a page, and that a test drives through the pipe of its debugger.

with Browser(file, width=1280) as page:
    page.value("document.title")
    page.press("ArrowRight")
    page.screenshot(path)

It needs no network and no package. `require_chromium` skips a test where Chromium is missing.
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Tab": 9}


def chromium() -> str | None:
    """The path of the browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def require_chromium() -> None:
    if chromium() is None:
        pytest.skip("Chromium is not installed: apt-get install --no-install-recommends chromium")


class Browser:
    """A browser that has loaded one page."""

    def __init__(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False):
        self._file, self._size, self._dark = file, (width, height), dark
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.requests: list[str] = []  # of the page, its own file excluded
        self.messages: list[str] = []  # of the console, and exceptions

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # High numbers, so that none of them is 3 or 4, where the browser expects its pipes.
        ends = [*os.pipe(), *os.pipe()]
        from_test, self._to, self._from, to_test = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends
        )
        for end in ends:
            os.close(end)
        command = [
            chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{from_test} 4>&{to_test}', "bash", *command],
            pass_fds=(from_test, to_test), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (from_test, to_test):
            os.close(end)
        self._session: str | None = None
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        # A smooth scroll that still runs, of an element that got the focus, undoes a later one.
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._call("Emulation.setEmulatedMedia", features=[scheme, motion])
        self.resize(*self._size)
        self._call("Page.navigate", url=self._file.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._to, self._from):
            os.close(end)
        self._profile.cleanup()

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON gives it."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True,
                            awaitPromise=True)  # fmt: skip
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}; {self.messages}")
            time.sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key where the focus is."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key, ord(key[0].upper()))
        shared: Mapping[str, Any] = {
            "key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift, "code": key,
        }  # fmt: skip
        kind = "keyDown" if text else "rawKeyDown"
        self._call("Input.dispatchKeyEvent", type=kind, text=text, **shared)
        self._call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at `start`, move to `end` and release: pixels of the window."""
        steps = [("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)]
        for kind, (x, y) in steps:
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left",
                       buttons=1, clickCount=1)  # fmt: skip

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=False)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """The window as a PNG."""
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], 60)
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, "Chromium does not answer"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: Mapping[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if url != self._file.resolve().as_uri() and not url.startswith("data:"):
                self.requests.append(url)
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.messages.append(json.dumps(about))
