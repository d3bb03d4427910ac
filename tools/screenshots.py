# SPDX-License-Identifier: Apache-2.0
"""Looks at every picture and page that nemo2 makes: `make screenshots`, or `python -m tools.screenshots FOLDER`.

Each page is made as its command makes it and taken in Chromium, wide (1400 px) and narrow (390 px), light and dark. Of each the
browser is asked what a reader would stumble over: words below 11 px, cut off, over other words, over lines or dots, or hard
to tell from their ground; pages that scroll sideways as a whole. A finding is printed, and ends the program with 1. The runs
and traces drawn here are made up.
"""

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.every_page import PAGES

WIDTHS = {"wide": 1400, "narrow": 390}
THEMES = ("light", "dark")
AUDIT = Path(__file__).with_name("screenshots.js")
_MOST_HIGH = 12_000


class Browser:
    """Chromium without a window, spoken to through a pipe in its DevTools protocol."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        to_read, ours_to_write = os.pipe()
        ours_to_read, to_write = os.pipe()
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
            "--allow-file-access-from-files", f"--user-data-dir={self._folder.name}",
        ]  # fmt: skip
        # The browser reads from descriptor 3 and writes to 4, wherever ours are.
        bash = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(bash, pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        self._in, self._out = os.fdopen(ours_to_write, "wb", buffering=0), os.fdopen(ours_to_read, "rb", buffering=0)
        self._rest, self._number, self._events = b"", 0, []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._in.close()
        self._process.terminate()
        self._process.wait(timeout=20)
        self._out.close()
        self._folder.cleanup()

    def open(self, page: Path, *, width: int, theme: str) -> None:
        """Load a file in a window of this width."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self._events.clear()
        answer = self._ask("Page.navigate", url=page.absolute().as_uri())
        if "errorText" in answer:
            raise FileNotFoundError(f"{page}: {answer['errorText']}")
        while "Page.loadEventFired" not in self._events:
            self._read()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", found))
        return found["result"].get("value")

    def picture(self, *, width: int) -> bytes:
        """The whole page as PNG, at most 12,000 px of it."""
        high = min(self.run("document.documentElement.scrollHeight"), _MOST_HIGH)
        clip = {"x": 0, "y": 0, "width": width, "height": high, "scale": 1}
        taken = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": arguments}
        if hasattr(self, "_session"):
            asked["sessionId"] = self._session
        self._in.write(json.dumps(asked).encode() + b"\0")
        while (told := self._read()).get("id") != self._number:
            pass
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        return told["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._out.read(1 << 16)
            if not more:
                raise RuntimeError("Chromium has ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        told = json.loads(line)
        self._events += [told["method"]] if "method" in told else []
        return told


@dataclass(frozen=True)
class Finding:
    page: str
    width: str
    theme: str
    words: str

    def __str__(self) -> str:
        return f"{self.page} ({self.width}, {self.theme}): {self.words}"


def look_at(pages: Iterable[Path], folder: Path, *, browser: Browser, names: Callable[[Path], str]) -> list[Finding]:
    """Take each page in both widths and themes into ``folder``; returns what the browser found."""
    audit, found = AUDIT.read_text(encoding="utf-8"), []
    for page in pages:
        for width, pixels in WIDTHS.items():
            for theme in THEMES:
                browser.open(page, width=pixels, theme=theme)
                found += [Finding(names(page), width, theme, words) for words in browser.run(audit)]
                target = folder / f"{names(page)}.{width}.{theme}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(browser.picture(width=pixels))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pages and their pictures go")
    parser.add_argument("--only", help="a regular expression: pages whose names hold it")
    parser.add_argument("--site", type=Path, help="a built documentation site, some of whose pages are looked at too")
    parser.add_argument("--again", action="store_true", help="take the pages that are in the folder as they are")
    given = parser.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        print("needs Chromium or Chrome on the PATH", file=sys.stderr)
        return 2
    made = given.folder / "pages"
    made.mkdir(parents=True, exist_ok=True)
    wanted = {name: make for name, make in PAGES.items() if not given.only or re.search(given.only, name)}
    for name, make in wanted.items():
        target = made / f"{name}.html"
        if not given.again or not target.is_file():
            print(f"makes {target}", flush=True)
            make(target)
    pages = [made / f"{name}.html" for name in wanted]
    with Browser(program) as browser:
        found = look_at(pages, given.folder, browser=browser, names=lambda page: page.stem)
        if given.site:
            places = ("index", "quickstart", "parallelism", "plan", "checks", "reference/training", "reference/recipes")
            site = [given.site / f"{place}.html" for place in places if not given.only or re.search(given.only, place)]
            found += look_at(
                site,
                given.folder / "site",
                browser=browser,
                names=lambda page: page.relative_to(given.site).with_suffix("").as_posix(),
            )
    print("\n".join(map(str, found)))
    print(f"{len(pages)} pages, {len(found)} findings; pictures in {given.folder}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
