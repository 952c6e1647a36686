"""Data files for trying a federation on many machines: the built-in notes, a part for each member, and a test set.

python examples/deployment/notes.py DIR [MEMBERS]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from secure_fed.learning.data import notes
from secure_fed.learning.data.rows import Rows

EACH, TEST = 600, 500


def main() -> None:
    folder, members = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    folder.mkdir(parents=True, exist_ok=True)
    rows = notes.generate(EACH * members, seed=0, split="train")
    for member in range(members):
        write(folder / f"notes-{member + 1}.jsonl", rows, range(member, len(rows), members))
    test = notes.generate(TEST, seed=0, split="test")
    write(folder / "test.jsonl", test, range(len(test)))


def write(path: Path, rows: Rows, which: Iterable[int]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for index in which:
            row = {"text": rows.text[index], "label": rows.label_names[rows.label[index]]}
            file.write(json.dumps(row) + "\n")
    print(path)


if __name__ == "__main__":
    main()
