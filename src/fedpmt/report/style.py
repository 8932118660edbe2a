"""The look of the page: light and dark, wide and narrow, on screen and on paper."""

from __future__ import annotations

LIGHT = """
  --ink: #1b2331; --muted: #566173; --grid: #dfe4ea; --paper: #ffffff; --track: #e9edf1;
  --ground: #f4f6f8; --line: #dde2e8; --soft: #f7f9fb; --link: #005f95; --control: #8793a3; --warn: #fff6e0; --warn-line: #e6b54a;
  --bar: #cfe3f3; --good: #1a7f4b;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73;
  --series-3: #cc79a7; --series-4: #e69f00; --series-5: #56b4e9;
"""

DARK = """
  --ink: #e7ebf1; --muted: #a3aebd; --grid: #2e3743; --paper: #171c24; --track: #2a323d;
  --ground: #0f1319; --line: #2b333f; --soft: #1d232c; --link: #7cc1ee; --control: #6b7788; --warn: #2e2613; --warn-line: #b58a2b;
  --bar: #21405a; --good: #4cc38a;
  --series-0: #4aa8e0; --series-1: #f58442; --series-2: #2ec498;
  --series-3: #e09fc4; --series-4: #f3b83d; --series-5: #9ad7f7;
"""

RULES = """
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 3.5rem; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif; }
header, main, footer { max-width: 1240px; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2.75rem; }
h1 { font-size: clamp(1.6rem, 1.2rem + 1.8vw, 2.3rem); line-height: 1.15; letter-spacing: -0.02em;
  margin: 0 0 .5rem;
  overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; line-height: 1.25; margin: 0 0 .3rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .5rem; overflow-wrap: anywhere; }
h3 .tag { color: var(--muted); font-weight: 500; }
p { margin: 0 0 .8rem; max-width: 48rem; }
a { color: var(--link); }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.headline { font-size: clamp(1.1rem, 1rem + .6vw, 1.4rem); line-height: 1.35; max-width: 60rem; margin-bottom: .4rem; }
.lead { font-size: 1.1rem; color: var(--muted); margin-bottom: 1.4rem; }
.note { color: var(--muted); font-size: .92rem; }
nav { position: sticky; top: 0; z-index: 2; background: var(--ground);
  border-bottom: 1px solid var(--line); margin-top: 1.4rem; }
nav ul { max-width: 1240px; margin: 0 auto; padding: .55rem 1.5rem; display: flex; gap: 1.4rem;
  overflow-x: auto;
  list-style: none; white-space: nowrap; font-size: .92rem; scrollbar-width: none; }
nav a { text-decoration: none; color: var(--muted); }
nav a:hover { color: var(--link); text-decoration: underline; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.6rem 1.75rem 1.75rem; margin: 1.5rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 1px; margin: 0;
  background: var(--paper); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.facts div { background: var(--paper); padding: .6rem .9rem; box-shadow: 0 0 0 1px var(--line); }
.facts dt { font-size: .78rem; color: var(--muted); }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.warning { background: var(--warn); border: 1px solid var(--warn-line); border-radius: 10px;
  padding: .7rem 1rem; margin: 1.2rem 0 0;
  max-width: none; font-size: .95rem; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; margin: .7rem 0 1rem; padding: 0;
  list-style: none; font-size: .92rem; }
.legend li, .name { display: inline-flex; align-items: center; gap: .5rem; overflow-wrap: anywhere; }
.name { align-items: flex-start; }
.name .swatch { margin-top: .42em; }
section > :last-child { margin-bottom: 0; }
.swatch { flex: none; width: 26px; height: 10px; }
.box { flex: none; width: 14px; height: 14px; border-radius: 3px; background: var(--fill); }
.box.late, .box.failed, .box.surplus, .box.refused { border: 1px solid var(--muted);
  background: repeating-linear-gradient(135deg, var(--muted) 0 1px, var(--track) 1px 4px); }
.box.failed { background: repeating-linear-gradient(45deg, var(--muted) 0 1px, transparent 1px 4px),
  repeating-linear-gradient(135deg, var(--muted) 0 1px, var(--track) 1px 4px); }
.box.surplus { background: repeating-linear-gradient(0deg, var(--muted) 0 1px, var(--track) 1px 4px); }
.box.waiting { background: var(--track); }
.box.transfer { background: linear-gradient(90deg, var(--fill) 50%, transparent 50%), var(--fill);
  opacity: .55; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  gap: 1.1rem 1.4rem; }
.grid.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 30rem; }
.grid.wide figure { max-width: 38rem; }
.grid.wide figure.broad { max-width: none; grid-column: 1 / -1; overflow-x: auto; }
figure.broad svg { min-width: 44rem; }
figcaption { font-size: .92rem; font-weight: 600; margin-bottom: .2rem; overflow-wrap: anywhere; }
figcaption span { font-weight: 400; color: var(--muted); }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; margin: .6rem 0 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .65rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal;
  min-width: min(12.5rem, 34vw);
  position: sticky; left: 0; background: var(--paper); }
th:last-child, td:last-child { padding-right: 0; }
thead th { font-weight: 500; color: var(--muted); font-size: .84rem; vertical-align: bottom;
  white-space: normal; line-height: 1.25; }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
tr.panel th { font-weight: 600; padding-top: 1.1rem; text-align: left; }
tr.panel .tag { color: var(--muted); font-weight: 500; }
td.best small { font-weight: 400; }
td small { display: block; color: var(--muted); font-size: .84rem; }
td.best { font-weight: 700; }
.after { margin: 1rem 0 0; }
td.bar { background: linear-gradient(90deg, var(--bar) var(--share), transparent var(--share)) no-repeat 0 .25rem / 100% 1.7rem; }
td.tint { background: color-mix(in srgb, var(--fill) var(--share), transparent); border: 2px solid var(--paper); }
table.marks { width: auto; min-width: min(100%, 40rem); }
table.marks th:not(:first-child), table.marks td { padding-left: .65rem; padding-right: .65rem; min-width: 4.6rem; }
table.cells td { text-align: center; }
table.cells thead th:not(:first-child) { text-align: center; overflow-wrap: anywhere; max-width: 8rem; }
.hidden-text { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
[hidden] { display: none !important; }
pre.command { margin: 0; padding: .6rem .8rem; background: var(--soft); border: 1px solid var(--line);
  border-radius: 8px; white-space: pre-wrap; position: relative; }
details dl { margin: 0; }
details dd { margin: .2rem 0 .9rem; }
details dt { font-weight: 500; overflow-wrap: anywhere; }
.none { color: var(--muted); }
table.pair { max-width: 40rem; }
table.left td, table.left th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.words td, table.words th { text-align: left; white-space: normal; overflow-wrap: break-word; }
details { border-top: 1px solid var(--line); padding: .7rem 0; }
details:last-of-type { padding-bottom: 0; }
summary { cursor: pointer; font-weight: 600; }
details[open] summary { margin-bottom: .7rem; }
footer { padding-bottom: 3rem; color: var(--muted); font-size: .88rem; }
.button { display: inline-block; border: 1px solid var(--line); background: var(--paper);
  border-radius: 8px; padding: .35rem .8rem;
  text-decoration: none; font-size: .92rem; font-weight: 500; }
.button:hover { border-color: var(--link); }
dl.how { margin: .8rem 0 0; display: grid; grid-template-columns: minmax(8rem, 12rem) 1fr; gap: .6rem 1.4rem;
  font-size: .95rem; }
dl.how dt { font-weight: 600; }
dl.how dd { margin: 0; max-width: 46rem; }
@media (max-width: 700px) {
  header, main, footer, nav ul { padding-left: 1rem; padding-right: 1rem; }
  header { padding-top: 1.75rem; }
  section { padding: 1.15rem 1rem 1.25rem; border-radius: 10px; }
  .facts { grid-template-columns: repeat(auto-fill, minmax(7.6rem, 1fr)); }
  dl.how { grid-template-columns: 1fr; gap: .1rem; }
  dl.how dd { margin-bottom: .8rem; }
}
@media print {
  body { background: none; font-size: 11pt; }
  nav, .button { display: none; }
  header, main, footer { max-width: none; padding: 0; }
  section { border: 0; padding: 0; margin: 1.2rem 0; }
  figure, tr, .facts div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 9pt; }
  th, td { padding: .3rem .45rem; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

# Paper is white whatever the reader's screen prefers.
STYLESHEET = (
    f":root {{ color-scheme: light dark; {LIGHT} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n{RULES}"
)

SCRIPT_RULES = """
.static { display: block; }
.scripted .static { display: none; }
.uplot { font-family: inherit; }
.u-select { background: color-mix(in srgb, var(--link) 18%, transparent); }
.u-cursor-x, .u-cursor-y { border-color: var(--muted) !important; }
.filter, .live, .progress { max-width: 1240px; margin: 1rem auto 0; padding: 0 1.5rem; }
.filter { display: flex; gap: .8rem; align-items: center; font-size: .92rem; }
.filter label, .controls label { display: inline-flex; align-items: center; gap: .5rem; }
.filter output, .controls output { color: var(--muted); font-variant-numeric: tabular-nums; }
header .progress { padding: 0; list-style: none; font-size: .92rem; }
.progress li { display: flex; flex-wrap: wrap; gap: .2rem .8rem; align-items: center; font-variant-numeric: tabular-nums; }
progress { accent-color: var(--link); width: min(20rem, 40vw); }
.live { color: var(--muted); font-size: .92rem; }
.live::before { content: "\\25CF"; color: var(--good); margin-right: .5rem; }
.live.lost::before { color: var(--warn-line); }
input, select, button.plain, button.chip { font: inherit; font-size: .9rem; color: var(--ink); background: var(--paper);
  border: 1px solid var(--control); border-radius: 8px; padding: .3rem .6rem; min-height: 2rem; }
