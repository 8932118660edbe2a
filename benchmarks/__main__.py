"""The command line: `python -m benchmarks COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import aggregation, draw, events, everything, methods, own, scale
from benchmarks.measure import PEERS, Benchmark, Plan, quick
from benchmarks.page import fill, page, threads_table
from benchmarks.results import Results
from benchmarks.runner import cache_folder
from benchmarks.settings import MODELS, SETTINGS, SMOKE, VARIANTS, Setting, as_class
from fedpmt.methods.registry import general_methods

if TYPE_CHECKING:
    from collections.abc import Collection

    from matplotlib.figure import Figure

DEFAULT_OUT = Path("benchmark-results")


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and do what it says."""
    given = parser().parse_args(arguments)
    result: int = given.do(given)
    return result


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Ours and other simulators, measured side by side."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="measure simulators in turn; writes every measurement as JSON")
    _measuring(run, SETTINGS, "compare.json", repeat=3, rounds=10, accuracy_rounds=20, warmup=2)
    models = commands.add_parser(
        "models",
        help="the same with users' own modules: the nets of `run` as classes, a ResNet, a ViT and a BERT",
    )
    _measuring(models, MODELS, "models.json", repeat=2, rounds=5, accuracy_rounds=5, warmup=1)

    threads = commands.add_parser(
        "threads", help="only find the best way of using the cores for each simulator"
    )
    _choice(threads, SETTINGS)
    _out(threads, "threads.json")
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
    _out(mean, "aggregation.json")
    mean.set_defaults(do=do_aggregation)

    grow = commands.add_parser(
        "scale", help="seconds and memory against population, cohort, model size and workers"
    )
    grow.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    grow.add_argument("--quick", action="store_true", help="small sizes only")
    _out(grow, "scale.json")
    grow.set_defaults(do=do_scale)

    inside = commands.add_parser(
        "own", help="our rounds: the time of each depth, of each stage, and of an evaluation"
    )
    _choice(inside, SETTINGS)
    inside.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    inside.add_argument("--rounds", type=int, default=10, help="of a repetition (%(default)s)")
    _out(inside, "own.json")
    inside.set_defaults(do=do_own)

    _methods_command(
        commands.add_parser("methods", help="a round of every method, next to our own FedAvg round")
    )

    _events_command(
        commands.add_parser("events", help="replies per second without rounds, over those of FedAvg's rounds")
    )
    _cluster_command(
        commands.add_parser(
            "cluster", help="Flower's simulation on Ray clusters of one and two nodes, predicted and measured"
        )
    )
    _all_command(
        commands.add_parser("all", help="every part that is not there yet, and the pages that show them")
    )

    show = commands.add_parser("draw", help="figures and Markdown tables from the JSON files")
    show.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE.json",
        help="of run, models, scale, own, methods, aggregation, events or cluster",
    )
    show.add_argument(
        "--figures", type=Path, default=DEFAULT_OUT, metavar="FOLDER", help="where figures go (%(default)s)"
    )
    show.add_argument("--format", choices=("svg", "png"), default="svg", help="(%(default)s)")
    show.add_argument(
        "--page",
        type=Path,
        default=None,
        metavar="FILE.md",
        help="put the tables into this page, between the marks of their names, instead of printing them",
    )
    show.set_defaults(do=do_draw)
    return top


def _data_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("FEDPMT_DATA"),
        help="folder of MNIST and CIFAR-10; else FEDPMT_DATA, else the user cache",
    )


def _out(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "--out", type=Path, default=DEFAULT_OUT / name, metavar="FILE.json", help="(%(default)s)"
    )


def _measuring(
    command: argparse.ArgumentParser,
    settings: dict[str, Setting],
    out: str,
    *,
    repeat: int,
    rounds: int,
    accuracy_rounds: int,
    warmup: int,
) -> None:
    """Add the options of a command that measures ours and its peers on some settings."""
    _choice(command, settings)
    command.add_argument(
        "--repeat",
        type=int,
        default=repeat,
        metavar="N",
        help="repetitions, peers in turn in each (%(default)s)",
    )
    command.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help=f"rounds of a repetition, {warmup} for warming up (%(default)s)",
    )
    command.add_argument(
        "--accuracy-rounds",
        type=int,
        default=accuracy_rounds,
        help="rounds of the first repetition, after which accuracies are compared (%(default)s)",
    )
    command.add_argument(
        "--quick", action="store_true", help="few rounds and at most two repetitions: minutes, not hours"
    )
    command.add_argument(
        "--no-search", action="store_true", help="take the first way of using the cores instead of trying all"
    )
    command.add_argument(
        "--ways",
        type=Path,
        metavar="FILE.json",
        help="take the ways of using the cores that a run, or `threads`, found on this machine",
    )
    _out(command, out)
    command.set_defaults(do=do_run, warmup=warmup)


