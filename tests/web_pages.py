"""What holds for every page of HTML that is written."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import matplotlib.image
import pytest

from vendor import AXE, fetch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from selenium.webdriver.chrome.webdriver import WebDriver

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that tags close in order and keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags = Counter[str]()
        self.ids = Counter[str]()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


NAMES = ('"http://www.w3.org/2000/svg"', "/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
"""What looks like an address in the script but is none: the name of SVG, and a comment."""


def read(text: str, files: frozenset[str] = frozenset(), scripts: int = 0) -> Reader:
    """A well-formed page that asks for nothing but these files next to it, and has this many scripts, all inside."""
    found = Reader(text)
    assert [identity for identity, count in found.ids.items() if count > 1] == []
    anchors = {address[1:] for address in found.addresses if address.startswith("#")}
    assert anchors <= set(found.ids)
    assert {address for address in found.addresses if not address.startswith("#")} <= {"data:,", *files}
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    for name in NAMES if scripts else ():
        without_names = without_names.replace(name, "")
    assert "http:" not in without_names
    assert "https:" not in without_names
    assert "@import" not in text
    assert found.tags["script"] == scripts
    return found


def open_browser(downloads: Path) -> WebDriver:
    """Headless Chromium that a test drives; what a page saves goes to this folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "hide-scrollbars",
        "disable-background-networking",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    save = {"behavior": "allow", "downloadPath": str(downloads)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", save)
    return browser


def set_screen(browser: WebDriver, width: int, height: int = 1000, *, dark: bool = False) -> None:
    """Give the page a size and the reader's preference of colours."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    # Else the page still scrolls while a test looks at it.
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})


def complaints(browser: WebDriver) -> list[str]:
    """What the browser has to say of the page: errors of its script, refused requests."""
    return [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]


def serious_faults(browser: WebDriver) -> list[str]:
    """What axe-core finds that keeps people from using the page."""
    if not AXE.exists():
        try:
            fetch("axe-core@4.14.0")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no axe-core, and npm does not give it ({error})")
    browser.execute_script(AXE.read_text())
    found = browser.execute_async_script("axe.run(document).then(arguments[0])")
    assert len(found["passes"]) > 10
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def shown_by_a_browser(path: Path, sections: Iterable[str], *, width: int, dark: bool) -> None:
    """Headless Chromium finds the sections and paints the page, in the colours that the reader prefers."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    common = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
        "--hide-scrollbars", f"--user-data-dir={path.parent / 'profile'}", f"--window-size={width},3000",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]  # fmt: skip
    dumped = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    for identity in sections:
        assert f'<section id="{identity}"' in dumped.stdout
    picture = path.with_suffix(".png")
    subprocess.run(
        [*common, f"--screenshot={picture}", path.as_uri()], capture_output=True, timeout=120, check=True
    )
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (3000, width)
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, 3).tolist()}) > 50
    assert (pixels[5, 5].mean() < 0.3) == dark
