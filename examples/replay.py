"""Run the commands in a Markdown page one after the other, as a reader types them.

    python examples/replay.py docs/first_hour.md [--in FOLDER] [--write]

A block of commands begins with ```console, and a command with "$ ". They run in FOLDER, by default a new one that is deleted
afterwards, beside a copy of this checkout's examples/; the shell executes `| tail -3` and the like. A failing command ends it.
With --write the page gets every command's output below it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)  # a backslash continues on the next line
WIDTH = 100


def run(command: str, folder: Path) -> str:
    """The command's output, both streams together, which is printed as it comes. SystemExit if the command fails."""
    print(f"\n$ {command}", flush=True)
    environment = {
        **os.environ,
        "COLUMNS": str(WIDTH),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    shell, joined = ["bash", "-o", "pipefail", "-c", command], subprocess.STDOUT
    with subprocess.Popen(
        shell, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=joined, text=True
    ) as started:
        assert started.stdout is not None
        said = []
        for line in started.stdout:
            print(line, end="", flush=True)
            said.append(line)
    if started.returncode:
        sys.exit(f"{command}\nended with exit status {started.returncode}")
    return "".join(said).replace(str(folder), "/home/you").rstrip()


def replayed(block: str, folder: Path) -> str:
    shown = [
        "\n".join(part for part in (f"$ {command}", run(command, folder)) if part) for command in COMMAND.findall(block)
    ]
    return "```console\n" + "\n".join(shown) + "\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--in", type=Path, dest="folder")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    page, started = given.page.resolve(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="replay-") as new:
        folder = (given.folder or Path(new)).resolve()
        shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
        text = BLOCK.sub(lambda found: replayed(found[1], folder), page.read_text(encoding="utf-8"))
    if given.write:
        page.write_text(text, encoding="utf-8")
    print(f"\nThe commands of {given.page} took {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
