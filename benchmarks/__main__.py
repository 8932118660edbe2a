"""`python -m benchmarks`: measure, smoke, draw."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import aggregation, draw, methods, own, scale
from benchmarks.environments import cache_folder
from benchmarks.measure import PEERS, Benchmark, Plan, quick
from benchmarks.page import page, threads_table
from benchmarks.results import Results
from benchmarks.settings import SETTINGS, SMOKE, VARIANTS, Setting
from fedpmt.methods.registry import METHODS

DEFAULT_OUT = Path("benchmark-results")


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and do what it says."""
    given = parser().parse_args(arguments)
    result: int = given.do(given)
    return result


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Ours and other simulators, measured side by side."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="measure simulators in turn; writes every measurement as JSON")
    _choice(run)
    run.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="repetitions, peers in turn in each (%(default)s)"
    )
    run.add_argument(
        "--rounds", type=int, default=10, help="rounds of a repetition, 2 of them warm-up (%(default)s)"
    )
    run.add_argument(
        "--accuracy-rounds",
        type=int,
        default=20,
        help="rounds of the first repetition, after which accuracies are compared (%(default)s)",
    )
    run.add_argument(
        "--quick", action="store_true", help="few rounds and at most two repetitions: minutes, not hours"
    )
    run.add_argument(
        "--no-search", action="store_true", help="take the first way of using the cores instead of trying all"
    )
    run.add_argument(
        "--ways",
        type=Path,
        metavar="FILE.json",
        help="take the ways of using the cores that a run, or `threads`, found on this machine",
    )
    run.add_argument(
        "--out", type=Path, default=DEFAULT_OUT / "compare.json", metavar="FILE.json", help="(%(default)s)"
    )
    run.set_defaults(do=do_run)

    threads = commands.add_parser(
        "threads", help="only find the best way of using the cores for each simulator"
    )
    _choice(threads)
    threads.add_argument(
        "--out", type=Path, default=DEFAULT_OUT / "threads.json", metavar="FILE.json", help="(%(default)s)"
    )
    threads.set_defaults(do=do_threads)

    smoke = commands.add_parser(
        "smoke", help="ours and the plain loop on embedded data: seconds, no network, no environments"
    )
    smoke.add_argument("--out", type=Path, default=None, metavar="FILE.json", help="also write the JSON here")
    smoke.set_defaults(do=do_smoke)

    mean = commands.add_parser(
        "aggregation", help="averaging updates of a large model, against memory bandwidth and Flower"
    )
    mean.add_argument(
        "--parameters", type=int, default=aggregation.PARAMETERS, help="of the model (%(default)s)"
    )
    mean.add_argument("--updates", type=int, default=aggregation.UPDATES, help="to be averaged (%(default)s)")
    mean.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    mean.add_argument("--no-flower", action="store_true", help="leave Flower out")
    mean.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT / "aggregation.json",
        metavar="FILE.json",
        help="(%(default)s)",
    )
    mean.set_defaults(do=do_aggregation)

    grow = commands.add_parser(
        "scale", help="seconds and memory against population, cohort, model size and workers"
    )
    grow.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    grow.add_argument("--quick", action="store_true", help="small sizes only")
    grow.add_argument(
        "--out", type=Path, default=DEFAULT_OUT / "scale.json", metavar="FILE.json", help="(%(default)s)"
    )
    grow.set_defaults(do=do_scale)

    inside = commands.add_parser(
        "own", help="our rounds: the time of each depth, of each stage, and of an evaluation"
    )
    _choice(inside)
    inside.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    inside.add_argument("--rounds", type=int, default=10, help="of a repetition (%(default)s)")
    inside.add_argument(
        "--out", type=Path, default=DEFAULT_OUT / "own.json", metavar="FILE.json", help="(%(default)s)"
    )
    inside.set_defaults(do=do_own)

    _methods_command(
        commands.add_parser("methods", help="a round of every method, next to our own FedAvg round")
    )

    show = commands.add_parser("draw", help="figures and Markdown tables from the JSON files")
    show.add_argument(
        "files", type=Path, nargs="+", metavar="FILE.json", help="of run, scale, own, methods or aggregation"
    )
    show.add_argument(
        "--figures", type=Path, default=DEFAULT_OUT, metavar="FOLDER", help="where figures go (%(default)s)"
    )
    show.add_argument("--format", choices=("svg", "png"), default="svg", help="(%(default)s)")
    show.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="FILE.md",
        help="write the tables here instead of printing them",
    )
    show.set_defaults(do=do_draw)
    return top


