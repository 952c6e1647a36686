"""The files of a model's audit: an HTML page, the audit as JSON, and every text's scores; only their owner can read them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from attacks.any_model.audit import Audit
from attacks.any_model.page import page
from secure_fed.runs.durable import atomic_write

PAGE, AUDIT, SCORES = "audit.html", "audit.json", "scores.csv"


def written(audit: Audit, folder: Path, *, show_texts: bool = False) -> Path:
    """Write the three files into an existing folder, each atomically; returns the path of the page."""
    atomic_write(folder / SCORES, as_csv(audit), private=True)
    atomic_write(folder / AUDIT, json.dumps(audit.to_dict(), indent=1) + "\n", private=True)
    atomic_write(folder / PAGE, page(audit, show_texts=show_texts), private=True)
    return folder / PAGE


def as_csv(audit: Audit) -> str:
    """A line for each text: its row in its file from 0, copies counted, whether it is a member, and its scores."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["row", "member", *audit.scores])
    subject = audit.subject
    for index, (row, *values) in enumerate(zip(subject.places, *audit.scores.values(), strict=True)):
        writer.writerow([row, int(index < subject.texts.members), *map(float, values)])
    return file.getvalue()