input[type=range] { padding: 0; border: 0; accent-color: var(--link); min-width: 7rem; background: none; }
input[type=checkbox] { accent-color: var(--link); width: 1.05rem; min-height: 0; height: 1.05rem; margin: 0; }
input[type=search] { min-width: min(16rem, 45vw); }
button.plain, button.chip, thead button { cursor: pointer; }
button.plain:hover, button.chip:hover { border-color: var(--link); color: var(--link); }
.controls { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: center; margin: .8rem 0; font-size: .92rem; }
.controls .slide.wide { flex: 1 1 16rem; max-width: 44rem; }
.controls .slide.wide input { flex: 1; }
.chips { display: flex; flex-wrap: wrap; gap: .4rem; list-style: none; padding: 0; margin: .6rem 0 1rem; }
button.chip { display: inline-flex; align-items: center; gap: .45rem; border-radius: 999px; padding: .15rem .75rem .15rem .5rem; }
button.chip[aria-pressed=false] { color: var(--muted); text-decoration: line-through; border-style: dashed; }
button.chip[aria-pressed=false] .swatch { opacity: .35; }
.charts { display: grid; gap: 1.6rem; }
@media (min-width: 1000px) { .charts.several { grid-template-columns: 1fr 1fr; } }
.active figure, .active figure.chart { max-width: none; }
.chart-head { display: flex; justify-content: space-between; align-items: flex-end; gap: .3rem 1rem; flex-wrap: wrap;
  margin-bottom: .3rem; }
