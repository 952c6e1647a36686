"""The command line: arguments in, a run out.

Exit status: 0 done, 1 failed, 2 bad usage or configuration, 3 privacy budget exhausted, 4 an audit above its limit, 5 an
inconclusive audit. With `--json` standard output is one JSON object and nothing else; progress goes to standard error. Commands
import their modules when they run, so `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from secure_fed import __version__
from secure_fed.activity import heartbeat
from secure_fed.commands import budget as budget_commands
from secure_fed.commands import compare as compare_command
from secure_fed.commands import coordinator as coordinator_commands
from secure_fed.commands import evaluate as evaluate_command
from secure_fed.commands import export as export_command
from secure_fed.commands import flower as flower_commands
from secure_fed.commands import init as init_command
from secure_fed.commands import node as node_commands
from secure_fed.commands import predict as predict_command
from secure_fed.commands import secagg as secagg_command
from secure_fed.commands import train as train_command
from secure_fed.errors import RunDirectoryError, StorageError, UsageError, reported
from secure_fed.learning.tasks import TASKS

_OF_UNIX = ("node", "coordinator", "flower")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    from attacks.cli import with_subcommand

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["audit"]:
        given[1:] = with_subcommand(given[1:])

    def run() -> int | None:
        chosen = parser().parse_args(given)
        if given[0] in _OF_UNIX and sys.platform == "win32":
            raise UsageError(f"{given[0]} needs Unix sockets and owners of files: run it on Linux, macOS or WSL")
        with heartbeat():
            status: int | None = chosen.run(chosen)
        return status

    return reported(run)


def parser() -> argparse.ArgumentParser:
    """The parser of every command, from which the documentation takes their help too."""
    from attacks import cli as audits

    whole = argparse.ArgumentParser(prog="secure-fed", description="Federated fine-tuning of language models.")
    whole.add_argument("--version", action="version", version=f"secure-fed {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int | None], does: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=does, description=does)
        made.set_defaults(run=run)
        return made

    begin = "write a configuration for your data, from four questions"
    init_command.add_arguments(command("init", init_command.run, begin))
    _add_running(command)
    _add_reading(command)
    config = commands.add_parser("config", help="configuration files", description="configuration files")
    actions = config.add_subparsers(required=True, metavar="ACTION")
    init_command.add_arguments(actions.add_parser("init", help="as secure-fed init; --all: every setting, explained"))
    actions.choices["init"].set_defaults(run=init_command.run)
    audit = "attack a run or a model, and report what it gives away"
    audits.add_parsers(commands.add_parser("audit", help=audit, description=audit))
    budget = "privacy: plan what it costs, and keep its ledgers"
    budget_commands.add_parsers(commands.add_parser("budget", help=budget, description=budget))
    node = "many machines: a node, which holds one member's data"
    node_commands.add_parsers(commands.add_parser("node", help=node, description=node))
    coordinator = "many machines: the coordinator, which founds a federation"
    coordinator_commands.add_parsers(commands.add_parser("coordinator", help=coordinator, description=coordinator))
    flower = "many machines: the Flower project of a federation"
    flower_commands.add_parsers(commands.add_parser("flower", help=flower, description=flower))
    secagg = "simulate a secure sum: what it costs, who drops out, which lies are noticed"
    simulation = commands.add_parser("secagg", help=secagg, description=secagg, add_help=False)
    simulation.set_defaults(run=secagg_command.run)
    secagg_command.add_arguments(simulation)
    return whole


def _add_running(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that run a federation, and the command that lists the methods."""
    demo = command(
        "demo", _demo, "fine-tune the built-in model on the built-in data, privately; then attack it, and report"
    )
    train = command("train", train_command.train, "run a federation")
    train_command.add_arguments(train)
    for running in (demo, train):
        running.add_argument("--out", metavar="DIR", help="run directory (default: a new one under runs/)")
        running.add_argument("--json", action="store_true", help="print the result as one JSON object")
    comparing = (
        "run configurations over several seeds, put them side by side, and state what private ones cost together"
    )
    compare_command.add_arguments(command("compare", compare_command.run, comparing))
    methods = command("methods", _methods, "list the methods: what travels, and how much")
    methods.add_argument("--model", default="builtin/tiny", metavar="NAME_OR_FOLDER", help="count for this model")
    methods.add_argument("--task", choices=tuple(TASKS), default="classification", help="count what this task trains")
    head = "count with a head for so many classes (default: 2; builtin/tiny: as many as the built-in notes have)"
    methods.add_argument("--classes", type=int, metavar="N", help=head)
    changes = "count with this setting, where a method reads it; model.quantization and model.pooling too"
    methods.add_argument("--set", action="append", default=[], metavar="method.key=value", help=changes)
    methods.add_argument("--json", action="store_true", help="print one JSON object")


def _add_reading(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that use a run's directory."""
    report = command("report", _report, "write the HTML report of a run again")
    export = command("export", export_command.run, "write the trained adapter as a folder")
    answer = "label texts with a trained run, or continue them: one JSON object a line"
    predict = command("predict", predict_command.run, answer)
    compared = "measure a run's language model on tasks of lm-eval, alone or beside its base model"
    evaluate = command("evaluate", evaluate_command.run, compared)
    for using in (report, export, predict, evaluate):
        using.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export_command.add_arguments(export)
    predict_command.add_arguments(predict)
    evaluate_command.add_arguments(evaluate)
    for using in (export, predict, evaluate):
        using.add_argument("--client", metavar="NAME", help="whose model, for a run with method.personal")
        using.add_argument(
            "--best", action="store_true", help="of the best evaluation, for a run with evaluation.keep_best"
        )


def _demo(chosen: argparse.Namespace) -> None:
    from attacks import command as audits
    from secure_fed.commands import demo
    from secure_fed.report.page import write_report
    from secure_fed.runs.directory import UNPROTECTED, private_part, read_config

    out = train_command.run(demo.config(), chosen, "demo", resume=False)
    print("secure-fed: the same again without privacy and masks, for comparison", file=sys.stderr)
    unprotected = private_part(out) / UNPROTECTED  # it is on the same data
    beside = argparse.Namespace(out=str(unprotected), json=False)
    train_command.run(demo.unprotected(read_config(out)), beside, "unprotected", resume=False, quiet=True)
    found = audits.side_by_side(out, unprotected)
    write_report(out)  # again, since there is an audit now
    if not chosen.json:
        print("\n".join(found))


def _methods(chosen: argparse.Namespace) -> None:
    from secure_fed.methods.counted import classes_of, rows

    classes = classes_of(chosen.model, chosen.task, chosen.classes)
    found = rows(chosen.model, chosen.set, classes, chosen.task)
    if chosen.json:
        print(json.dumps({"model": chosen.model, "task": chosen.task, "classes": classes, "methods": found}))
        return
    from secure_fed.report.terminal import show_methods

    show_methods(chosen.model, classes, found, chosen.task)


def _report(chosen: argparse.Namespace) -> None:
    from secure_fed.report.page import write_report

    try:
        print(write_report(chosen.run_dir))
    except StorageError as error:
        why = str(error).rpartition(";")[0]
        raise RunDirectoryError(f"{why}; copy the run to a folder that you can write to") from error
