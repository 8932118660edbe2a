// The page's own script: curves (uPlot), who was busy when (SVG), sorting, filtering, export and live updates.
// It draws what stands in the JSON element `chart-data`, and replaces the static figures, which stay for print.
"use strict";
(() => {
  const root = document.documentElement;
  const source = document.getElementById("chart-data");
  if (!source || typeof uPlot === "undefined") return;

  let data = JSON.parse(source.textContent);
  const isLive = root.hasAttribute("data-live");
  root.classList.add("scripted");

  const state = {
    measure: null, axis: null, logX: false, logY: false, smooth: 0, filter: "",
    hidden: new Set(), zoom: new Map(), round: null, panel: null, every: false, sorted: new Map(),
  };
  const PANELS = 6;       // of the rounds, before "show all"
  const TOOLTIP_ROWS = 10;

  // ---- small helpers -------------------------------------------------------------------------------------------
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }

  function draw(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  const colourOf = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const lineColour = (group) => colourOf(`--series-${group.colour}`);
  const list = (position) => data.lists[position];

  function pickUnit(kind, largest) {
    const steps = {
      time: [[1, "s"], [60, "min"], [3600, "h"], [86400, "d"]],
      bytes: [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"], [1e15, "PB"]],
      joules: [[1, "J"], [1e3, "kJ"], [1e6, "MJ"], [1e9, "GJ"], [1e12, "TJ"]],
    }[kind];
    if (kind === "percent") return [0.01, "%"];
    if (!steps) return [1, ""];
    let chosen = steps[0];
    for (let i = 1; i < steps.length; i++) if (largest >= (kind === "time" ? 2 : 1) * steps[i][0]) chosen = steps[i];
    return chosen;
  }

  function showNumber(value, kind, digits = 4) {
    if (value === null || value === undefined || !isFinite(value)) return "-";
    const [size, name] = pickUnit(kind, Math.abs(value));
    const scaled = value / size;
    const text = kind === "percent" ? scaled.toFixed(2)
      : Number.isInteger(scaled) ? String(scaled) : String(Number(scaled.toPrecision(digits)));
    return name ? `${text} ${name}` : text;
  }

  const tickText = (value) => (value === null ? "" : String(Number(value.toPrecision(6))));

  function swatch(group) {
    const dashes = group.dashes.length ? { "stroke-dasharray": group.dashes.map((part) => part * 1.5).join(" ") } : {};
    const path = { d: "M1 5H25", stroke: `var(--series-${group.colour})`, "stroke-width": 3, ...dashes };
    return draw("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" }, draw("path", path));
  }

  function download(name, blob) {
    const address = URL.createObjectURL(blob);
    const link = make("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  const fileName = (...parts) =>
    parts.filter(Boolean).join("-").replace(/[^\p{L}\p{N}.]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80) || "figure";

  const tooltip = make("div", { class: "tooltip", "aria-hidden": "true", hidden: true });
  document.body.append(tooltip);

  function showTooltip(content, x, y) {
    tooltip.replaceChildren(...content);
    tooltip.hidden = false;
    const { width, height } = tooltip.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? Math.max(4, x - 16 - width) : x + 16;
    const top = y + 16 + height > innerHeight ? Math.max(4, y - 16 - height) : y + 16;
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${top}px`;
  }
  const hideTooltip = () => { tooltip.hidden = true; };
  addEventListener("scroll", hideTooltip, { passive: true });

  // ---- which groups are shown ----------------------------------------------------------------------------------
  const matches = (line) => line.toLowerCase().includes(state.filter.trim().toLowerCase());
  const isShown = (group) => !state.hidden.has(group.line) && matches(group.line);
  const lines = () => [...new Map(data.groups.map((group) => [group.line, group])).values()];
  const panelNames = () => [...new Set(data.groups.map((group) => group.panel))];

  function toggle(line, alone) {
    const all = lines().map((group) => group.line);
    if (alone) {
      const only = all.every((other) => (other === line) !== state.hidden.has(other));
      state.hidden = new Set(only ? [] : all.filter((other) => other !== line));
    } else if (!state.hidden.delete(line)) state.hidden.add(line);
    refresh();
  }

  function buildChips(host) {
    const shown = lines().filter((group) => matches(group.line));
    host.hidden = lines().length < 2;
    const chips = shown.map((group) => {
      const chip = make("button", {
        type: "button", class: "chip", "data-line": group.line,
        "aria-pressed": String(!state.hidden.has(group.line)),
        title: "Click hides or shows it, Shift-click shows it alone",
        onclick: (event) => toggle(group.line, event.shiftKey),
        onmouseenter: () => highlight(group.line), onmouseleave: () => highlight(null),
        onfocus: () => highlight(group.line), onblur: () => highlight(null),
      }, swatch(group), make("span", {}, group.line));
      return make("li", {}, chip);
    });
    const focused = host.contains(document.activeElement) ? document.activeElement.dataset.line : undefined;
    host.replaceChildren(
      ...chips,
      make("li", {}, make("button", {
        type: "button", class: "plain", onclick: () => { state.hidden.clear(); refresh(); },
      }, "Show all")),
      make("li", {}, make("button", {
        type: "button", class: "plain",
        onclick: () => { state.hidden = new Set(lines().map((group) => group.line)); refresh(); },
      }, "Hide all")),
    );
    if (focused !== undefined) [...host.querySelectorAll(".chip")].find((chip) => chip.dataset.line === focused)?.focus();
  }

  // ---- controls ------------------------------------------------------------------------------------------------
  function choice(label, options, value, change) {
    const select = make("select", { onchange: () => change(select.value) });
    for (const [key, text] of options) select.append(make("option", { value: key, selected: key === value }, text));
    return make("label", {}, make("span", {}, label), select);
  }

  function check(label, value, change) {
    const box = make("input", { type: "checkbox", onchange: () => change(box.checked) });
    box.checked = value;
    return make("label", { class: "check" }, box, make("span", {}, label));
  }

  const button = (label, title, action) =>
    make("button", { type: "button", class: "plain", title, onclick: action }, label);

  // ---- curves --------------------------------------------------------------------------------------------------
  const curvesHost = document.querySelector('[data-part="curves"]');
  const curves = { controls: null, chips: null, charts: null, plots: [] };

  function unitOf(measure, group) {
    const ofScore = ["score", "mean", "worst", "spread"].includes(measure.key);
    return ofScore ? (group.percent ? "percent" : "plain") : measure.unit;
  }

  const curveOf = (group) => {
    const found = group.curves[state.measure];
    return found && state.axis in found.x ? found : null;
  };

  function choose() {
    const known = (items, key) => items.some((item) => item.key === key);
    if (!known(data.measures, state.measure)) state.measure = data.measures[0]?.key ?? null;
    if (!known(data.axes, state.axis)) state.axis = (known(data.axes, "seconds") ? "seconds" : data.axes[0]?.key) ?? null;
  }

  function buildCurves() {
    if (!curvesHost) return;
    choose();
    curvesHost.hidden = false;
    curves.controls = make("div", { class: "controls", role: "group", "aria-label": "What the curves show" });
    curves.chips = make("ul", { class: "chips", "aria-label": "Methods in the figures" });
    curves.charts = make("div", { class: "charts" });
    curvesHost.replaceChildren(curves.controls, curves.chips, curves.charts);
    buildCurveControls();
    buildChips(curves.chips);
    drawCurves();
  }

  function buildCurveControls() {
    const changed = (key, reset = true) => (value) => {
      state[key] = value;
      if (reset) state.zoom.clear();
      drawCurves();
    };
    const output = make("output", {}, state.smooth ? state.smooth.toFixed(2) : "off");
    const slider = make("input", {
      type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth,
      oninput: () => {
        state.smooth = Number(slider.value);
        output.textContent = state.smooth ? state.smooth.toFixed(2) : "off";
        drawCurves();
      },
    });
    const several = (items) => items.map((item) => [item.key, item.title]);
    curves.controls.hidden = !data.measures.length;
    curves.controls.replaceChildren(
      choice("Show", several(data.measures), state.measure, changed("measure")),
      choice("against", several(data.axes), state.axis, changed("axis")),
      make("label", { class: "slide" }, make("span", {}, "smoothing"), slider, output),
      check("log x", state.logX, changed("logX")),
      check("log y", state.logY, changed("logY")),
    );
  }

  function smoothed(values) {
    if (!state.smooth) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return mean / weight;
    });
  }

  const positive = (values, on) => (on ? values.map((value) => (value > 0 ? value : null)) : values);

  function limits(values, log) {
    const there = values.filter((value) => isFinite(value) && (!log || value > 0));
    if (!there.length) return log ? [0.1, 1] : [0, 1];
    let low = there[0], high = there[0];
    for (const value of there) { if (value < low) low = value; if (value > high) high = value; }
    if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low - margin, high + margin];
  }

  function drawCurves() {
    for (const plot of curves.plots) plot.chart?.destroy();
    curves.plots = [];
    hideTooltip();
    const focused = document.activeElement?.closest?.(".plot")?.dataset.panel;
    const measure = data.measures.find((one) => one.key === state.measure);
    const axis = data.axes.find((one) => one.key === state.axis);
    if (!measure || !axis) {
      curves.charts.replaceChildren(make("p", { class: "note" }, "No value is recorded yet."));
      return;
    }
    const names = panelNames().filter((name) => data.groups.some((group) => group.panel === name && curveOf(group)));
    curves.charts.classList.toggle("several", names.length > 1);
    const largest = Math.max(0, ...data.groups.filter(curveOf).map((group) => list(curveOf(group).x[state.axis]).at(-1)));
    const figures = names.map((name) => curveFigure(name, measure, axis, pickUnit(axis.unit, largest)));
    curves.charts.replaceChildren(...figures.map((figure) => figure.node));
    for (const figure of figures) figure.mount();
    if (focused !== undefined) curves.plots.find((plot) => plot.panel === focused)?.host.focus({ preventScroll: true });
  }

  function curveFigure(panel, measure, axis, xUnit) {
    const members = data.groups.filter((group) => group.panel === panel && curveOf(group));
    const kind = unitOf(measure, members[0]);
    const comparable = data.groups.filter((group) => curveOf(group) && unitOf(measure, group) === kind && isShown(group));
    const highest = Math.max(0, ...comparable.flatMap((group) => list(curveOf(group).mean)));
    const yUnit = pickUnit(kind, highest);
    const title = `${measure.title} against ${axis.title}`;
    const plot = { panel, kind, axis, measure, xUnit, yUnit, groups: members.filter(isShown), entries: [] };
    plot.host = make("div", {
      class: "plot", tabindex: 0, role: "group", "aria-roledescription": "chart", "data-panel": panel,
      "aria-label": `${panel ? `${panel}: ` : ""}${title}, ${plot.groups.length} of ${members.length} curves. ` +
        "Left and right move along a curve, up and down change the curve, plus and minus zoom, Escape shows all.",
      onkeydown: (event) => steer(plot, event), onblur: () => { hideTooltip(); },
    });
    plot.readout = make("p", { class: "hidden-text", role: "status" });
    const tools = make("div", { class: "tools" },
      button("+", "Zoom in", () => zoomBy(plot, 0.5)), button("−", "Zoom out", () => zoomBy(plot, 2)),
      button("Reset", "Show all again", () => resetZoom(plot)),
      button("PNG", "Save the figure as a picture", () => exportPlot(plot, title)),
      button("CSV", "Save the curves' numbers", () => exportNumbers(plot, title)));
    for (const tool of tools.children)
      tool.setAttribute("aria-label", `${tool.textContent}: ${tool.title}, ${panel || title}`);
    const caption = make("figcaption", {}, panel || title);
    const node = make("figure", { class: "chart" }, make("div", { class: "chart-head" }, caption, tools), plot.host, plot.readout);
    curves.plots.push(plot);
    return { node, mount: () => mountPlot(plot, comparable) };
  }

  function mountPlot(plot, comparable) {
    if (!plot.groups.length) {
      plot.host.append(make("p", { class: "note" }, "All curves are hidden."));
      return;
    }
    const [xSize, xName] = plot.xUnit, [ySize, yName] = plot.yUnit;
    const series = [{}], tables = [], bands = [];
    for (const group of plot.groups) {
      const found = curveOf(group), stroke = lineColour(group);
      const xs = list(found.x[state.axis]).map((value) => value / xSize);
      const scale = (position) => positive(smoothed(list(position).map((value) => value / ySize)), state.logY);
      const keep = state.logX ? xs.map((value) => value > 0) : null;
      const only = (values) => (keep ? values.filter((_, at) => keep[at]) : values);
      const columns = [only(xs), only(scale(found.mean))];
      const at = series.length;
      plot.entries.push({ group, found, series: at, xs: only(xs), rounds: only(list(found.x.rounds)),
        mean: only(list(found.mean)), low: found.low === undefined ? null : only(list(found.low)),
        high: found.high === undefined ? null : only(list(found.high)), own: only(list(found.x[state.axis])) });
      series.push({ label: group.line, stroke, width: 2, dash: group.dashes.map((part) => part * 2),
        points: { show: columns[0].length <= 12 } });
      if (found.low !== undefined) {
        columns.push(only(scale(found.high)), only(scale(found.low)));
        const faint = { stroke: "transparent", width: 0, points: { show: false } };
        series.push({ label: "", ...faint }, { label: "", ...faint });
        bands.push({ series: [at + 1, at + 2], fill: `${stroke}${plot.groups.length > 8 ? "18" : "2e"}` });
      }
      tables.push(columns);
    }
    plot.data = tables.length ? uPlot.join(tables) : [[]];
    const every = (pick) => comparable.flatMap((group) => pick(curveOf(group)));
    const xAll = every((found) => list(found.x[state.axis])).map((value) => value / xSize);
    const yAll = every((found) => [found.mean, found.low, found.high].filter((one) => one !== undefined)
      .flatMap((one) => smoothed(list(one)))).map((value) => value / ySize);
    plot.whole = { x: limits(xAll, state.logX), y: limits(yAll, state.logY) };
    if (!state.logX) plot.whole.x = [0, Math.max(...xAll, 1e-9) * 1.02];
    if (plot.kind === "percent" && !state.logY)
      plot.whole.y = [Math.max(0, plot.whole.y[0]), Math.min(100.5, plot.whole.y[1])];
    const view = (key) => (state.zoom.get(plot.panel) ?? plot.whole)[key];
    const muted = colourOf("--muted"), grid = colourOf("--grid");
    const axes = { stroke: muted, font: FONT, labelFont: FONT, ticks: { stroke: grid, size: 4 }, grid: { stroke: grid, width: 1 } };
    const label = (title, name) => (name ? `${title} (${name})` : title);
    const values = (_, splits) => splits.map(tickText);
    plot.chart = new uPlot({
      ...plotSize(plot), series, bands,
      scales: {
        x: { time: false, distr: state.logX ? 3 : 1, range: () => view("x") },
        y: { distr: state.logY ? 3 : 1, range: () => view("y") },
      },
      axes: [
        { ...axes, label: label(plot.axis.title, xName), values, labelSize: 22, size: 34, space: 60,
          incrs: plot.axis.key === "rounds" ? WHOLE : undefined },
        { ...axes, label: label(plot.measure.title, yName), values, labelSize: 22,
          size: (_, texts) => 16 + 7 * Math.max(2, ...(texts ?? []).map((text) => text.length)) },
      ],
      legend: { show: false },
      focus: { alpha: 0.18 },
      cursor: {
        drag: { x: true, y: true, uni: 30, dist: 5, setScale: false }, focus: { prox: 24 },
        dataIdx: (chart, position, index) => nearest(chart, plot, position, index),
        points: { size: 8, width: 2 },
      },
      hooks: {
        setSelect: [(chart) => zoomTo(plot, chart)],
        setCursor: [(chart) => hover(plot, chart)],
      },
    }, plot.data, plot.host);
    plot.chart.over.addEventListener("dblclick", () => resetZoom(plot));
    plot.chart.over.addEventListener("mouseleave", hideTooltip);
  }

  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif';
  const WHOLE = [1, 2, 5].flatMap((step) => [...Array(10).keys()].map((power) => step * 10 ** power)).sort((a, b) => a - b);

  const plotSize = (plot) => {
    const width = Math.max(240, plot.host.clientWidth);
    return { width, height: Math.round(Math.min(480, Math.max(260, width * 0.55))) };
  };

  // Curves have their own places; between them the joined table has holes.
  function nearest(chart, plot, position, index) {
    if (!plot.entries.some((entry) => entry.series === position)) return null;
    const values = chart.data[position], xs = chart.data[0];
    if (values[index] !== undefined && values[index] !== null) return index;
    let before = index, after = index;
    while (before >= 0 && (values[before] === undefined || values[before] === null)) before--;
    while (after < values.length && (values[after] === undefined || values[after] === null)) after++;
    if (before < 0) return after < values.length ? after : null;
    if (after >= values.length) return before;
    return xs[index] - xs[before] <= xs[after] - xs[index] ? before : after;
  }

  const findPlace = (places, x) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < x) low = middle + 1; else high = middle;
    }
    return low;
  };

  function rangeText(plot, entry, at) {
    if (!entry.low || entry.low[at] === entry.high[at]) return "";
    return ` (${showNumber(entry.low[at], plot.kind)} to ${showNumber(entry.high[at], plot.kind)})`;
  }

  const placeText = (plot, entry, at) =>
    plot.axis.key === "rounds" ? `round ${entry.rounds[at]}` : `${showNumber(entry.own[at], plot.axis.unit, 3)}, round ${entry.rounds[at]}`;

  function hover(plot, chart) {
    const { left, top } = chart.cursor;
    if (left === undefined || left < 0) { hideTooltip(); return; }
    const rows = [];
    for (const entry of plot.entries) {
      const index = chart.cursor.idxs[entry.series];
      if (index === null || index === undefined) continue;
      const at = findPlace(entry.xs, chart.data[0][index]);
      const y = chart.valToPos(chart.data[entry.series][index], "y");
      rows.push({ entry, at, distance: Math.abs(y - top) });
    }
    if (!rows.length) { hideTooltip(); return; }
    rows.sort((one, other) => one.distance - other.distance);
    const closest = rows[0], kept = rows.slice(0, TOOLTIP_ROWS);
    kept.sort((one, other) => other.entry.mean[other.at] - one.entry.mean[one.at]);
    const body = make("table", {}, ...kept.map(({ entry, at }) => make("tr", entry === closest.entry ? { class: "near" } : {},
      make("td", {}, swatch(entry.group)), make("th", {}, entry.group.line),
      make("td", {}, showNumber(entry.mean[at], plot.kind), make("span", { class: "aside" }, rangeText(plot, entry, at))),
      make("td", { class: "none aside" }, placeText(plot, entry, at)))));
    const more = rows.length - kept.length;
    const box = chart.over.getBoundingClientRect();
    showTooltip([body, ...(more > 0 ? [make("p", {}, `and ${more} more`)] : [])], box.left + left, box.top + top);
  }

  function highlight(line) {
    for (const plot of curves.plots) {
      if (!plot.chart) continue;
      const entry = plot.entries.find((one) => one.group.line === line);
      plot.chart.setSeries(entry ? entry.series : null, { focus: true });
    }
  }

  function applyZoom(plot) {
    plot.chart?.setData(plot.data, true);
    plot.host.dataset.zoomed = String(state.zoom.has(plot.panel));
  }

  function zoomTo(plot, chart) {
    const { left, top, width, height } = chart.select;
    if (width < 3 && height < 3) return;
    const now = state.zoom.get(plot.panel) ?? plot.whole;
    const box = chart.over.getBoundingClientRect();
    const wide = width < box.width - 1 && width >= 3, tall = height < box.height - 1 && height >= 3;
    state.zoom.set(plot.panel, {
      x: wide ? [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")] : now.x,
      y: tall ? [chart.posToVal(top + height, "y"), chart.posToVal(top, "y")] : now.y,
    });
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    hideTooltip();
    applyZoom(plot);
  }

  function zoomBy(plot, factor) {
    if (!plot.chart) return;
    const now = state.zoom.get(plot.panel) ?? plot.whole, { left } = plot.chart.cursor;
    const about = left >= 0 ? plot.chart.posToVal(left, "x") : null;
    const next = (range, log, at) => {
      const [low, high] = log ? range.map(Math.log) : range;
      const middle = at === null ? (low + high) / 2 : log ? Math.log(at) : at;
      const part = (middle - low) / (high - low), size = (high - low) * factor;
      const found = [middle - part * size, middle + (1 - part) * size];
      return log ? found.map(Math.exp) : found;
    };
    const x = next(now.x, state.logX, about);
    const [low, high] = plot.whole.x;
    if (x[0] <= low && x[1] >= high) { resetZoom(plot); return; }
    state.zoom.set(plot.panel, { x: [Math.max(low, x[0]), Math.min(high, x[1])], y: now.y });
    applyZoom(plot);
  }

  function resetZoom(plot) {
    state.zoom.delete(plot.panel);
    applyZoom(plot);
  }

  function steer(plot, event) {
    if (!plot.chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    plot.line ??= 0;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      plot.line = (plot.line + (event.key === "ArrowDown" ? 1 : plot.entries.length - 1)) % plot.entries.length;
    } else if (event.key in moves) {
      const last = plot.entries[plot.line].xs.length - 1;
      plot.point = Math.min(last, Math.max(0, (plot.point ?? -1) + moves[event.key]));
    } else if (event.key === "+" || event.key === "=") { zoomBy(plot, 0.5); event.preventDefault(); return; }
    else if (event.key === "-") { zoomBy(plot, 2); event.preventDefault(); return; }
    else if (event.key === "Escape") { resetZoom(plot); return; }
    else return;
    event.preventDefault();
    const entry = plot.entries[plot.line];
    plot.point = Math.min(entry.xs.length - 1, plot.point ?? 0);
    const index = findPlace(plot.chart.data[0], entry.xs[plot.point]);
    const top = plot.chart.valToPos(plot.chart.data[entry.series][index], "y");
    plot.chart.setCursor({ left: plot.chart.valToPos(entry.xs[plot.point], "x"), top });
    plot.chart.setSeries(entry.series, { focus: true });
    plot.readout.textContent =
      `${entry.group.line}, ${placeText(plot, entry, plot.point)}: ` +
      showNumber(entry.mean[plot.point], plot.kind) + rangeText(plot, entry, plot.point);
  }

  function exportPlot(plot, title) {
    if (!plot.chart) return;
    const drawn = plot.chart.ctx.canvas, ratio = devicePixelRatio || 1, margin = 16, row = 20;
    const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    const width = drawn.width / ratio + 2 * margin;
    context.font = FONT;
    let x = margin, y = margin + 26;
    const marks = plot.groups.map((group) => {
      const size = 34 + context.measureText(group.line).width + 18;
      if (x + size > width - margin && x > margin) { x = margin; y += row; }
      const place = { group, x, y };
      x += size;
      return place;
    });
    const head = y + row;
    canvas.width = width * ratio;
    canvas.height = (head + margin) * ratio + drawn.height;
    context.scale(ratio, ratio);
    context.fillStyle = colourOf("--paper");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = colourOf("--ink");
    context.font = `600 ${FONT.replace("12px", "15px")}`;
    context.fillText(plot.panel ? `${plot.panel}: ${title}` : title, margin, margin + 12);
    context.font = FONT;
    for (const { group, x: left, y: top } of marks) {
      context.strokeStyle = lineColour(group);
      context.lineWidth = 2;
      context.setLineDash(group.dashes.map((part) => part * 2));
      context.beginPath();
      context.moveTo(left, top - 4);
      context.lineTo(left + 26, top - 4);
      context.stroke();
      context.fillText(group.line, left + 34, top);
    }
    context.drawImage(drawn, margin, head, drawn.width / ratio, drawn.height / ratio);
    canvas.toBlob((blob) => download(`${fileName(plot.panel, title)}.png`, blob));
  }

  const cell = (text) => (/[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : String(text));

  function exportNumbers(plot, title) {
    const rows = [["method", "round", plot.axis.key, "mean", "low", "high"]];
    for (const entry of plot.entries)
      entry.own.forEach((place, at) => rows.push([entry.group.line, entry.rounds[at], place, entry.mean[at],
        entry.low?.[at] ?? entry.mean[at], entry.high?.[at] ?? entry.mean[at]]));
    const text = rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
    download(`${fileName(plot.panel, title)}.csv`, new Blob([text], { type: "text/csv" }));
  }

  // ---- who was busy when ---------------------------------------------------------------------------------------
  const busyHost = document.querySelector('[data-part="busy"]');
  const busy = { controls: null, legend: null, figures: null, slider: null };
  const DEVICE = 0, LEVEL = 1, SPEED = 2, PART = 3, START = 4, SECONDS = 5, TRANSFER = 6, OUTCOME = 7;

  function buildBusy() {
    if (!busyHost) return;
    busyHost.hidden = !data.busy.panels.length;
    if (busyHost.hidden) return;
    busy.controls = make("div", { class: "controls", role: "group", "aria-label": "Which round is shown" });
    busy.legend = make("ul", { class: "legend" });
    busy.figures = make("div", { class: "grid" });
    busyHost.replaceChildren(busy.controls, busy.legend, busy.figures);
    buildBusyControls();
    drawBusy();
  }

  const roundNow = () => {
    const numbers = data.busy.numbers;
    if (state.round === null || !numbers.includes(state.round)) {
      const shared = Math.min(...data.busy.panels.map((panel) => panel.rounds.at(-1).round));
      const below = numbers.filter((number) => number <= shared);
      return below.at(-1) ?? numbers.at(-1);
    }
    return state.round;
  };

  function buildBusyControls() {
    const numbers = data.busy.numbers;
    const output = make("output", {});
    const slider = make("input", { type: "range", min: 0, max: numbers.length - 1, step: 1, "aria-label": "Round" });
    const set = (index) => {
      state.round = numbers[Math.min(numbers.length - 1, Math.max(0, index))];
      show();
      drawBusy();
    };
    const show = () => {
      slider.value = numbers.indexOf(roundNow());
      slider.setAttribute("aria-valuetext", `round ${roundNow()}`);
      output.textContent = `${roundNow()} of ${numbers.at(-1)}`;
    };
    slider.addEventListener("input", () => set(Number(slider.value)));
    busy.slider = slider;
    show();
    const steps = [
      button("‹", "The round before", () => set(Number(slider.value) - 1)),
      button("›", "The round after", () => set(Number(slider.value) + 1)),
    ];
    for (const step of steps) step.setAttribute("aria-label", `${step.textContent} ${step.title}`);
    const names = [...new Set(data.busy.panels.map((panel) => data.groups[panel.group].panel))];
    if (!names.includes(state.panel)) state.panel = names[0];
    busy.controls.replaceChildren(
      make("label", { class: "slide wide" }, make("span", {}, "Round"), slider, output), make("span", { class: "tools" }, ...steps),
      ...(names.length > 1 ? [choice("under", names.map((name) => [name, name || "all"]), state.panel,
        (value) => { state.panel = value; drawBusy(); })] : []),
    );
  }

  function drawBusy() {
    const members = data.busy.panels.filter((panel) => {
      const group = data.groups[panel.group];
      return group.panel === state.panel && isShown(group);
    });
    const number = roundNow();
    const chosen = (state.every ? members : members.slice(0, PANELS)).map((panel) => ({
      panel, group: data.groups[panel.group],
      step: panel.rounds.find((step) => step.round === number) ?? panel.rounds.at(-1),
    }));
    const ends = chosen.flatMap(({ panel, step }) =>
      [step.seconds, panel.deadline ?? 0, ...step.bars.map((bar) => bar[START] + bar[SECONDS])]);
    const end = Math.max(1e-9, ...ends);
    busyLegend(chosen);
    const figures = chosen.map((one, at) => busyFigure(one, end, at));
    const left = members.length - chosen.length;
    if (left > 0 || (state.every && members.length > PANELS))
      figures.push(make("p", {}, button(left > 0 ? `Show ${left} more` : `Show ${PANELS} only`, "More or fewer methods",
        () => { state.every = !state.every; drawBusy(); })));
    if (!chosen.length) figures.push(make("p", { class: "note" }, "All methods are hidden."));
    busy.figures.replaceChildren(...figures.map((one) => one.node ?? one));
    for (const figure of figures) figure.mount?.();
  }

  function busyLegend(chosen) {
    const bars = chosen.flatMap(({ step }) => step.bars);
    const levels = [...new Set(bars.map((bar) => bar[LEVEL]))].sort((one, other) => one - other);
    const box = (css, fill) => {
      const node = make("span", { class: `box ${css}` });
      if (fill) node.style.setProperty("--fill", fill);
      return node;
    };
    const entries = levels.map((level) => {
      const known = data.busy.levels[level];
      return [box("level", known.colour), known.name];
    });
    if (bars.some((bar) => bar[TRANSFER] > 0)) entries.push([box("transfer", data.busy.levels[levels[0]].colour), "transfer"]);
    entries.push([box("waiting"), "waiting for the round to end"]);
    const outcomes = new Set(bars.map((bar) => data.busy.outcomes[bar[OUTCOME]]));
    for (const outcome of data.busy.outcomes)
      if (outcome !== "arrived" && outcomes.has(outcome)) entries.push([box(outcome), outcome]);
    busy.legend.replaceChildren(...entries.map(([mark, text]) => make("li", {}, mark, text)));
  }

  function hatch(outcome, id) {
    const shapes = {
      late: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", failed: "M-1 7L7 -1M-1 -1L7 7", surplus: "M0 3H6", refused: "M3 3h.5",
    };
    const path = { d: shapes[outcome] ?? shapes.late, stroke: "var(--muted)", "stroke-width": 1, fill: "none" };
    return draw("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, draw("path", path));
  }

  function barText(bar, step) {
    const outcome = data.busy.outcomes[bar[OUTCOME]];
    const transfer = bar[TRANSFER] > 0 ? ` and ${showNumber(bar[TRANSFER], "time", 3)} of transfer` : "";
    const started = step.stepped ? `, started at ${showNumber(bar[START], "time", 3)}` : "";
    return `device ${bar[DEVICE]}, level ${bar[LEVEL]} (${showNumber(bar[SPEED], "plain", 2)}×), ${data.busy.parts[bar[PART]]}: ` +
      `${showNumber(bar[SECONDS] - bar[TRANSFER], "time", 3)} of training${transfer}${started}, ${outcome}`;
  }

  function busyFigure({ panel, group, step }, end, at) {
    const arrived = step.bars.filter((bar) => data.busy.outcomes[bar[OUTCOME]] === "arrived").length;
    const name = `${step.stepped ? "up to server step" : "round"} ${step.round}`;
    const words = `${name}: ${arrived} of ${step.bars.length} counted, ${showNumber(step.seconds, "time", 3)}`;
    const host = make("div", { class: "bars" });
    const rows = make("details", { class: "numbers" }, make("summary", {}, "As a table"));
    rows.addEventListener("toggle", () => { if (rows.open && rows.children.length < 2) rows.append(busyTable(step)); });
    const save = button("SVG", "Save the figure", () => exportSvg(host.querySelector("svg"), fileName(group.line, name)));
    save.setAttribute("aria-label", `SVG: save the figure of ${group.line}`);
    const caption = make("figcaption", {}, group.line, make("span", {}, ` ${words}`));
    const node = make("figure", { "data-line": group.line },
      make("div", { class: "chart-head" }, caption, make("div", { class: "tools" }, save)), host, rows);
    return { node, mount: () => host.append(busySvg({ panel, group, step }, end, at, host.clientWidth || 360, words)) };
  }

  function busyTable(step) {
    const heads = ["device", "level", "trains", "training", "transfer", "reply"];
    const body = step.bars.map((bar) => make("tr", {}, make("th", { scope: "row" }, String(bar[DEVICE])),
      ...[String(bar[LEVEL]), data.busy.parts[bar[PART]], showNumber(bar[SECONDS] - bar[TRANSFER], "time", 3),
        showNumber(bar[TRANSFER], "time", 3), data.busy.outcomes[bar[OUTCOME]]].map((text) => make("td", {}, text))));
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
    return make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Devices of the round" },
      make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  }

  function busySvg({ panel, group, step }, end, at, width, words) {
    const devices = [...new Map(step.bars.map((bar) => [bar[DEVICE], bar])).values()];
    const few = devices.length <= 30, row = few ? 19 : Math.max(3, Math.floor(420 / devices.length));
    const left = few ? Math.min(150, width * 0.36) : 44, top = 22, right = 14;
    const scale = (width - left - right) / (end * 1.04), bottom = top + row * devices.length;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${bottom + 38}`, role: "img", "aria-label": `${group.line}, ${words}` });
    const defs = draw("defs");
    svg.append(defs);
    const [size, unit] = pickUnit("time", end);
    for (const tick of ticks(end / size)) {
      const x = left + tick * size * scale;
      svg.append(draw("path", { d: `M${x} ${top}V${bottom}`, stroke: "var(--grid)" }),
        draw("text", { x, y: bottom + 15, "text-anchor": "middle", class: "tick" }, tickText(tick)));
    }
    svg.append(draw("text", { x: left + (width - left - right) / 2, y: bottom + 32, "text-anchor": "middle", class: "tick" },
      `virtual time within the ${step.stepped ? "steps" : "round"} (${unit})`));
    const rowOf = new Map(devices.map((bar, place) => [bar[DEVICE], place]));
    const thick = row * 0.76, gap = row * 0.12;
    devices.forEach((bar, place) => {
      const y = top + place * row;
      svg.append(draw("rect", { x: left, y: y + gap, width: step.seconds * scale, height: thick, fill: "var(--track)" }));
      if (few) svg.append(draw("text", { x: left - 8, y: y + row * 0.72, "text-anchor": "end", class: "tick" },
        `${shorten(data.busy.parts[bar[PART]], 15)} · ${bar[DEVICE]}`));
    });
    if (!few) levelMarks(svg, devices, { top, left, row });
    for (const bar of step.bars) {
      const outcome = data.busy.outcomes[bar[OUTCOME]], counted = outcome === "arrived";
      const y = top + rowOf.get(bar[DEVICE]) * row + gap, fill = data.busy.levels[bar[LEVEL]].colour;
      const x = left + bar[START] * scale, trained = (bar[SECONDS] - bar[TRANSFER]) * scale, whole = bar[SECONDS] * scale;
      const shape = draw("g", { class: "bar" });
      shape.append(draw("rect", { x, y, width: trained, height: thick, fill, opacity: counted ? 1 : 0.35 }),
        draw("rect", { x: x + trained, y, width: bar[TRANSFER] * scale, height: thick, fill, opacity: counted ? 0.5 : 0.18 }));
      if (!counted) {
        const id = `hatch-${at}-${outcome}`;
        if (![...defs.children].some((one) => one.id === id)) defs.append(hatch(outcome, id));
        shape.append(draw("rect", { x, y, width: whole, height: thick, fill: `url(#${id})` }));
      }
      shape.addEventListener("mousemove", (event) => showTooltip([make("p", {}, barText(bar, step))], event.clientX, event.clientY));
      shape.addEventListener("mouseleave", hideTooltip);
      svg.append(shape);
    }
    if (panel.deadline !== null && !step.stepped) {
      const x = left + panel.deadline * scale;
      const anchor = x > width - 70 ? "end" : "middle";
      svg.append(draw("path", { d: `M${x} ${top - 4}V${bottom}`, stroke: "var(--ink)", "stroke-dasharray": "4 3" }),
        draw("text", { x: anchor === "end" ? width - 2 : x, y: top - 9, "text-anchor": anchor, class: "tick strong" },
          `deadline ${showNumber(panel.deadline, "time", 3)}`));
    }
    return svg;
  }

  function levelMarks(svg, devices, { top, left, row }) {
    const levels = [...new Set(devices.map((bar) => bar[LEVEL]))];
    for (const level of levels) {
      const places = devices.flatMap((bar, place) => (bar[LEVEL] === level ? [place] : []));
      const y = top + ((places[0] + places.at(-1) + 1) / 2) * row;
      svg.append(draw("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "tick" }, String(level)));
    }
    svg.append(draw("text", { x: 2, y: top - 9, class: "tick" }, "level"));
  }

  const shorten = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1).trimEnd()}…`);

  function ticks(end) {
    const rough = end / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    return [...Array(Math.floor(end / step) + 1).keys()].map((index) => index * step);
  }

  function exportSvg(svg, name) {
    const copy = svg.cloneNode(true), box = svg.getBoundingClientRect();
    const names = ["--ink", "--muted", "--grid", "--paper", "--track", ...[...Array(6).keys()].map((one) => `--series-${one}`)];
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    copy.setAttribute("style", names.map((one) => `${one}: ${colourOf(one)}`).join("; ") +
      `; background: ${colourOf("--paper")}; font: ${FONT}`);
    for (const text of copy.querySelectorAll("text.tick")) text.setAttribute("fill", colourOf("--muted"));
    download(`${name}.svg`, new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  }

  // ---- tables --------------------------------------------------------------------------------------------------
  function buildTables() {
    document.querySelectorAll("table.sortable").forEach((table) => {
      const identity = table.parentElement.getAttribute("aria-label");
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        if (head.querySelector("button")) return;
        const label = head.textContent;
        head.replaceChildren(make("button", { type: "button", onclick: () => sortBy(table, identity, column) }, label));
      });
      if (state.sorted.has(identity)) sortRows(table, state.sorted.get(identity));
    });
    filterTables();
    document.querySelectorAll("pre.command").forEach((block) => {
      if (block.querySelector("button") || !navigator.clipboard) return;
      const text = block.textContent;
      const copy = button("Copy", "Copy the command", () => navigator.clipboard.writeText(text).then(
        () => { copy.textContent = "Copied"; }, () => { copy.textContent = "Copy failed"; }));
      block.append(copy);
    });
  }

  function sortBy(table, identity, column) {
    const before = state.sorted.get(identity);
    const first = column === 0 ? 1 : -1;
    const direction = before?.column === column ? -before.direction : first;
    state.sorted.set(identity, { column, direction });
    sortRows(table, state.sorted.get(identity));
  }

  function sortRows(table, { column, direction }) {
    const parts = [[]];
    for (const row of table.tBodies[0].rows) {
      if (row.classList.contains("panel")) parts.push([row]);
      else parts.at(-1).push(row);
    }
    const value = (row) => {
      const found = row.cells[column];
      return found?.dataset.value === undefined ? null : Number(found.dataset.value);
    };
    const order = (one, other) => {
      const [a, b] = [value(one), value(other)];
      if (a !== null && b !== null) return direction * (a - b);
      if (a !== null || b !== null) return a === null ? 1 : -1;
      return direction * (one.cells[column]?.textContent ?? "").localeCompare(other.cells[column]?.textContent ?? "");
    };
    for (const part of parts) {
      const head = part[0]?.classList.contains("panel") ? [part.shift()] : [];
      table.tBodies[0].append(...head, ...part.sort(order));
    }
    [...table.tHead.rows[0].cells].forEach((head, at) => {
      if (at === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }

  function filterTables() {
    document.querySelectorAll("tr[data-line]").forEach((row) => { row.hidden = !matches(row.dataset.line); });
  }

  // ---- the filter ----------------------------------------------------------------------------------------------
  const filterHost = document.querySelector('[data-part="filter"]');

  function buildFilter() {
    if (!filterHost || filterHost.children.length) { countMatches(); return; }
    const input = make("input", {
      type: "search", placeholder: "e.g. fedavg", autocomplete: "off", spellcheck: "false",
      oninput: () => { state.filter = input.value; refresh(); filterTables(); },
    });
    filterHost.append(make("label", {}, make("span", {}, "Filter methods"), input), make("output", {}));
    countMatches();
  }

  function countMatches() {
    if (!filterHost) return;
    const all = lines();
    filterHost.hidden = all.length < 2;
    filterHost.querySelector("output").textContent = `${all.filter((group) => matches(group.line)).length} of ${all.length}`;
  }

  function refresh() {
    if (curves.chips) { buildChips(curves.chips); drawCurves(); }
    if (busy.figures && !busyHost.hidden) drawBusy();
    countMatches();
  }

  // ---- live ----------------------------------------------------------------------------------------------------
  const POLL = 700;
  const seen = new Map();
  let stamp = root.dataset.live || "", lost = false;

  function replaceHtml(node, html) {
    const opened = [...node.querySelectorAll("details")].map((one) => one.open);
    const focusable = (one) => [...one.querySelectorAll("button, a, summary, [tabindex]")];
    const at = focusable(node).indexOf(document.activeElement);
    const holder = document.createElement("template");
    holder.innerHTML = html;
    const fresh = holder.content.firstElementChild;
    [...fresh.querySelectorAll("details")].forEach((one, place) => { one.open = opened[place] ?? one.open; });
    node.replaceWith(fresh);
    return () => { if (at >= 0) focusable(fresh)[at]?.focus({ preventScroll: true }); };
  }

  function update(answer) {
    const after = [];
    for (const [identity, html] of Object.entries(answer.parts)) {
      const node = document.getElementById(identity);
      if (node && seen.get(identity) !== html) after.push(replaceHtml(node, html));
      seen.set(identity, html);
    }
    data = answer.data;
    buildTables();
    for (const focus of after) focus();
    const typing = curvesHost?.contains(document.activeElement) && document.activeElement.matches("select, input");
    if (!curves.controls) buildCurves();
    else {
      choose();
      if (!typing) buildCurveControls();
      buildChips(curves.chips);
      drawCurves();
    }
    if (!busy.controls || busyHost.hidden) buildBusy();
    else {
      if (!busyHost.contains(document.activeElement)) buildBusyControls();
      drawBusy();
    }
    countMatches();
  }

  async function poll() {
    const begun = performance.now();
    try {
      const headers = stamp ? { "If-None-Match": `"${stamp}"` } : {};
      const answer = await fetch("data.json", { headers, cache: "no-store" });
      if (answer.status === 200) {
        const found = await answer.json();
        stamp = found.stamp;
        update(found);
      }
      lost = false;
    } catch { lost = true; }
    const status = document.getElementById("live");
    const words = lost ? "Not connected: fedpmt watch has ended. What is shown stays." : status.dataset.words;
    if (status.textContent !== words) status.textContent = words;
    status.classList.toggle("lost", lost);
    // Many long runs take a while to read: they are not asked for all the time.
    setTimeout(poll, Math.max(lost ? 3 * POLL : POLL, performance.now() - begun));
  }

  // ---- start ---------------------------------------------------------------------------------------------------
  buildFilter();
  buildCurves();
  buildBusy();
  buildTables();
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(refresh, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  if (isLive) poll();
})();
