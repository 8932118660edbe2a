"""The planner page: its script computes what `fedpmt plan` does, in any browser window, and needs nothing else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from selenium.webdriver.common.keys import Keys

import fedpmt
from fedpmt.cli.main import program
from fedpmt.report import planner
from fedpmt.types import SettingError
from web_pages import Reader, complaints, open_browser, serious_faults, set_screen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver.chrome.webdriver import WebDriver

SCRIPT = Path(planner.__file__).with_name("assets").joinpath("planner.js").read_text()
RNG = np.random.default_rng(20)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40),
        torch.nn.ReLU(),
        torch.nn.Linear(40, 30),
        torch.nn.ReLU(),
        torch.nn.Linear(30, 4),
    )


def embedded(path: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="prices">(.*?)</script>', path.read_text(), re.DOTALL
    )
    assert found is not None
    made: dict[str, Any] = json.loads(found[1])
    return made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a user's own model, and a fleet in which everything binds somebody."""
    path = tmp_path_factory.mktemp("planner") / "plan.html"
    fleet = [
        fedpmt.Device(name="<b>pi</b>", speed=0.2, count=8, uplink_mbps=0.01),
        fedpmt.Device(name="phone", speed=0.5, count=8, memory_mib=0.02),
        fedpmt.Device(name="old", speed=0.01, count=2),
        fedpmt.Device(name="workstation", speed=1, count=4),
    ]
    given: dict[str, Any] = {"fleet": fleet, "deadline": 30, "samples": 60, "batch": 10}
    fedpmt.plan(net(), torch.zeros(2, 12), out=path, **given)
    return path


