"""`secure-fed audit prepare DATA --out DIR`, and `secure-fed audit prepared MODEL DIR`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.options import (
    CANNOT_TELL,
    KINDS,
    LENGTH,
    OF_CHATS,
    TASKS,
    Asked,
    add_limit,
    add_model_arguments,
    add_task_arguments,
    cannot_tell,
    chosen_settings,
    exit_status,
    gives_scale,
    limit_of,
    refuse,
    require_columns,
    say,
)
from secure_fed.errors import ConfigError
from secure_fed.learning.data import files

if TYPE_CHECKING:
    from attacks.prepared.folder import Manifest


_TEMPLATE = (
    "the sentence of secrets, with {secret} and perhaps {name}; for chats a line each of a question and its answer"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit prepared`."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("prepared", type=Path, metavar="DIR", help="the folder that `secure-fed audit prepare` made")
    add("--delta", type=float, metavar="D", help="the bound on epsilon is at this delta (default: 1e-5)")
    exposure = "rank the planted secrets among the possible secrets, instead of bounding epsilon"
    add("--exposure", action="store_true", help=exposure)
    tried = "rank each among N random ones, if more are possible (default: 1000)"
    add("--secrets-tried", type=int, metavar="N", help=tried)
    unseen = "a model of the same kind that never saw the candidates; may be repeated"
    add("--reference", action="append", default=[], metavar="NAME", help=unseen)
    add("--labels", metavar="A,B,...", help="the classes in the order of the model's outputs")
    add("--max-length", type=int, metavar="TOKENS", help=f"cut longer texts (default: {LENGTH}; chats: {OF_CHATS})")
    add_task_arguments(parser)
    add_limit(parser, "epsilon", f" (exposure=X with --exposure); with {CANNOT_TELL} if it cannot tell")


def add_preparing(parser: argparse.ArgumentParser) -> None:
    """Add the options of `audit prepare`."""
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="a JSON Lines, CSV or Parquet file (.gz too)")
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    add("--task", choices=TASKS, default="classification", help="default: classification")
    for name in ("text", "text-b", "label"):
        add(f"--{name}", default="", metavar="COLUMN", help=f"as data.{name.replace('-', '_')}")
    planted = "rows of the data, rows with wrong labels, or sentences with random secrets (default: none, rows)"
    add("--canaries", choices=KINDS, default="none", help=f"candidates: {planted}")
    add("--count", type=int, metavar="M", help="candidates (default: 1000, or half the rows if fewer)")
    add("--repeat", type=int, default=1, metavar="N", help="how often a planted candidate is in the file")
    add("--template", metavar="TEXT", help=_TEMPLATE)
    add("--digits", type=int, metavar="N", help="digits of a secret (default: 6)")
    add("--json", action="store_true", help="print prepared.json")


def prepare(chosen: argparse.Namespace) -> None:
    """Prepare the folder, and print who gets which of its files."""
    files.head(chosen.data, (), "DATA")  # refuses what is no such file
    from dataclasses import asdict

    from attacks.extraction.exposure import DIGITS, USUAL, USUAL_CHAT, Template
    from attacks.prepared.folder import Wish
    from attacks.prepared.folder import prepare as made
    from secure_fed.config import DataConfig

    if chosen.canaries != "secrets" and (chosen.template is not None or chosen.digits is not None):
        raise ConfigError("--template and --digits are for --canaries secrets: leave them out")
    usual = USUAL_CHAT if chosen.task == "chat" else USUAL
    template = Template(
        usual if chosen.template is None else chosen.template, DIGITS if chosen.digits is None else chosen.digits
    )
    require_columns(chosen.task, chosen.text_b, chosen.label)
    data = DataConfig("", "of the user", "", chosen.task, chosen.text, chosen.text_b, chosen.label)
    manifest = made(Wish(chosen.data, data, chosen.canaries, chosen.count, chosen.repeat, template), chosen.out)
    if chosen.json:
        print(json.dumps(asdict(manifest)))
        return
    print(
        f"train on:   {chosen.out / 'train.jsonl'}, with any tool\n"
        f"publish:    {chosen.out / 'prepared.json'}, which fixes unseen who of {manifest.candidates} candidates trains\n"
        f"keep:       {chosen.out / 'candidates.jsonl'} and {chosen.out / 'private'}, for yourself until the audit\n"
        f"then audit: secure-fed audit prepared MODEL {shlex.quote(str(chosen.out))} --adapter ADAPTER"
    )


def run(chosen: argparse.Namespace) -> int:
    """Make the audit and print it; the exit status shows whether the bound is above the limit."""
    if chosen.exposure:
        refuse(chosen, "reference labels delta", "has no effect beside --exposure")
        return _exposure(chosen)
    refuse(chosen, "secrets_tried", "goes with --exposure")
    limit = limit_of(chosen.fail_above, "epsilon", "give epsilon= and a number from 0, such as epsilon=1", math.inf)
    from attacks.prepared import findings
    from attacks.prepared.folder import read

    delta = findings.DELTA if chosen.delta is None else chosen.delta
    if not 0 <= delta < 1:
        raise ConfigError(f"--delta is {delta:g}: give a number from 0 to below 1, such as 1e-5")
    manifest = read(chosen.prepared)
    subject = _opened(chosen, manifest)
    found = findings.audited(subject, chosen.prepared, manifest, delta, say)
    print(json.dumps(found)) if chosen.json else _show(found)
    if chosen.fail_above is not None and (found["epsilon_lower"] is None or found["epsilon_most"] <= limit):
        most = f"{found['candidates']} candidates cannot show an epsilon above {found['epsilon_most'] or 0.0:.2f}"
        return cannot_tell(f"{most}; prepare more with --count")
    least = found["epsilon_lower"] or 0.0
    return exit_status(least, limit, f"epsilon is at least {least:.2f}, above --fail-above epsilon={limit:g}")


def _exposure(chosen: argparse.Namespace) -> int:
    """Print the exposure of the planted secrets; the exit status shows whether the members' mean is above the limit."""
    give = "beside --exposure give exposure= and a number from 0, such as exposure=3"
    limit = limit_of(chosen.fail_above, "exposure", give, math.inf)
    tried = chosen.secrets_tried
    if tried is not None and tried < 1:
        raise ConfigError(f"--secrets-tried is {tried}; it must be at least 1, and 1000 to see ten bits")
    from attacks.prepared.findings import exposed, sentences, untold
    from attacks.prepared.folder import planted_in, read

    manifest = read(chosen.prepared)
    planted_in(chosen.prepared, manifest)
    subject = _opened(chosen, manifest)
    facts = exposed(subject, chosen.prepared, manifest, tried, say)
    print(json.dumps(facts) if chosen.json else "\n".join(sentences(facts)))
    if chosen.fail_above is not None and (why := untold(facts, limit)):
        return cannot_tell(why)
    mean = facts["members"]["mean"] or 0.0
    return exit_status(mean, limit, f"a mean exposure of {mean:.2f} is above --fail-above exposure={limit:g}")


