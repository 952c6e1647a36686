"""From eight clinics' conversations to a private chat model: every command, one after the other, in one folder.

    python run.py FOLDER [--set section.key=value ...]

`make chat` runs it. The commands are printed as you would type them in FOLDER; settings go to `secure-fed train`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = (
    "python clinics.py write .",
    "python smollm2.py smollm2",
    "python ask.py smollm2 questions.jsonl before.jsonl",
    "python clinics.py check test.jsonl before.jsonl",
    "secure-fed train chat.toml --out run",
    "secure-fed audit run",
    "secure-fed export run adapter",
    "secure-fed export run merged --merged",
    "python ask.py merged questions.jsonl after.jsonl",
    "python clinics.py check test.jsonl after.jsonl",
    "echo 'I have a rash; it is mild.' | secure-fed predict run",
)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    folder, settings, started = Path(sys.argv[1]), " ".join(sys.argv[2:]), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command in COMMANDS:
        print(f"\n$ {command}", flush=True)
        typed = command.replace("chat.toml", f"{HERE / 'chat.toml'} {settings}")
        for name in ("clinics", "smollm2", "ask"):
            typed = typed.replace(f"{name}.py", str(HERE / f"{name}.py"))
        done = subprocess.run(typed, shell=True, cwd=folder, env=os.environ | {"PATH": path})
        if done.returncode:
            raise SystemExit(f"{command} ended with exit status {done.returncode}")
    minutes = (time.monotonic() - started) / 60
    print(
        f"\nAll of it took {minutes:.1f} minutes. The reports are {folder}/run/report.html and {folder}/run/audit.html"
    )


if __name__ == "__main__":
    main()
