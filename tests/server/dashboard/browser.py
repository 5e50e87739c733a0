"""Chromium without a window, driven over its DevTools pipe: no driver and no further package.

The pipe carries JSON messages that end with a zero byte: commands on descriptor 3, replies and events on 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0  # of tests on a busy machine; nothing is that slow


def find_chromium() -> str | None:
    """Chromium's path; None where it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser refused a command, or something did not happen in time."""


class Browser:
    """A browser process with one page. Use it in a `with`.

    Attributes:
        faults: what went wrong in the page: exceptions, refused loads, errors on the console.
        requests: every URL that the page asked for.
    """

    def __init__(self) -> None:
        path = find_chromium()
        assert path is not None
        self._home = tempfile.TemporaryDirectory(
            prefix="jaxserve-browser-", ignore_cleanup_errors=True
        )
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The shell puts the pipes where Chromium looks for them.
        command = [
            *(
                "bash",
                "-c",
                f'exec "$@" 3<&{to_read} 4>&{to_write}',
                "bash",
                path,
                "--headless=new",
            ),
            *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-component-update", "--mute-audio"),
            *("--hide-scrollbars", f"--user-data-dir={self._home.name}", "--remote-debugging-pipe"),
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )
        os.close(to_read)
        os.close(to_write)
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.faults: list[str] = []
        self.requests: list[str] = []
        try:
            self._open_page()
        except BaseException:
            self.close()
            raise

    def _open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._to)  # Chromium ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._home.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Gives a command and waits for its reply."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            found = self._receive(end)
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']['message']}")
                return found["result"]
            self._take(found)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("the browser did not answer")
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _take(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", details["text"])
                self.faults.append(thrown)
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.faults.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.faults.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def look(
        self, width: int, height: int, *, dark: bool = False, calm: bool = False, scale: float = 1
    ) -> None:
        """What the page is shown on."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if calm else "no-preference",
        }
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in features.items()],
        )

    def open(self, url: str) -> None:
        """Goes to a page and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The first value of an expression that is true."""
        return self.until(lambda: self.run(script), script, timeout_s)

    def until(self, check: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The first true value of a check."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = check()
            if found:
                return found
            time.sleep(0.05)
        raise BrowserError(f"not true within {timeout_s:g} s: {what}")

    def text(self, selector: str) -> str:
        """What stands in an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses a key."""
        codes = {"Enter": 13, "Tab": 9, " ": 32}
        common: dict[str, Any] = {
            "key": key,
            "code": {" ": "Space"}.get(key, key),
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 if shift else 0,
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        more = {} if text is None else {"text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path) -> bytes:
        """The page as PNG, beyond the edge of the window too."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        data = base64.b64decode(found["data"])
        path.write_bytes(data)
        return data
