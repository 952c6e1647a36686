"""What `mkdocs build` makes of this folder besides its pages: the reference pages, from the code, and links that stay inside.

mkdocs.yml names this file as a hook. A page of settings comes from the dataclasses of `secure_fed.config`, one of commands from
their `--help`, one of `result.json` from its schema. Links to files outside of this folder become paths, since a site holds no
source. A page of results keeps its tables, for those who read the folder itself; a strict build fails if the stored runs in
`benchmarks/` give other tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
# Scripts whose tables follow from stored runs alone. Those of planner_check.py and planner_methods.py also follow from the
# planner, which computes for minutes.
MADE_BY = (
    *("claims", "decoder_rates", "exposure", "federated_rates", "language_model", "language_models", "learns"),
    *("lying_servers", "private_clients", "private_notes", "private_silos", "quantised_perplexity", "recipes"),
    *("short_rates", "starts"),
)
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+(?!decisions)[^)\s#]*)(?:#[^)]*)?\)")


def on_pre_build(config: Any) -> None:
    """Log an error, which a strict build does not survive, for each table that differs from the one of the stored runs."""
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    from runs_file import stale

    for name in MADE_BY:
        for sentence in stale(DOCS, importlib.import_module(name)):
            logging.getLogger("mkdocs.hooks").error(sentence)


def on_files(files: Files, config: Any) -> Files:
    for name, text in (("settings.md", settings()), ("commands.md", commands()), ("result.md", result())):
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page, which begins with who should read it, with links that leave the folder replaced by the paths that they name."""
    here = (DOCS / page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / link[2]))
        if target.is_relative_to(DOCS):
            return link[0]
        path = target.relative_to(DOCS.parent).as_posix()
        return f"`{path}`" if path in link[1] or link[1].strip("`") == path else f"{link[1]} (`{path}`)"

    text = _OUTSIDE.sub(inside, markdown)
    whom = "" if re.match(r"# .*\n\nFor ", text) else "For those who change the code.\n\n"  # a decision
    return text.replace("\n\n", f"\n\n{whom}", 1)


def settings() -> str:
    """Every setting with its meaning, its default and its limits."""
    from secure_fed.config.setting import limits_in_words
    from secure_fed.config.settings import sections

    parts = [
        "# Settings",
        "For readers who look up a setting. A configuration is a TOML file; `secure-fed init` writes a short one, `secure-fed "
        "config init --all` one with every setting, and `--set section.key=value` changes one.",
    ]
    for name, section in sections().items():
        about = (section.__doc__ or "").partition(": ")[2].strip()
        about = about[:1].upper() + about[1:]
        rows = [
            f"| `{one.name}` | {_cell(one.metadata['doc'] + limits_in_words(one))} | {_default(one)} |"
            for one in dataclasses.fields(section)
        ]
        parts += [f"## [{name}]", about, "\n".join(["| setting | meaning | default |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """The `--help` of every command."""
    os.environ["COLUMNS"] = "100"
    from secure_fed.commands.cli import parser

    parts = ["# Commands", "For readers who look up a command. The text is that of `secure-fed COMMAND --help`."]
    for name, one in _parsers(parser()):
        parts += [f"## {name}", f"```text\n{one.format_help().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _parsers(one: argparse.ArgumentParser, name: str = "secure-fed") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    nested = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, one
    for action in nested:
        for word, below in action.choices.items():
            yield from _parsers(below, f"{name} {word}")


def result() -> str:
    """The fields of `result.json`, by its schema."""
    schema = json.loads((DOCS / "result.schema.json").read_text(encoding="utf-8"))
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in _fields(schema["properties"])]
    head = ["# result.json", "For programs that read a run's result. " + schema["description"], ""]
    return "\n".join([*head, "| field | meaning |", "|---|---|", *rows]) + "\n"


def _fields(properties: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for name, one in properties.items():
        yield within + name, one.get("description", "")
        for kind in (one, *one.get("anyOf", ()), *one.get("oneOf", ())):
            yield from _fields(kind.get("properties", {}), f"{within}{name}.")


def _default(setting: Any) -> str:
    return "not set" if setting.default is None else f"`{json.dumps(setting.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
