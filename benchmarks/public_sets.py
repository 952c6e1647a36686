"""Two public data sets as their authors publish them, turned into folders that the other benchmarks read.

    python benchmarks/public_sets.py trec FOLDER DATA        questions of six kinds: DATA/trec
    python benchmarks/public_sets.py sib5 FOLDER DATA        sentences of seven topics in five languages: DATA/sib5

FOLDER contains the published files: for TREC (Li and Roth, https://cogcomp.seas.upenn.edu/Data/QA/QC) train_5500.label and
TREC_10.label; for SIB-200 (Adelani et al., https://github.com/dadelani/sib-200, data/annotated) a folder for each language with
train.tsv and test.tsv. DATA then contains train.jsonl.gz and test.jsonl.gz, with `text`, `label`, and `language` for SIB-200.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
KINDS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")  # TREC's coarse classes
TREC = {"train": "train_5500.label", "test": "TREC_10.label"}
LANGUAGES = ("deu_Latn", "eng_Latn", "fra_Latn", "rus_Cyrl", "spa_Latn")  # those of the paper of C2A


def questions(folder: Path, split: str) -> Rows:
    """TREC's lines, such as "DESC:manner How did it end ?"; the label is the class before the colon."""
    found = []
    for line in (
        (folder / TREC[split]).read_text(encoding="latin-1").rstrip("\n").split("\n")
    ):  # splitlines would split at 0x85
        label, text = line.split(" ", 1)
        found.append({"text": text.strip(), "label": KINDS.index(label.split(":")[0])})
    return found


def topics(folder: Path, split: str) -> Rows:
    """SIB-200's sentences in `LANGUAGES`; a topic's number is its place among the sorted topics."""
    found: Rows = []
    for language in LANGUAGES:
        with (folder / language / f"{split}.tsv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        names = sorted({row["category"] for row in rows})
        found += [
            {"text": row["text"].strip(), "label": names.index(row["category"]), "language": language} for row in rows
        ]
    return found


SETS: dict[str, Callable[[Path, str], Rows]] = {"trec": questions, "sib5": topics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SETS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    given = parser.parse_args()
    (given.data / given.name).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = SETS[given.name](given.folder, split)
        with gzip.open(given.data / given.name / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{given.name}, {split}: {len(rows):,} rows")


if __name__ == "__main__":
    main()
