"""`secure-fed init`: four questions about a federation, and a configuration with a comment on each of its settings.

    data      which files there are; their columns are recognised
    protect   nobody, each text, each person with all their texts, or each party with all its texts
    parties   how many there are, or which column names a row's; not asked where each has a file of its own
    trust     the server, or nobody

The settings are those of docs/choosing.md. An answer may be given as an option; the others are asked for at a terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig, commented_toml
from secure_fed.errors import ConfigError, UsageError, plainly

UNITS = {"nobody": "none", "texts": "example", "persons": "person", "parties": "client"}
TRUSTED = ("server", "nobody")
_LABELS = ("label", "labels", "class", "category", "target", "intent", "topic", "diagnosis", "code", "y")
_PARTIES = (
    *("party", "client", "silo", "site", "hospital", "clinic", "practice", "ward", "department", "bank", "branch"),
    *("office", "organisation", "organization", "company", "school", "centre", "center", "location", "region"),
)
_PERSONS = ("person", "patient", "user", "customer", "member", "employee", "subject", "author")
_ANSWERS = ("data", "protect", "person", "parties", "label", "trust", "epsilon", "model")
_FEW = 50  # parties that all take part in every round
_ROWS, _CLASSES = 1000, 100  # of the first file are looked at; a column of more values is no label


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="the file to write (default: standard output)"
    )
    parser.add_argument("--all", action="store_true", help="no questions: every setting at its default, explained")
    files = "JSON Lines, CSV or Parquet files: one with all rows, or one for each party; builtin: made-up notes"
    parser.add_argument("--data", nargs="+", metavar="FILE", help=files)
    who = "whom privacy protects: nobody, texts, persons with all their texts, or parties; or a unit, as for train"
    whom = {unit: protected for protected, unit in UNITS.items()}
    protect = parser.add_argument("--protect", "--unit", metavar="WHOM", choices=tuple(UNITS), help=who)
    protect.type = lambda said: whom.get(said, said)
    parser.add_argument(
        "--person", metavar="COLUMN", help="column that says whose a row is (default: recognised by its name)"
    )
    parser.add_argument(
        "--parties", metavar="N_OR_COLUMN", help="how many parties share the rows, or the column that names them"
    )
    label = "column that the model learns to predict (default: recognised by its name, or by its few values)"
    parser.add_argument("--label", metavar="COLUMN", help=label)
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--trust", choices=TRUSTED, help="nobody: masks hide each party's update from the server")
    one_of.add_argument("--masks", action="store_const", dest="trust", const="nobody", help="as --trust nobody")
    parser.add_argument("--epsilon", type=float, metavar="E", help="the guarantee; smaller protects more (default: 8)")
    parser.add_argument("--model", metavar="NAME", help="a Hub id or a folder (default: one that suits the data)")


def run(chosen: argparse.Namespace) -> None:
    if chosen.file is not None:
        with plainly(ConfigError, f"{chosen.file} cannot be written", "name another file"):
            if chosen.file.exists():
                raise ConfigError(f"{chosen.file} exists already; name a file that does not")
    if chosen.all and (given := [name for name in _ANSWERS if getattr(chosen, name) is not None]):
        raise UsageError(f"--{given[0]} has no effect beside --all, which asks nothing: leave one of the two out")
    text = commented_toml() if chosen.all else "\n".join(lines(asked(chosen), chosen)) + "\n"
    RunConfig.from_dict(tomllib.loads(text))
    if chosen.file is None:
        print(text, end="")
        return
    from secure_fed.runs.durable import write_new

    write_new(chosen.file, text)
    print(chosen.file)


@dataclass(frozen=True)
class Answers:
    """What the settings follow from.

    files: none for the made-up notes. parties: their number, as far as it is known. party, person: columns, or "". units: how
    many texts, persons or parties privacy protects. text, label: columns of the rows, "" if they have the usual names.
    """

    files: Sequence[str]
    protect: str
    trust: str
    parties: int
    party: str
    person: str
    units: int
    task: str = "classification"
    columns: dict[str, str] = field(default_factory=dict)


def asked(chosen: argparse.Namespace) -> Answers:
    """The answers: those of the options, and the others from the terminal. ConfigError if there is none to ask at."""
    files = (
        chosen.data
        or _ask("--data", "Which files hold the texts? (several: one for each party; builtin: made-up notes)").split()
    )
    files = [] if files == ["builtin"] else files
    table = _columns(files) if files else {}
    protect = chosen.protect or _ask("--protect", f"Whom shall privacy protect? ({', '.join(UNITS)})", tuple(UNITS))
    person = ""
    if protect == "persons":
        if not table:
            raise ConfigError(
                "--protect persons needs a column that says whose a row is, and the made-up notes have none"
            )
        person = chosen.person or _recognised(_PERSONS, table)
        person = person or _ask("--person", f"Which column says whose a row is? ({', '.join(table)})", tuple(table))
        if person not in table:
            raise ConfigError(f"--person {person} is no column: there are {', '.join(table)}")
    if len(files) > 1:
        parties, party = len(files), ""
    else:
        hint = f", or the column that names them ({', '.join(table)})" if table else ", or site"
        how_many = f"How many parties share these rows ({_dealt(protect)}){hint}?"
        said = chosen.parties or _ask("--parties", how_many, default=_recognised(_PARTIES, table))
        parties, party = (int(said), "") if said.isdigit() else (0, said)
        if party and party not in (table or ("site",)):
            raise ConfigError(
                f"--parties {party} is neither a number nor a column: there are {', '.join(table) or 'site'}"
            )
        if party:
            parties = len(set(table[party])) if table else 40
    task, columns = _task(table, (party, person), chosen.label) if files else ("classification", {})
    trust = chosen.trust or _ask(
        "--trust", "Whom do the parties trust with each other's updates? (server, nobody)", TRUSTED
    )
    of_each = len(set(table.get(person, ()))) or (len(next(iter(table.values()))) if table else 20_000)
    units = parties if protect == "parties" else of_each * max(1, len(files))
    return Answers(files, protect, trust, parties, party, person, units, task, columns)


def _ask(option: str, question: str, choices: Sequence[str] = (), default: str = "") -> str:
    if not sys.stdin.isatty():
        if default:
            return default
        raise ConfigError(f"{option} is not given, and there is no terminal to ask at. {question}").about(
            option, None, "given"
        )
    while True:
        print(f"{question}{f' [{default}]' if default else ''} ", end="", file=sys.stderr, flush=True)
        said = (sys.stdin.readline() or sys.exit(2)).strip() or default
        if said and (not choices or said in choices):
            return said


def _columns(files: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The columns of the first file, with their cells."""
    from secure_fed.learning.data import files as reading

    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"--data {file} is no file").about("--data", file, "a file that is there")
    first = Path(files[0])
    return dict(reading.read(first, reading.head(first, (), "--data").present, "--data").columns)