def _opened(chosen: argparse.Namespace, manifest: Manifest) -> Any:
    from attacks.any_model.subject import opened
    from attacks.prepared.folder import CANDIDATES
    from secure_fed.config import DataConfig

    settings = chosen_settings(chosen, manifest.task)
    columns = manifest.text, manifest.text_b, manifest.label
    data = DataConfig("", "of the user", "", manifest.task, *columns, **settings)
    asked = Asked.of(chosen, chosen.prepared / CANDIDATES, None, data)
    return opened(replace(asked, classes=manifest.classes, scale_given=gives_scale(settings)))


def _show(found: dict[str, Any]) -> None:
    from attacks.report.phrases import ends
    from secure_fed.report.terminal import PlainConsole

    console, adapter = PlainConsole(), f" with {found['adapter']}" if found["adapter"] else ""
    least = found["epsilon_lower"]
    head = "nothing can be shown" if least is None else f"epsilon is at least {least:.2f} at delta {found['delta']:g}"
    console.print(f"{found['model']}{adapter}: {head}", style="bold")
    for sentence in found["sentences"]:
        console.print(sentence)
    console.print(
        f"{found['members']} of {found['candidates']} candidates were in the training; their {found['score']} separates them "
        f"from the others with an AUC of {found['auc']:.3f}{ends(found['auc_interval'])}; .500 is chance"
    )
    console.print("It assumes that")
    for one in found["assumes"]:
        console.print(f"- {one}")