.chart-head figcaption { margin: 0; }
.tools { display: flex; gap: .3rem; }
.tools button { min-height: 1.75rem; padding: .05rem .55rem; font-size: .82rem; }
.plot { min-height: 16rem; min-width: 0; overflow: hidden; }
.bars .bar { cursor: default; }
.bars .bar:hover { filter: brightness(1.12); }
text.tick { font-size: 12px; fill: var(--muted); }
text.tick.strong { fill: var(--ink); }
.numbers { border: 0; padding: .2rem 0; }
.numbers summary { font-weight: 400; font-size: .88rem; color: var(--muted); }
.tooltip { position: fixed; z-index: 10; pointer-events: none; max-width: min(34rem, 94vw); background: var(--paper);
  color: var(--ink); border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 6px 24px rgb(0 0 0 / .22);
  padding: .45rem .65rem; font-size: .84rem; }
.tooltip p { margin: 0; }
.tooltip table { width: auto; font-size: inherit; }
.tooltip td, .tooltip th, .tooltip th:first-child, .tooltip td:first-child { padding: .08rem .35rem; border: 0; text-align: left;
  min-width: 0; position: static; background: none; vertical-align: middle; font-weight: 400; }
.tooltip th { overflow-wrap: anywhere; white-space: normal; }
.tooltip .near th, .tooltip .near td:not(.none) { font-weight: 700; }
thead button { all: unset; cursor: pointer; }
thead button:hover { color: var(--link); }
thead button:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
thead button::after { content: "\\2195"; opacity: .45; margin-left: .25rem; }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1; }
pre.command button { position: absolute; right: .4rem; top: .35rem; min-height: 0; padding: .05rem .5rem; font-size: .8rem; }
@media (max-width: 700px) {
  .filter, .live { padding-left: 1rem; padding-right: 1rem; }
  .tools button { min-height: 2.1rem; }
}
@media print {
  .scripted .static { display: block; }
  .active, .filter, .tooltip, .live { display: none !important; }
  thead button::after { content: none; }
}
"""
"""For what only pages with a script have."""