def _task(table: dict[str, Sequence[Any]], others: Sequence[str], label: str | None) -> tuple[str, dict[str, str]]:
    """The task of the rows, and the settings of their columns where these have not the usual names. others: no labels."""
    if {"messages", "conversations", "instruction"} & table.keys():
        return "chat", {}
    texts = {name: [str(cell) for cell in cells[:_ROWS]] for name, cells in table.items() if name not in others}
    text = "text" if "text" in texts else max(texts, key=lambda name: statistics.fmean(map(len, texts[name])))
    known = label or _recognised(_LABELS, table)
    if not known:
        most = max(2, min(_CLASSES, len(texts[text]) // 5))
        few = [name for name, cells in texts.items() if name != text and 2 <= len(set(cells)) <= most]
        asked = f"Which column shall the model predict? ({', '.join(few)})"
        known = few[0] if len(few) == 1 else _ask("--label", asked, few) if few else ""
    if known and known not in table:
        raise ConfigError(f"--label {known} is no column: there are {', '.join(table)}")
    if not known:
        return "causal_lm", {"text": text} if text != "text" else {}
    return "classification", {key: name for key, name in (("text", text), ("label", known)) if key != name}


def _dealt(protect: str) -> str:
    """How rows reach parties that no column names."""
    return f"dealt out at random{', those of a person together' if protect == 'persons' else ''}"


def _recognised(usual: Sequence[str], present: Any) -> str:
    """The column whose name is one of the usual ones; "" if none is."""
    return next((name for known in usual for name in present if name.lower() in (known, f"{known}_id")), "")


def lines(found: Answers, chosen: argparse.Namespace) -> Iterator[str]:
    """The configuration: at most 25 lines."""
    from secure_fed.learning.models.locate import CHAT, ENCODER

    private, own = found.protect != "nobody", chosen.model
    name = chosen.file or "run.toml"
    yield f"# secure-fed train {shlex.quote(str(name))}    trains; with --dry-run it says what that needs and guarantees"
    yield "[model]"
    if own or not found.files:
        yield f"name = {json.dumps(own or 'builtin/tiny')}"
    elif found.task == "classification":
        yield f'name = "{ENCODER}"  # any encoder of the Hugging Face Hub, or a folder'
        yield 'pooling = "mean"  # the classification layer reads the mean over tokens, for which this encoder is made'
    else:
        yield f'name = "{CHAT}"  # any language model of the Hugging Face Hub, or a folder'
    if not found.files and found.parties > 1000:
        yield "[data]"
        yield f"examples = {5 * found.parties}  # made-up notes, five for each party"
    if found.files:
        yield "[data]"
        yield f"train = {json.dumps(found.files[0] if len(found.files) == 1 else list(found.files))}"
        if found.task != "classification":
            yield f'task = "{found.task}"'
        for key, column in found.columns.items():
            yield f"{key} = {json.dumps(column)}  # recognised in the file: correct it if another column has the {key}"
        held_out = {"nobody": "rows"}.get(found.protect, found.protect)
        yield f"test_fraction = 0.2  # of the {held_out} are held out to measure; or name a file: test = ..."
    if found.party:
        yield f"client = {json.dumps(found.party)}  # names the party of each row"
    yield "[federation]"
    if found.parties and not found.party and len(found.files) < 2:
        yield f"clients = {found.parties}  # parties, simulated on this machine; the rows are {_dealt(found.protect)}"
    if found.protect == "parties" and found.parties > _FEW:
        yield f"cohort = {max(10, found.parties // 20)}  # parties in a round: with 20 rounds each takes part about once"
    elif 10 < found.parties <= _FEW:
        yield f"cohort = {found.parties}  # all take part in every round"
    yield "rounds = 20"
    yield "[method]"
    if private:
        yield 'name = "auto"  # chosen for the noise by unit, masks, task and model: the run says what, and why'
    else:
        yield 'name = "fedlora"  # LoRA, whose factors the server averages'
    if private:
        yield "[privacy]"
        yield f'unit = "{UNITS[found.protect]}"  # protects {_MEANS[found.protect]}'
        if found.person:
            yield f"person_column = {json.dumps(found.person)}  # says whose a row is; at most 8 rows of each are used"
        yield f"epsilon = {8.0 if chosen.epsilon is None else chosen.epsilon:g}  # smaller protects more and costs accuracy"
        delta = min(1e-5, 10.0 ** -math.ceil(math.log10(10 * max(1, found.units))))
        yield f"delta = {delta:g}  # the probability that it fails: well below one over {found.units:,} {found.protect}"
        if found.protect == "parties" and found.trust == "nobody":
            yield 'noise = "distributed"  # each party adds a share of the noise before its mask'
    if found.trust == "nobody":
        yield "[secure_aggregation]"
        yield "enabled = true  # masks: the server learns sums of updates, and no single update"


_MEANS = {
    "texts": "each text alone, not a person with several",
    "persons": "each person with all their texts at one party",
    "parties": "each party with all its texts",
}