def _methods_command(every: argparse.ArgumentParser) -> None:
    every.add_argument(
        "--methods",
        type=_methods,
        default=tuple(METHODS),
        metavar="A,B",
        help=f"of {','.join(METHODS)} (all)",
    )
    every.add_argument(
        "--setting", choices=(*SETTINGS, SMOKE.name), default="cnn-cifar10", help="(%(default)s)"
    )
    every.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    every.add_argument("--rounds", type=int, default=6, help="timed in each repetition (%(default)s)")
    every.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("FEDPMT_DATA"),
        help="folder of CIFAR-10; else FEDPMT_DATA, else the user cache",
    )
    every.add_argument(
        "--out", type=Path, default=DEFAULT_OUT / "methods.json", metavar="FILE.json", help="(%(default)s)"
    )
    every.set_defaults(do=do_methods)


def _choice(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--settings",
        type=_settings,
        default=tuple(SETTINGS.values()),
        metavar="A,B",
        help=f"of {','.join(SETTINGS)} (all)",
    )
    command.add_argument(
        "--peers", type=_peers, default=PEERS, metavar="A,B", help=f"of {','.join(PEERS)} (all)"
    )
    command.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a round that takes longer is cut off (%(default)s)",
    )
    command.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("FEDPMT_DATA"),
        help="folder of MNIST and CIFAR-10; else FEDPMT_DATA, else the user cache",
    )
    command.add_argument(
        "--work",
        type=Path,
        default=cache_folder(),
        help="folder of the peers' environments and exported arrays; else the user cache",
    )


def _settings(text: str) -> tuple[Setting, ...]:
    return tuple(SETTINGS[name] for name in _names(text, SETTINGS))


def _peers(text: str) -> tuple[str, ...]:
    return tuple(_names(text, PEERS))


def _methods(text: str) -> tuple[str, ...]:
    return tuple(_names(text, METHODS))


def _names(text: str, allowed: object) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = list(allowed) if isinstance(allowed, dict | tuple) else []
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"'{name}' is unknown (allowed: {', '.join(known)})")
    return names


