"""The command line: arguments in, a run out.

Exit status: 0 done, 1 failed, 2 bad usage or configuration. With `--json` standard output is one JSON object and nothing
else; progress goes to standard error. Commands import what they need when they run, so `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.config import RunConfig, commented_toml
from secure_fed.errors import ConfigError, RunDirectoryError, SecureFedError

if TYPE_CHECKING:
    from secure_fed.federation import Result

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        chosen.run(chosen)
    except SecureFedError as error:
        print(f"secure-fed: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("secure-fed: interrupted; a run with --out goes on with --resume", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="secure-fed", description="Federated fine-tuning of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help_: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help_, description=help_)
        made.set_defaults(run=run)
        return made

    demo = command("demo", _demo, "fine-tune the built-in model on the built-in data, and report")
    train = command("train", _train, "run a federation")
    train.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; without it, the defaults")
    train.add_argument("--set", action="append", default=[], metavar="section.key=value", help="change one setting")
    train.add_argument(
        "--resume", action="store_true", help="go on with the run in --out; federation.rounds may be raised"
    )
    for running in (demo, train):
        running.add_argument("--out", metavar="DIR", help="run directory (default: a new one under runs/)")
        running.add_argument("--json", action="store_true", help="print the result as one JSON object")

    methods = command("methods", _methods, "list the methods: what travels, and how much")
    methods.add_argument("--model", default="builtin/tiny", metavar="NAME_OR_FOLDER", help="count for this model")
    methods.add_argument("--json", action="store_true", help="print one JSON object")

    report = command("report", _report, "write the HTML report of a run again")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")

    export = command("export", _export, "write the trained adapter as a PEFT folder")
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    export.add_argument("--merged", action="store_true", help="write the whole model, the adapter merged into it")

    predict = command("predict", _predict, "label texts with a trained run, one JSON object a line")
    predict.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    predict.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="as for training, or .txt; default: lines of stdin"
    )

    config = commands.add_parser("config", help="configuration files", description="configuration files")
    init = config.add_subparsers(required=True, metavar="ACTION").add_parser(
        "init", help="a commented TOML with every key"
    )
    init.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: standard output")
    init.set_defaults(run=_config_init)
    return parser


def _demo(chosen: argparse.Namespace) -> None:
    _run(RunConfig(), _out(chosen.out, "demo"), resume=False, as_json=chosen.json)


def _train(chosen: argparse.Namespace) -> None:
    if chosen.resume and not chosen.out:
        raise RunDirectoryError("--resume needs --out DIR, the run directory to go on with")
    config = RunConfig.load(chosen.config, () if chosen.resume else chosen.set)
    if chosen.resume:
        from secure_fed.run_store import read_config

        config = (config if chosen.config else read_config(Path(chosen.out))).override(chosen.set)
    _run(config, _out(chosen.out, config.method.name), resume=chosen.resume, as_json=chosen.json)


def _run(config: RunConfig, out: Path, *, resume: bool, as_json: bool) -> None:
    from secure_fed import report
    from secure_fed.federation import Federation
    from secure_fed.progress import ConsoleProgress, TensorBoard
    from secure_fed.run_store import read_checkpoint, require_unused

    if not resume:
        require_unused(out)
    print(f"secure-fed: {config.method.name} of {config.model.name}, run directory {out}", file=sys.stderr)
    federation = Federation(config)
    with ExitStack() as stack:
        federation.callbacks.append(stack.enter_context(ConsoleProgress(config.federation.rounds)))
        if config.evaluation.tensorboard:
            checkpoint = read_checkpoint(out) if resume else None
            federation.callbacks.append(TensorBoard(out / "tensorboard", checkpoint.state.round if checkpoint else 0))
        result = federation.run(out, resume=resume)
    page = report.write(out)
    _print_result(result, page, as_json)


def _print_result(result: Result, page: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.summary))
        return
    from rich.console import Console
    from rich.table import Table

    from secure_fed.progress import readable_bytes

    summary = result.summary
    table = Table(
        show_header=False, title=f"{summary['method']}: {summary['model']} on {summary['data']}", title_style="bold"
    )
    for name, value in (
        ("accuracy", _percent(summary["accuracy"])),
        ("macro-F1", _percent(summary["macro_f1"])),
        ("rounds", f"{summary['rounds']} of {summary['cohort']:g} among {summary['clients']} clients"),
        ("trained parameters", f"{summary['trainable']:,}"),
        ("sent", f"{readable_bytes(summary['bytes_up'])} up, {readable_bytes(summary['bytes_down'])} down"),
        ("privacy", summary["privacy_statement"]),
        ("time", f"{summary['seconds']:.1f} s"),
    ):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"report: {page}", soft_wrap=True, highlight=False)
    console.print(f"adapter: secure-fed export {result.run_dir} OUT_DIR", soft_wrap=True, highlight=False)


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _methods(chosen: argparse.Namespace) -> None:
    from secure_fed.methods.catalogue import catalogue

    rows = catalogue(chosen.model)
    if chosen.json:
        print(json.dumps({"model": chosen.model, "methods": rows}))
        return
    from rich.console import Console
    from rich.table import Column, Table

    from secure_fed.progress import readable_bytes

    table = Table(
        Column("method", no_wrap=True),
        "travels",
        "mean exact",
        "trainable",
        "up a round",
        "paper",
        title=f"for {chosen.model}",
    )
    for row in rows:
        up = readable_bytes(row["bytes_up"])
        exact = "yes" if row["mean_exact"] else "no"
        table.add_row(row["name"], row["travels"], exact, f"{row['trainable']:,}", up, row["paper"])
    Console().print(table)


def _report(chosen: argparse.Namespace) -> None:
    from secure_fed import report

    print(report.write(chosen.run_dir))


def _export(chosen: argparse.Namespace) -> None:
    from secure_fed import trained

    print(trained.load(chosen.run_dir).export(chosen.out_dir, merged=chosen.merged))


def _predict(chosen: argparse.Namespace) -> None:
    from secure_fed import trained
    from secure_fed.data.texts import lines, read_texts

    run = trained.load(chosen.run_dir)
    if chosen.file is not None:
        texts, pairs = read_texts(chosen.file, run.config.data)
    elif run.config.data.text_b:
        raise ConfigError("this run labels pairs of texts, which lines of standard input cannot give; name a FILE")
    else:
        texts, pairs = lines(sys.stdin, "standard input"), None
    for prediction in run.predict(texts, pairs):
        print(json.dumps(prediction))


def _config_init(chosen: argparse.Namespace) -> None:
    if chosen.file is None:
        print(commented_toml(), end="")
        return
    if chosen.file.exists():
        raise ConfigError(f"{chosen.file} exists already; name a file that does not")
    from secure_fed.durable import atomic_write

    atomic_write(chosen.file, commented_toml())
    print(chosen.file)


def _out(asked: str | None, name: str) -> Path:
    return Path(asked) if asked else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