def _methods_command(every: argparse.ArgumentParser) -> None:
    every.add_argument(
        "--methods",
        type=_methods,
        default=tuple(general_methods()),
        metavar="A,B",
        help=f"of {','.join(general_methods())} (all)",
    )
    every.add_argument(
        "--setting", choices=(*SETTINGS, SMOKE.name), default="cnn-cifar10", help="(%(default)s)"
    )
    every.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    every.add_argument("--rounds", type=int, default=6, help="timed in each repetition (%(default)s)")
    _data_dir(every)
    _out(every, "methods.json")
    every.set_defaults(do=do_methods)


def _events_command(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--only",
        type=lambda text: tuple(
            SMOKE if name == SMOKE.name else SETTINGS[name] for name in _names(text, [*SETTINGS, SMOKE.name])
        ),
        default=tuple(SETTINGS.values()),
        metavar="A,B",
        help=f"settings, of {', '.join(SETTINGS)} (all)",
    )
    command.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    command.add_argument(
        "--replies", type=int, default=events.REPLIES, help="timed in each repetition (%(default)s)"
    )
    _data_dir(command)
    _out(command, "events.json")
    command.set_defaults(do=do_events)


def _cluster_command(command: argparse.ArgumentParser) -> None:
    command.add_argument("--repeat", type=int, default=3, metavar="N", help="(%(default)s)")
    command.add_argument("--rounds", type=int, default=8, help="timed in each repetition (%(default)s)")
    command.add_argument("--cores", type=int, default=1, help="of each node (%(default)s)")
    command.add_argument("--small", action="store_true", help="a small fleet, to see that it runs")
    _out(command, "cluster.json")
    command.set_defaults(do=do_cluster)


def _all_command(command: argparse.ArgumentParser) -> None:
    parts = ",".join(everything.NAMES)
    command.add_argument(
        "--only", type=_parts, default=everything.NAMES, metavar="A,B", help=f"of {parts} (all)"
    )
    command.add_argument("--again", type=_parts, default=(), metavar="A,B", help="parts to measure once more")
    command.add_argument("--quick", action="store_true", help="all parts short, to see that they run")
    command.add_argument(
        "--folder", type=Path, default=DEFAULT_OUT / "all", help="where complete parts are kept (%(default)s)"
    )
    command.add_argument(
        "--docs", type=Path, default=Path("docs"), help="the documentation to be written (%(default)s)"
    )
    _data_dir(command)
    command.set_defaults(do=do_all)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(_names(text, everything.NAMES))