def test_the_page_is_one_file_that_asks_for_nothing(page: Path) -> None:
    """Well formed, every control has a label, names of devices are no markup, and the plan stands in it as text."""
    text = page.read_text()
    found = Reader(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    assert set(found.addresses) == {"data:,"}
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(", text)
    labelled = set(re.findall(r'<label for="(\w+)"', text))
    assert labelled == set(re.findall(r'<(?:input|select)[^>]* id="(\w+)"', text)) - {""}
    assert len(labelled) == 9
    assert "<b>pi" not in text
    assert "&lt;b&gt;pi&lt;/b&gt;" in text[text.index("<noscript>") : text.index("</noscript>")]
    assert max(found.ids.values()) == 1


def test_the_page_holds_what_it_was_made_with(page: Path) -> None:
    made = embedded(page)
    assert made["choice"] | {"share": 0} == {
        "deadline": 30,
        "budget": None,
        "precision": "fp32",
        "frozen_precision": "fp32",
        "plan": "paper",
        "share": 0,
    }
    assert [kind["devices"] for kind in made["prices"]["kinds"]] == [2, 8, 8, 4]
    pairs = {(one["precision"], one["frozen_precision"]) for one in made["prices"]["prices"]}
    assert len(pairs) == len(made["prices"]["prices"]) == 6


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--out", "."], "out must be a file name that ends in .html"),
        (["--out", "plan.txt"], "out must be a file name that ends in .html"),
        (
            ["--out", "plan.html", "--levels", "lognormal:1", "--devices", "2000"],
            "at most 1,000 kinds of devices",
        ),
        (["--out", "plan.html", "--deadline", "1"], "deadline must be >= 4.2"),
    ],
)
def test_pages_that_are_refused(
    given: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program(["plan", *given]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    driver = open_browser(tmp_path_factory.mktemp("downloads"))
    yield driver
    driver.quit()


def bases() -> Iterator[dict[str, Any]]:
    """Models, data, clocks and fleets of all kinds."""
    while True:
        choose = RNG.choice
        given: dict[str, Any] = {
            "samples": int(RNG.integers(5, 90)),
            "batch": int(choose([4, 10, 32])),
            "epochs": int(choose([1, 1, 2, 5])),
            "prefix": str(choose(["auto", "cache", "recompute", "streamed"])),
            "full_seconds": float(choose([10.0, 3.5])),
        }
        kinds = int(RNG.integers(1, 6))
        if RNG.random() < 0.2:
            yield given | {"devices": 3 * kinds, "levels": "1/5,1/2,1", "assign": "level", "depths": 3}
            continue
        columns: dict[str, Any] = {"speed": [round(float(one), 3) for one in RNG.uniform(0.05, 2, kinds)]}
        columns["count"] = RNG.integers(1, 30, kinds).tolist()
        if RNG.random() < 0.5:
            columns["name"] = [f"kind {number}" for number in range(kinds)]
        for column, scale in (("uplink_mbps", 0.05), ("downlink_mbps", 0.1), ("memory_mib", 0.03)):
            if RNG.random() < 0.6:
                columns[column] = [
                    None if RNG.random() < 0.2 else float(scale * RNG.lognormal(0, 0.5)) for _ in range(kinds)
                ]
        if RNG.random() < 0.4:
            columns["watts_computing"] = RNG.uniform(1, 9, kinds).tolist()
            columns["watts_sending"] = RNG.uniform(0, 2, kinds).tolist()
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        yield given | {"fleet": rows}


def choices(base: dict[str, Any], longest: float) -> Iterator[dict[str, Any]]:
    """What a reader may choose: first what the page begins with."""
    watts = any("watts_computing" in row for row in base.get("fleet", ()))
    yield {}
    while True:
        choose, given = RNG.choice, dict[str, Any]()
        if RNG.random() < 0.8:
            given["deadline"] = float(np.round(longest * RNG.uniform(0.05, 1.2), 3))
        if RNG.random() < 0.5:
            resources = ["operations", "time", "bytes", "upload", "memory", *(["energy"] if watts else [])]
            resource, share = str(choose(resources)), round(float(RNG.uniform(0.2, 1)), 2)
            given["budget"] = str(choose([resource, f"{resource}={share}", "memory=0.03MiB", "upload=6kB"]))
        given["precision"] = str(choose(["fp32", "bf16"]))
        given["frozen_precision"] = str(choose(["fp32", "bf16", "int8"]))
        if RNG.random() < 0.5:
            given |= {
                "plan": str(choose(["traded", "rotated"])),
                "options": {"share": round(float(RNG.random()), 2)},
            }
        yield given


def as_chosen(given: dict[str, Any]) -> dict[str, Any]:
    """Settings as the page has them."""
    from fedpmt.resources import parse_budget

    budget = None if "budget" not in given else parse_budget(given["budget"])
    return {
        "deadline": given.get("deadline"),
        "budget": budget
        and {"resource": budget.resource, "amounts": budget.amounts, "text": given["budget"]},
        "precision": given.get("precision", "fp32"),
        "frozen_precision": given.get("frozen_precision", "fp32"),
        "plan": given.get("plan", "paper"),
        "share": given.get("options", {}).get("share", 0.5),
    }


def same(mine: Any, theirs: Any) -> bool:
    """Equal, but for the last digits of real numbers."""
    if isinstance(mine, float) and isinstance(theirs, int | float):
        return math.isclose(mine, theirs, rel_tol=1e-9)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return all(same(mine[key], theirs.get(key)) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


NOT_RECOMPUTED = (
    "task",
    "assign",
    "plan",
    "share",
    "mode",
    "samples",
    "full_seconds",
    "layers",
    "depths",
    "note",
)
ONLY_IN_TEXT = (*NOT_RECOMPUTED, "base_bytes", "base_seconds")


@pytest.mark.browser
def test_the_page_agrees_with_the_planner_on_200_inputs(browser: WebDriver, tmp_path: Path) -> None:
    model, example, path = net(), torch.zeros(2, 12), tmp_path / "plan.html"
    asked: list[dict[str, Any]] = []
    expected: list[dict[str, Any] | None] = []
    inputs: list[dict[str, Any]] = []
    for base in bases():
        try:
            first = fedpmt.plan(model, example, out=path, **base)
        except SettingError:
            continue  # nobody has the memory for anything
        longest = max(first.fedavg_round_seconds, first.round_seconds)
        some = [given for given, _ in zip(choices(base, longest), range(10), strict=False)]
        asked.append({"prices": embedded(path)["prices"], "choices": [as_chosen(given) for given in some]})
        for given in some:
            inputs.append({**base, **given})
            try:
                table = fedpmt.plan(model, example, **base, **given)
            except SettingError:
                expected.append(None)
            else:
                expected.append(table.model_dump(mode="json", exclude=set(ONLY_IN_TEXT)))
        if len(inputs) == 200:
            break
    browser.get("about:blank")
    every = "asked.flatMap(({prices, choices}) => choices.map((choice) => planFleet(prices, choice)))"
    script = f"{SCRIPT}\nconst asked = JSON.parse(arguments[0]); return JSON.stringify({every});"
    found = json.loads(browser.execute_script(script, json.dumps(asked)))
    assert len(found) == 200
    wrong = [
        (given, mine, theirs)
        for given, mine, theirs in zip(inputs, expected, found, strict=True)
        if (mine is None) != theirs["error"] or (mine is not None and not same(mine, theirs))
    ]
    assert not wrong, (len(wrong), wrong[0])
    # The inputs were not all alike.
    met = [mine for mine in expected if mine is not None]
    assert 100 < len(met) < 200
    bound = {name for mine in met for row in mine["devices"] for name in row["binds"]}
    assert {"time", "upload", "download", "memory", "operations", "level"} <= bound
    assert all(
        sum(mine[key] is not None for mine in met) > 30 for key in ("psi", "more_time", "least_deadline")
    )
    assert sum(mine["more_memory"] is not None for mine in met) > 10


def look(browser: WebDriver) -> dict[str, str]:
    """The words of the page, by the part they stand in."""
    names = ("headline", "words", "fleet-bars", "layer-cells", "flags", "shown-plan")
    return {name: browser.find_element("id", name).text for name in names}


@pytest.mark.browser
def test_controls_change_the_plan(browser: WebDriver, page: Path) -> None:
    """By keyboard alone, and each change says which flags it stands for."""
    set_screen(browser, 1400)
    browser.get(page.as_uri())

    def write(name: str, *keys: str) -> dict[str, str]:
        browser.find_element("id", name).send_keys(*keys)
        return look(browser)

    start = look(browser)
    assert start["headline"].startswith("20 of 22 devices take part. A round takes 30.0 s")
    assert "takes no part: computing time" in start["fleet-bars"]
    assert "limited by memory" in start["fleet-bars"]
    assert "<b>pi</b>" in start["fleet-bars"]
    assert start["flags"] == "nothing was changed"
    assert "paper's plan" in start["shown-plan"]
    assert write("seconds", Keys.CONTROL, "a", Keys.NULL, "12.5")["flags"] == "--deadline 12.5"
    assert write("resource", "memory")["flags"].endswith("--budget memory=0.5")
    budget = write("amount", *[Keys.ARROW_RIGHT] * 10)
    assert budget["flags"] == "--deadline 12.5 --budget memory=0.6"
    precision = write("frozen", "int8")
    assert precision["flags"].endswith("--frozen-precision int8")
    assert precision["fleet-bars"] != budget["fleet-bars"]
    traded = write("plan", "traded")
    assert traded["flags"].endswith("--plan traded")
    assert "traded plan" in traded["shown-plan"]
    assert write("share", Keys.ARROW_LEFT)["flags"].endswith("--set fedpmt.share=0.49")
    nobody = write("seconds", Keys.CONTROL, "a", Keys.NULL, "0.001")
    assert nobody["headline"].startswith("No device can take part.")
    assert nobody["layer-cells"].count("nobody") == 3
    assert write("reset", Keys.ENTER) == start
    assert write("everybody", Keys.SPACE)["headline"].startswith("22 of 22")
    fitted = write("free", Keys.SPACE)
    assert "the tightest that leaves nobody out" in fitted["words"]
    assert not browser.find_element("id", "deadline").is_enabled()
    write("free", Keys.SPACE)
    assert write("deadline", Keys.HOME)["headline"] != fitted["headline"]
    assert complaints(browser) == []


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400, 1920])
def test_it_is_legible_on_any_screen(browser: WebDriver, page: Path, width: int, dark: bool) -> None:
    """Nothing is cut off, and axe-core finds no serious fault."""
    set_screen(browser, width, dark=dark)
    browser.get(page.as_uri())
    root = "document.documentElement"
    assert browser.execute_script(
        f"return {root}.scrollWidth <= {root}.clientWidth && innerWidth === {width}"
    )
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 50) == dark
    assert serious_faults(browser) == []
    assert complaints(browser) == []


@pytest.mark.browser
def test_without_scripts_the_plan_is_there(browser: WebDriver, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    read = "\n".join(str(node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"])
    assert "A FedPMT round takes 30.0 s" in read
    assert "Deadline of a round" not in read
