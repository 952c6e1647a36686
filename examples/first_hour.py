"""Run the commands in a Markdown document and insert their output below them.

    python examples/first_hour.py docs/first_hour.md [--check]

A block of commands begins with ```console, and a command with "$ ". Commands run one after the other in a new folder with this
checkout's examples/; the shell executes `| tail -3` and the like. With --check the document is not changed, and the exit status
shows whether every command still works.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)  # a backslash continues on the next line
WIDTH = 100


def commands(block: str) -> list[str]:
    return COMMAND.findall(block)


def run(command: str, folder: Path) -> str:
    """The output of the command, both streams together. SystemExit with the output if it fails."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"$ {command}\n{done.stdout}\nended with exit status {done.returncode}")
    return done.stdout.replace(str(folder), "/home/you").rstrip()


def replayed(block: str, folder: Path) -> str:
    shown = []
    for command in commands(block):
        print(f"$ {command}", file=sys.stderr, flush=True)
        shown.append("\n".join(part for part in (f"$ {command}", run(command, folder)) if part))
    return "```console\n" + "\n".join(shown) + "\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        text = BLOCK.sub(lambda found: replayed(found[1], Path(folder)), given.document.read_text(encoding="utf-8"))
    if not given.check:
        given.document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