def plan_of(given: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    return Plan(
        settings=given.settings,
        peers=given.peers,
        limit=given.limit,
        data_dir=None if given.data_dir is None else Path(given.data_dir).resolve(),
        work=given.work.resolve(),
        out=given.out,
    )


def do_run(given: argparse.Namespace) -> int:
    """Measure, and show the tables."""
    plan = replace(
        plan_of(given),
        repeat=given.repeat,
        rounds=given.rounds,
        accuracy_rounds=given.accuracy_rounds,
        search=not given.no_search,
        known=tuple(Results.model_validate_json(given.ways.read_bytes()).threads) if given.ways else (),
    )
    results = Benchmark(quick(plan) if given.quick else plan).run()
    print(page(results))
    return 0


def do_threads(given: argparse.Namespace) -> int:
    """Try the ways of using the cores."""
    benchmark = Benchmark(plan_of(given))
    benchmark.prepare()
    benchmark.find_ways()
    print(threads_table(benchmark.results))
    return 0


def do_smoke(given: argparse.Namespace) -> int:
    """A tiny comparison; fails when one of the two could not be measured or did not do the same work."""
    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as work:
        plan = Plan(
            settings=(SMOKE,),
            peers=("ours", "plain"),
            variants=VARIANTS[:2],
            repeat=1,
            warmup=1,
            rounds=4,
            accuracy_rounds=4,
            search=False,
            peak_seconds=0.1,
            work=Path(work),
            own_environment=False,
            out=given.out,
        )
        results = Benchmark(plan).run()
    print(page(results))
    wrong = [run for run in results.measurements if run.error or run.cut_off or run.steps != SMOKE.steps]
    return 1 if wrong else 0


def do_aggregation(given: argparse.Namespace) -> int:
    """Average a large model."""
    results = aggregation.run(
        parameters=given.parameters, updates=given.updates, repeat=given.repeat, flower=not given.no_flower
    )
    _write(given.out, results.model_dump_json(indent=1))
    print(aggregation_text(results))
    return 0


def aggregation_text(results: aggregation.AggregationResults) -> str:
    """One paragraph."""
    flower = f"Flower: {results.flower_note or 'not measured'}."
    if results.times_flower is not None:
        flower = f"Flower's FedAvg takes {results.times_flower:.1f} times as long."
    return (
        f"{results.updates} updates of {results.parameters:,} parameters: {results.ours_gb_per_second:.1f} GB/s "
        f"with {results.threads} threads, "
        f"{results.share_of_copy:.0%} of the machine's copy rate ({results.copy_gb_per_second:.1f} GB/s). {flower}"
    )


def do_scale(given: argparse.Namespace) -> int:
    """Measure how a round grows."""
    results = scale.run(repeat=given.repeat, quick=given.quick)
    _write(given.out, results.model_dump_json(indent=1))
    print(scale_text(results))
    return 0


def scale_text(results: scale.ScaleResults) -> str:
    """A table of all places, and the start-up times."""
    from benchmarks.page import table
    from benchmarks.summary import Spread

    body = [
        [
            draw.AXIS[point.kind],
            f"{point.size:,.0f}",
            str(Spread(point.seconds, point.low, point.high)),
            f"{point.peak_mib:.0f} MiB",
        ]
        for point in results.points
    ]
    text = table(("axis", "size", "a round", "peak memory"), body)
    if results.startup is None:
        return text
    return (
        f"{text}\n\n`fedpmt --help` takes {results.startup.help_seconds:.2f} s; `fedpmt run` has its first round "
        f"on disk after {results.startup.first_round_seconds:.2f} s."
    )


def do_own(given: argparse.Namespace) -> int:
    """Look into our own rounds."""
    results = own.run(replace(plan_of(given), repeat=given.repeat, rounds=given.rounds))
    _write(given.out, results.model_dump_json(indent=1))
    print(own_text(results))
    return 0


def own_text(results: own.OwnResults) -> str:
    """All tables."""
    from benchmarks.page import table
    from benchmarks.summary import seconds_text

    depths = [
        [
            one.setting,
            str(one.epochs),
            str(one.depth),
            seconds_text(one.seconds),
            f"{one.time:.2f}",
            f"{one.operations:.2f}",
            f"{one.time / one.operations - 1:+.0%}",
        ]
        for one in results.depths
    ]
    stages = [
        [one.setting, *map(seconds_text, (one.gathered, one.laid_out, one.trained, one.read_back))]
        for one in results.stages
    ]
    evaluations = [
        [one.setting, *map(seconds_text, (one.round_seconds, one.evaluated_seconds)), f"{one.share:.2f}"]
        for one in results.evaluations
    ]
    modules = [
        [one.setting, *map(seconds_text, (one.seconds, one.plain_seconds)), f"{one.faster:.1f} x"]
        for one in results.modules
    ]
    head = ("setting", "E", "depth", "a device's round", "time of the full", "`exact` of the full", "apart")
    return "\n\n".join(
        (
            table(head, depths),
            table(("setting", "samples gathered", "weights laid out", "trained", "read back"), stages),
            table(("setting", "a round", "with an evaluation", "evaluation over round"), evaluations),
            table(("setting", "any other module", "plain PyTorch loop", "ours is faster"), modules),
        )
    )


def do_methods(given: argparse.Namespace) -> int:
    """Measure a round of every method."""
    setting = SMOKE if given.setting == SMOKE.name else SETTINGS[given.setting]
    data_dir = None if given.data_dir is None else Path(given.data_dir).resolve()
    results = methods.run(setting, given.methods, repeat=given.repeat, rounds=given.rounds, data_dir=data_dir)
    _write(given.out, results.model_dump_json(indent=1))
    print(methods.methods_text(results))
    return 0


def do_draw(given: argparse.Namespace) -> int:
    """Turn JSON files into figures and tables."""
    texts = []
    for file in given.files:
        content = json.loads(file.read_text(encoding="utf-8"))
        figure = given.figures / f"{file.stem}.{given.format}"
        if "measurements" in content:
            results = Results.model_validate(content)
            draw.save(draw.compare_figure(results), figure)
            texts.append(page(results))
        elif "points" in content:
            grown = scale.ScaleResults.model_validate(content)
            draw.save(draw.scale_figure(grown), figure)
            texts.append(scale_text(grown))
        elif "evaluations" in content:
            texts.append(own_text(own.OwnResults.model_validate(content)))
        elif "methods" in content:
            texts.append(methods.methods_text(methods.MethodResults.model_validate(content)))
        elif "copy_seconds" in content:
            texts.append(aggregation_text(aggregation.AggregationResults.model_validate(content)))
        else:
            print(f"{file.name} is not a result of this benchmark", file=sys.stderr)
            return 1
    text = "\n\n".join(text.strip() for text in texts) + "\n"
    if given.out is None:
        print(text)
    else:
        _write(given.out, text)
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