def _choice(command: argparse.ArgumentParser, settings: dict[str, Setting]) -> None:
    command.add_argument(
        "--only",
        type=lambda text: tuple(settings[name] for name in _names(text, settings)),
        default=tuple(settings.values()),
        metavar="A,B",
        help=f"settings, of {', '.join(settings)} (all)",
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
    _data_dir(command)
    command.add_argument(
        "--work",
        type=Path,
        default=cache_folder(),
        help="folder of the peers' environments and exported arrays; else the user cache",
    )


def _peers(text: str) -> tuple[str, ...]:
    return tuple(_names(text, PEERS))


def _methods(text: str) -> tuple[str, ...]:
    return tuple(_names(text, general_methods()))


def _names(text: str, allowed: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"'{name}' is unknown (allowed: {', '.join(allowed)})")
    return names


def plan_of(given: argparse.Namespace) -> Plan:
    """Make the plan that the command line asks for."""
    return Plan(
        settings=given.only,
        peers=given.peers,
        limit=given.limit,
        data_dir=None if given.data_dir is None else Path(given.data_dir).resolve(),
        work=given.work.resolve(),
        out=given.out,
    )


def do_run(given: argparse.Namespace) -> int:
    """Measure, and print the tables."""
    plan = replace(
        plan_of(given),
        repeat=given.repeat,
        warmup=given.warmup,
        rounds=given.rounds,
        trial_rounds=given.warmup + 3,
        accuracy_rounds=given.accuracy_rounds,
        search=not given.no_search,
        known=tuple(Results.read(given.ways).threads) if given.ways else (),
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
    """Run a tiny comparison; it fails if ours or the plain loop was not measured or did not do the same work."""
    with tempfile.TemporaryDirectory(prefix="fedpmt-bench-") as work:
        plan = Plan(
            settings=(SMOKE, as_class(SMOKE)),
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
    print(aggregation.aggregation_text(results))
    return 0


def do_scale(given: argparse.Namespace) -> int:
    """Measure how a round grows."""
    results = scale.run(repeat=given.repeat, quick=given.quick)
    _write(given.out, results.model_dump_json(indent=1))
    print(scale.scale_text(results))
    return 0


def do_own(given: argparse.Namespace) -> int:
    """Look into our own rounds."""
    results = own.run(replace(plan_of(given), repeat=given.repeat, rounds=given.rounds))
    _write(given.out, results.model_dump_json(indent=1))
    print("\n\n".join(own.tables(results).values()))
    return 0


def do_methods(given: argparse.Namespace) -> int:
    """Measure a round of every method."""
    setting = SMOKE if given.setting == SMOKE.name else SETTINGS[given.setting]
    data_dir = None if given.data_dir is None else Path(given.data_dir).resolve()
    results = methods.run(setting, given.methods, repeat=given.repeat, rounds=given.rounds, data_dir=data_dir)
    _write(given.out, results.model_dump_json(indent=1))
    print(methods.methods_text(results))
    return 0


def do_events(given: argparse.Namespace) -> int:
    """Measure replies per second without rounds."""
    data_dir = None if given.data_dir is None else Path(given.data_dir).resolve()
    results = events.run(given.only, repeat=given.repeat, replies=given.replies, data_dir=data_dir)
    _write(given.out, results.model_dump_json(indent=1))
    print(events.events_text(results))
    return 0


def do_cluster(given: argparse.Namespace) -> int:
    """Measure Flower's simulation on Ray clusters."""
    from benchmarks import cluster  # it loads Flower, which the other commands can do without

    results = cluster.run(repeat=given.repeat, rounds=given.rounds, cores=given.cores, small=given.small)
    _write(given.out, results.model_dump_json(indent=1))
    print("\n\n".join(cluster.tables(results).values()))
    return 0 if results.same_weights else 1


PAGES = ("benchmarks.md", "scale.md")


def do_all(given: argparse.Namespace) -> int:
    """Run the parts that have no results yet, then write the pages from all results."""
    data_dir = None if given.data_dir is None else Path(given.data_dir).resolve()
    failed = everything.run(
        main, given.folder, given.only, again=given.again, quick=given.quick, data_dir=data_dir
    )
    files = [str(file) for file in everything.publish(given.folder, given.docs)]
    for page_file in (given.docs / name for name in PAGES):
        if files and page_file.exists():
            figures = str(given.docs / "benchmarks")
            main(["draw", *files, "--figures", figures, "--format", "png", "--page", str(page_file)])
    if failed:
        print(f"not measured: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def do_draw(given: argparse.Namespace) -> int:
    """Turn JSON files into figures and tables."""
    blocks: dict[str, str] = {}
    for file in given.files:
        figure, tables = show_file(file)
        if not tables:
            print(f"{file.name} is not a result of this benchmark", file=sys.stderr)
            return 1
        if figure is not None:
            draw.save(figure, given.figures / f"{file.stem}.{given.format}")
        blocks |= tables
    if given.page is None:
        print("\n\n".join(text.strip() for text in blocks.values()))
    else:
        given.page.write_text(fill(given.page.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    return 0


def show_file(file: Path) -> tuple[Figure | None, dict[str, str]]:
    """Make the figure of a JSON file, if it has one, and its tables by the names of their marks.

    There are no tables where the file is not a result of this benchmark.
    """
    content, name = json.loads(file.read_text(encoding="utf-8")), file.stem
    if "measurements" in content:
        results = Results.model_validate(content)
        return draw.compare_figure(results), {name: page(results)}
    if "points" in content:
        grown = scale.ScaleResults.model_validate(content)
        return draw.scale_figure(grown), {name: scale.scale_text(grown)}
    if "evaluations" in content:
        tables = own.tables(own.OwnResults.model_validate(content))
        return None, {f"{name}-{kind}": text for kind, text in tables.items()}
    if "methods" in content:
        return None, {name: methods.methods_text(methods.MethodResults.model_validate(content))}
    if "events" in content:
        return None, {name: events.events_text(events.EventResults.model_validate(content))}
    if "clusters" in content:
        from benchmarks import cluster

        parts = cluster.tables(cluster.ClusterResults.model_validate(content))
        return None, {f"{name}-{kind}": text for kind, text in parts.items()}
    if "copy_seconds" in content:
        averaged = aggregation.AggregationResults.model_validate(content)
        return None, {name: aggregation.aggregation_text(averaged)}
    return None, {}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
