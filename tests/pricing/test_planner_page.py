"""The planner page: its script computes what `fedpmt plan` does, in any browser window, and needs nothing else."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import fedpmt
from fedpmt.cli.main import program
from fedpmt.report import planner
from fedpmt.types import SettingError
from web_pages import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(planner.__file__).with_name("planner.js").read_text()
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


def browse(path: Path, *flags: str) -> str:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    common = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
    ]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run(
        [browser, *common, "--hide-scrollbars", profile, *flags, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout


def ask(path: Path, script: str, *flags: str) -> Any:
    """What a script, which assigns to `answer`, finds in a page."""
    assert path.is_file()
    asking = path.with_name("asking.html")
    tail = f"let answer; {script}\ndocument.body.replaceChildren(JSON.stringify(answer));"
    asking.write_text(path.read_text().replace("</body>", f"<script>{tail}</script></body>"))
    found = re.search(r"<body>(.*?)</body>", browse(asking, "--dump-dom", *flags), re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


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
def test_the_page_agrees_with_the_planner_on_200_inputs(tmp_path: Path) -> None:
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
    empty = tmp_path / "empty.html"
    data = json.dumps(asked).replace("<", "\\u003c")
    empty.write_text(f"<!DOCTYPE html><body><script>{SCRIPT}</script></body>")
    script = f"answer = {data}.flatMap(({{prices, choices}}) => choices.map((choice) => planFleet(prices, choice)));"
    found = ask(empty, script)
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


MOVE = """
const move = (name, value) => {
  const control = document.getElementById(name);
  if (control.type === "checkbox") control.checked = value; else control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
};
const text = (name) => document.getElementById(name).textContent;
const seen = () => ({ choice: planner.choice, plan: planFleet(planner.prices, planner.choice),
  headline: text("headline"), words: text("words"), bars: text("fleet-bars"), layers: text("layer-cells"),
  flags: text("flags"), kind: text("shown-plan") });
answer = [structuredClone(seen())];
"""


@pytest.mark.browser
def test_controls_change_the_plan(page: Path) -> None:
    steps = [
        'move("seconds", 12.5);',
        'move("resource", "memory"); move("amount", 60);',
        'move("frozen", "int8"); move("precision", "bf16");',
        'move("plan", "traded"); move("share", 25);',
        'move("seconds", 0.001);',
        'document.getElementById("reset").click();',
        'document.getElementById("everybody").click();',
        'move("free", true);',
        'move("free", false); move("deadline", 0);',
    ]
    script = MOVE + "".join(f"{step} answer.push(structuredClone(seen()));" for step in steps)
    start, later, budget, precision, traded, nobody, reset, everybody, free, slider = ask(page, script)
    assert start["choice"]["deadline"] == 30
    assert start["headline"].startswith("20 of 22 devices take part. A round takes 30.0 s")
    assert "takes no part: computing time" in start["bars"]
    assert "limited by memory" in start["bars"]
    assert later["choice"]["deadline"] == 12.5
    assert later["flags"] == "--deadline 12.5"
    assert budget["flags"] == "--deadline 12.5 --budget memory=0.6"
    assert budget["choice"]["budget"]["amounts"] == [[0.6, False]]
    assert precision["flags"].endswith("--precision bf16 --frozen-precision int8")
    assert precision["plan"]["devices"] != budget["plan"]["devices"]
    assert traded["flags"].endswith("--plan traded --set fedpmt.share=0.25")
    assert "traded plan" in traded["kind"]
    assert nobody["headline"].startswith("No device can take part.")
    assert nobody["layers"].count("nobody") == 3
    assert reset == start | {"choice": reset["choice"]}
    assert everybody["headline"].startswith("22 of 22")
    assert free["choice"]["deadline"] is None
    assert "the tightest that leaves nobody out" in free["words"]
    assert slider["choice"]["deadline"] < start["choice"]["deadline"]


FAULTS = """
const luminance = (colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const ground = (node) => {
  const colour = getComputedStyle(node).backgroundColor;
  return colour.endsWith(", 0)") && node.parentElement ? ground(node.parentElement) : colour;
};
const faults = [];
for (const node of document.querySelectorAll("body *")) {
  if (!node.checkVisibility() || node.closest("script, noscript") || node.matches(":disabled, option")) continue;
  const words = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (words) {
    const [one, other] = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort();
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) faults.push(`contrast ${ratio.toFixed(2)}: ${node.textContent}`);
  }
  if (node.matches("input, select") && node.labels.length === 0) faults.push(`no label: ${node.id}`);
  if (node.matches("button") && !node.textContent.trim()) faults.push("a button without words");
  const title = node.getAttribute("aria-labelledby");
  if (node.matches("section") && !document.getElementById(title)) faults.push(`no name: ${node.id}`);
}
const wide = document.documentElement.scrollWidth;
answer = { faults, wide, width: innerWidth, dark: luminance(getComputedStyle(document.body).backgroundColor) < 0.1 };
"""


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [500, 1400, 1920])
def test_it_is_legible_in_any_window(page: Path, width: int, dark: bool) -> None:
    """Text has a contrast of 4.5 at least, controls have labels, and nothing is cut off; no window is below 500."""
    flags = [f"--window-size={width},1200", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    found = ask(page, FAULTS, *flags)
    assert found["faults"] == []
    assert found["wide"] <= found["width"]
    assert found["dark"] == dark


def in_frame(page: Path, script: str, attributes: str) -> Any:
    """What a script, which returns a value of the frame's `document`, finds in a page that is shown in a frame."""
    frame = page.with_name("frame.html")
    load = f"""
    document.querySelector("iframe").addEventListener("load", ({{ target }}) => {{
      const look = (document) => {{ {script} }};
      document.body.replaceChildren(JSON.stringify(look(target.contentDocument)));
    }});
    """
    frame.write_text(
        f"<!DOCTYPE html><body><iframe {attributes}></iframe><script>{load}"
        f'document.querySelector("iframe").src = "{page.name}";</script></body>'
    )
    shown = browse(frame, "--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=3000")
    found = re.search(r"<body>(.*?)</body>", shown, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.mark.browser
def test_it_is_not_wider_than_a_telephone(page: Path) -> None:
    look = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth];"
    needed, there = in_frame(page, look, 'width="390" height="900" style="border: 0"')
    assert needed <= there == 390


@pytest.mark.browser
def test_without_scripts_the_plan_is_there(page: Path) -> None:
    look = "return [document.body.innerText, document.getElementById('app').checkVisibility()];"
    text, controls = in_frame(page, look, 'width="390" height="900" sandbox="allow-same-origin"')
    assert "A FedPMT round takes 30.0 s" in text
    assert "<b>pi</b>" in text
    assert not controls
