"""What a reader can do with the page, in headless Chromium."""

from __future__ import annotations

import json
import re
import time
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from report_samples import comparison, invented
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from fedpmt.records import CONFIG, ROUNDS, RunRecord
from fedpmt.report import write_page
from fedpmt.report.live import open_server, serving
from fedpmt.report.page import SECTIONS
from fedpmt.report.theme import SIGNS
from web_pages import complaints, open_browser, serious_faults, set_screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from selenium.webdriver.chrome.webdriver import WebDriver
    from selenium.webdriver.remote.webelement import WebElement

pytestmark = pytest.mark.browser

RUNS = comparison(rounds=20, partitions=("iid",))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads: Path) -> Iterator[WebDriver]:
    found = open_browser(downloads)
    yield found
    found.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page of three methods and one of 25."""
    folder = tmp_path_factory.mktemp("pages")
    few, _ = write_page(RUNS, folder / "few.html")
    many, _ = write_page(twenty_five(), folder / "many.html")
    return {"few": few.as_uri(), "many": many.as_uri()}


def twenty_five() -> list[RunRecord]:
    runs = []
    for number, method in enumerate(list(SIGNS)[:25]):
        for seed in range(2):
            run = invented("feddrop", "iid", seed + 10 * number, rounds=8)
            settings = {**run.settings, "method": method, "seed": seed}
            runs.append(run.model_copy(update={"settings": settings, "folder": run.folder / method}))
    return runs


@pytest.fixture
def page(browser: WebDriver, pages: dict[str, str]) -> WebDriver:
    set_screen(browser, 1400)
    browser.get(pages["few"])
    return browser


def find(browser: WebDriver, css: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, css)


def texts(browser: WebDriver, css: str) -> list[str]:
    """The words of all that is shown, read at once: a live page may replace it at any time."""
    shown = "[...document.querySelectorAll(arguments[0])].filter(one => one.getClientRects().length)"
    return list(browser.execute_script(f"return {shown}.map(one => one.innerText.trim())", css))


def scroll_to(browser: WebDriver, target: WebElement) -> WebElement:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", target)
    # Scrolling ends a hover; its event comes with the next frame.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return target


def choose(browser: WebDriver, label: str, option: str) -> None:
    select = browser.find_element(By.XPATH, f"//label[span='{label}']/select")
    Select(select).select_by_visible_text(option)


def press(browser: WebDriver, label: str, inside: str = "") -> None:
    button = next(
        one for one in browser.find_elements(By.CSS_SELECTOR, f"{inside} button") if one.text == label
    )
    scroll_to(browser, button).click()


def point_at(browser: WebDriver, css: str, x: int = 0, y: int = 0) -> None:
    """Move the mouse to the middle of something, or so far from it."""
    target = scroll_to(browser, find(browser, css))
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", target)
    actions = ActionBuilder(browser)
    place = box["left"] + box["width"] / 2 + x, box["top"] + box["height"] / 2 + y
    actions.pointer_action.move_to_location(*map(round, place))  # type: ignore[no-untyped-call]
    actions.perform()


def drawn(browser: WebDriver) -> str:
    """The pixels of the first chart."""
    return str(browser.execute_script("return document.querySelector('.plot canvas').toDataURL()"))


def mean_score(method: str, number: int) -> float:
    found = [run.rounds[number - 1].score for run in RUNS if run.settings["method"] == method]
    return fmean(score for score in found if score is not None)


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> float:
    """How long it took until something held."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it did not come"
        time.sleep(0.02)
    return time.monotonic() - begun


def hovered(browser: WebDriver) -> dict[str, tuple[int, str]]:
    """The round and the value that the tooltip shows of each method."""
    rows = {}
    for row in texts(browser, ".tooltip tr"):
        words = " ".join(row.split())
        found = re.fullmatch(r"(\w+) ([\d.]+ %)(?: \(.*\))? (?:.*, )?round (\d+)", words)
        assert found is not None, row
        rows[found[1]] = (int(found[3]), found[2])
    return rows


def test_hover_shows_the_values_of_the_records(page: WebDriver) -> None:
    for axis in ("round", "virtual time"):
        choose(page, "against", axis)
        for x in (-300, 0, 250):
            point_at(page, ".u-over", x)
            rows = hovered(page)
            assert set(rows) == {"fedpmt", "fedavg", "feddrop"}
            for method, (number, value) in rows.items():
                assert value == f"{100 * mean_score(method, number):.2f} %"
    assert complaints(page) == []


def test_smoothing_bends_lines_but_not_values(page: WebDriver) -> None:
    before = drawn(page)
    slider = find(page, ".slide input")
    page.execute_script("arguments[0].value = 0.8; arguments[0].dispatchEvent(new Event('input'))", slider)
    assert drawn(page) != before
    point_at(page, ".u-over")
    for method, (number, value) in hovered(page).items():
        assert value == f"{100 * mean_score(method, number):.2f} %"


def test_a_click_hides_and_another_shows(page: WebDriver) -> None:
    before = drawn(page)
    scroll_to(page, find(page, "[data-line=fedavg].chip")).click()
    chip = find(page, "[data-line=fedavg].chip")
    assert chip.get_attribute("aria-pressed") == "false"
    assert drawn(page) != before
    point_at(page, ".u-over")
    assert set(hovered(page)) == {"fedpmt", "feddrop"}
    assert texts(page, "#busy figure figcaption")[0].startswith("fedpmt")
    assert len(texts(page, "#busy figure figcaption")) == 2
    scroll_to(page, find(page, "[data-line=fedavg].chip")).click()
    page.execute_script("document.activeElement.blur()")
    point_at(page, "h1")
    assert drawn(page) == before


def test_dragging_zooms_and_reset_shows_all(page: WebDriver) -> None:
    before = drawn(page)
    point_at(page, ".u-over", -200, -60)
    ActionChains(page).click_and_hold().move_by_offset(220, 90).release().perform()
    assert find(page, ".plot").get_attribute("data-zoomed") == "true"
    zoomed = drawn(page)
    assert zoomed != before
    point_at(page, ".u-over")
    for method, (number, value) in hovered(page).items():
        assert value == f"{100 * mean_score(method, number):.2f} %"
    press(page, "Reset")
    assert find(page, ".plot").get_attribute("data-zoomed") == "false"
    point_at(page, "h1")
    assert drawn(page) == before


def test_log_axes_and_other_measures(page: WebDriver) -> None:
    seen = {drawn(page)}
    for label in ("log x", "log y"):
        scroll_to(page, page.find_element(By.XPATH, f"//label[span='{label}']")).click()
        seen.add(drawn(page))
    choose(page, "Show", "test loss")
    seen.add(drawn(page))
    assert len(seen) == 4
    assert complaints(page) == []


def test_a_round_can_be_chosen(page: WebDriver) -> None:
    slider = find(page, "#busy input[type=range]")
    slider.send_keys(Keys.HOME)
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    for caption, method in zip(texts(page, "#busy figcaption"), ("fedpmt", "fedavg", "feddrop"), strict=True):
        step = next(run for run in RUNS if run.settings["method"] == method).rounds[2]
        arrived = sum(device.outcome == "arrived" for device in step.devices)
        assert caption.startswith(f"{method} round 3: {arrived} of 10 counted, {step.round_seconds:.3g} s")
    point_at(page, "#busy .bar")
    slowest = min(RUNS[0].rounds[2].devices, key=lambda device: (device.level, device.device))
    trained = slowest.seconds - slowest.transfer_seconds
    [words] = texts(page, ".tooltip p")
    assert words.startswith(f"device {slowest.device}, level 1 (0.2×), depth 1: ")
    assert float(words.split(": ")[1].split(" s")[0]) == pytest.approx(trained, rel=0.01)
    scroll_to(page, find(page, "#busy summary")).click()
    assert len(page.find_elements(By.CSS_SELECTOR, "#busy .numbers[open] tbody tr")) == 10


def test_tables_sort_and_the_filter_narrows_all(page: WebDriver) -> None:
    rows = "#summary tbody tr"
    assert [row.split()[0] for row in texts(page, rows)] == ["fedpmt", "fedavg", "feddrop"]
    press(page, "final accuracy", "#summary")
    last = {method: mean_score(method, 20) for method in ("fedpmt", "fedavg", "feddrop")}
    best_first = sorted(last, key=lambda method: -last[method])
    assert [row.split()[0] for row in texts(page, rows)] == best_first
    press(page, "final accuracy", "#summary")
    assert [row.split()[0] for row in texts(page, rows)] == best_first[::-1]
    find(page, "input[type=search]").send_keys("drop")
    assert [row.split()[0] for row in texts(page, rows)] == ["feddrop"]
    assert texts(page, ".chip") == ["feddrop"]
    assert len(texts(page, "#busy figcaption")) == 1


def test_the_keyboard_reaches_every_value(page: WebDriver) -> None:
    choose(page, "against", "round")
    plot = find(page, ".plot")
    plot.send_keys(Keys.ARROW_RIGHT)
    plot = find(page, ".plot")
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    said = find(page, "#score [role=status]").get_attribute("textContent") or ""
    assert said.startswith(f"fedavg, round 2: {100 * mean_score('fedavg', 2):.2f} %")
    plot.send_keys("+")
    assert find(page, ".plot").get_attribute("data-zoomed") == "true"
    plot.send_keys(Keys.ESCAPE)
    assert find(page, ".plot").get_attribute("data-zoomed") == "false"


def test_figures_can_be_saved(page: WebDriver, downloads: Path) -> None:
    choose(page, "against", "round")
    press(page, "PNG")
    press(page, "CSV", ".chart")
    press(page, "SVG")
    name = "test-accuracy-against-round"
    wait_for(lambda: (downloads / f"{name}.png").exists() and (downloads / f"{name}.csv").exists())
    wait_for(lambda: list(downloads.glob("fedpmt*.svg")))
    assert (downloads / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    head, first, *_ = (downloads / f"{name}.csv").read_text().splitlines()
    assert head == "method,round,rounds,mean,low,high"
    assert first.split(",")[:3] == ["fedpmt", "1", "1"]
    assert float(first.split(",")[3]) == pytest.approx(mean_score("fedpmt", 1), rel=1e-6)
    assert "<svg" in next(downloads.glob("fedpmt*.svg")).read_text()


@pytest.mark.parametrize("width", [390, 1400, 1920])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["few", "many"])
def test_it_works_at_every_width(
    browser: WebDriver, pages: dict[str, str], width: int, dark: bool, name: str
) -> None:
    set_screen(browser, width, dark=dark)
    browser.get(pages[name])
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
    assert set(SECTIONS) - {"budget", "clients"} <= {
        section.get_attribute("id") or "" for section in browser.find_elements(By.CSS_SELECTOR, "section")
    }
    box = find(browser, ".plot canvas").rect
    assert box["width"] > 0.6 * min(width, 1240)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert serious_faults(browser) == []
    assert complaints(browser) == []


def test_static_figures_stay_on_paper_and_without_scripts(browser: WebDriver, pages: dict[str, str]) -> None:
    shown = "const e = document.querySelector(arguments[0]); return getComputedStyle(e).display !== 'none'"
    set_screen(browser, 1400, dark=True)
    browser.get(pages["few"])
    assert not browser.execute_script(shown, "#score .static")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script(shown, "#score .static")
    assert not browser.execute_script(shown, "#score .active")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(pages["few"])
        root = browser.execute_cdp_cmd("DOM.getDocument", {})["root"]["nodeId"]
        for css in ("#score .static figure svg", "#busy .static figure svg"):
            node = browser.execute_cdp_cmd("DOM.querySelector", {"nodeId": root, "selector": css})["nodeId"]
            model = browser.execute_cdp_cmd("DOM.getBoxModel", {"nodeId": node})["model"]
            assert model["width"] > 200
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def write_rounds(run: RunRecord, folder: Path, count: int) -> None:
    """Cut the records of a run back to a number of rounds."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"format": 1, "settings": run.settings}))
    lines = [step.model_dump_json(exclude_defaults=True) + "\n" for step in run.rounds[:count]]
    (folder / ROUNDS).write_text("".join(lines))


def test_the_live_page_shows_a_round_within_two_seconds(browser: WebDriver, tmp_path: Path) -> None:
    set_screen(browser, 1400)
    with serving(open_server([tmp_path], "127.0.0.1", 0)) as server:
        browser.get(server.url)
        assert "No run has begun yet." in texts(browser, "#top")[0]
        write_rounds(RUNS[0], tmp_path / "one", 3)
        wait_for(lambda: "round 3 of" in texts(browser, "#top")[0])
        choose(browser, "against", "round")
        for count in (4, 5, 6):
            write_rounds(RUNS[0], tmp_path / "one", count)
            took = wait_for(lambda count=count: f"round {count} of" in texts(browser, "#top")[0])  # type: ignore[misc]
            assert took < 2
            point_at(browser, ".u-over", 500)
            score = RUNS[0].rounds[count - 1].score
            assert score is not None
            assert hovered(browser)["fedpmt"] == (count, f"{100 * score:.2f} %")
        # Another run may begin at any time.
        write_rounds(RUNS[2], tmp_path / "two", 2)
        wait_for(lambda: len(texts(browser, ".chip")) == 2)
        assert serious_faults(browser) == []
        assert complaints(browser) == []
    wait_for(lambda: "Not connected" in texts(browser, "#live")[0])
    assert texts(browser, ".chip") == ["fedpmt", "fedavg"]
