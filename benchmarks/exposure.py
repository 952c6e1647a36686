"""The exposure of planted secrets in a federation's language model, by round and by client, with and without privacy.

    python benchmarks/exposure.py FOLDER [--seeds 3] [--quick] [--out exposure.jsonl]
    python benchmarks/exposure.py --docs docs                                      table and picture, from stored runs

FOLDER: train.jsonl.gz (or .jsonl) of `text` and `book`. Half of the books count as public: a byte-pair tokenizer and a GPT-2 of
two layers are trained on them. Each of four clients has 50 passages of the other books and four canaries, sentences with a name
and a random number of two digits. A canary occurs once in the data of the first client, and 4, 8 and 16 times in the others'.
The clients train FedLoRA: without privacy, and by DP-SGD at the clients with privacy for an example, at epsilon 8 and at 1.
Exposures are exact, over all 100 numbers (attacks/extraction/exposure.py); a number outside the training has 1.44 bits on
average.

Noise comes from the operating system; seeds decide the passages, the canaries and the start. Settings were chosen on the run of
seed 0 without privacy. Every finished run is one line of --out, by default exposure.jsonl beside this file, and is not run
again. With --quick, give another --out.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exposure_report import drawn, table
from runs_file import fill, keep, lines, put_picture
from timing import machine

from attacks.extraction.exposure import Planted, Template, exposures
from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig
from secure_fed.learning import tasks
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.evaluation import evaluate

EPSILONS: tuple[float | None, ...] = (None, 8.0, 1.0)
REPEATS = (1, 4, 8, 16)  # copies of each canary, by client
CANARIES, PASSAGES, LENGTH = 4, 50, 32  # a client's; tokens of a passage
ROUNDS, EVERY = 9, 3
TEMPLATE = Template("The number of {name} is {secret}.", 2)
END = "<end>"
STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "extraction.md"
Run = dict[str, Any]


def passages(folder: Path) -> dict[str, list[str]]:
    """Pieces of about 32 tokens, by book."""
    packed = folder / "train.jsonl.gz"
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / "train.jsonl").read_bytes()
    found: dict[str, list[str]] = {}
    for row in map(json.loads, content.decode().splitlines()):
        words = row["text"].split()
        found.setdefault(str(row["book"]), []).extend(
            " ".join(words[at : at + 25]) for at in range(0, len(words) - 25, 25)
        )
    return found


def tokenizer_of(texts: Sequence[str]) -> Any:
    """Byte pairs of these texts; every digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), letters])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


@functools.cache
def public(folder: Path, steps: int, width: int = 64, layers: int = 2) -> tuple[Any, Any, tuple[str, ...]]:
    """The tokenizer, the model trained on half of the books and on sentences like canaries, and passages of the other books."""
    from transformers import GPT2Config, GPT2LMHeadModel

    books = passages(folder)
    names = sorted(books)
    rng = np.random.default_rng(0)
    read = [text for name in names[::2] for text in books[name]]
    tokenizer = tokenizer_of(read[:5000])
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": width, "n_layer": layers, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        some = [read[index] for index in rng.integers(len(read), size=30)]
        some += [
            f"The number of {read[index][:6]} is {rng.integers(100):02d}." for index in rng.integers(len(read), size=2)
        ]
        batch = tokenizer(some, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"public model, step {step + 1} of {steps}: loss {loss.item():.2f}", file=sys.stderr, flush=True)
    return tokenizer, model.eval(), tuple(text for name in names[1::2] for text in books[name])


def config(epsilon: float | None, seed: int, rounds: int) -> RunConfig:
    private: dict[str, Any] = {}
    if epsilon:
        private = {"privacy": {"unit": "example", "epsilon": epsilon, "delta": 1e-5, "clip_norm": 1.0}}
    return RunConfig.from_dict(
        {
            "federation": {"rounds": rounds, "seed": seed},
            "method": {"name": "fedlora", "rank": 16, "target_modules": ["c_attn", "c_fc", "c_proj"]},
            "training": {"lr": 5e-3, "lr_schedule": "constant", "epochs": 4, "batch_size": 10},
            "evaluation": {"every": EVERY, **({"dummies": 0} if epsilon else {"audit_fraction": 0.0})},
            **private,
        }
    )


class Watch:
    """Ranks the canaries in the global model of some rounds."""

    def __init__(self, tokenizer: Any, planted: Sequence[Planted], start: Any, perplexity: float) -> None:
        self.tokenizer, self.planted = tokenizer, planted
        self.federation: Federation | None = None
        self.rounds = [{"round": 0, "perplexity": perplexity, "exposures": self.ranked(start)}]

    def ranked(self, model: Any) -> list[float]:
        return [one.exposure for one in exposures(model, self.tokenizer, TEMPLATE, self.planted)]

    def on_round_end(self, record: Any, state: Any) -> None:
        if "perplexity" in record and self.federation is not None:
            model = self.federation.load(state).eval()
            line = {"round": record["round"], "perplexity": record["perplexity"], "exposures": self.ranked(model)}
            self.rounds.append(line)


def one_run(folder: Path, epsilon: float | None, seed: int, rounds: int, steps: int) -> Run:
    from privacy.entropy import SeededEntropy

    tokenizer, model, texts = public(folder, steps)
    task = tasks.build(DataConfig(task="causal_lm"))
    order = np.random.default_rng(seed).permutation(len(texts))
    planted = TEMPLATE.drawn(CANARIES * len(REPEATS), SeededEntropy(seed).stream("canaries"))

    def encoded(some: Sequence[str]) -> Any:
        return task.encode(tokenizer, Rows(tuple(some), (None,) * len(some), ()), LENGTH)

    clients = []
    for client, repeat in enumerate(REPEATS):
        own = [texts[int(index)] for index in order[client * PASSAGES : (client + 1) * PASSAGES]]
        canaries = planted[client * CANARIES : (client + 1) * CANARIES]
        clients.append(encoded([*own, *(TEMPLATE.written(one) for one in canaries for _ in range(repeat))]))
    test = encoded([texts[int(index)] for index in order[-300:]])
    measured = evaluate(model, test, task.collate(tokenizer), task.metrics(()), 64, torch.device("cpu"))
    watch = Watch(tokenizer, planted, model, measured["perplexity"])
    federation = Federation(
        config(epsilon, seed, rounds),
        model=copy.deepcopy(model),
        train=clients,
        test=test,
        collate=task.collate(tokenizer),
        loss=task.loss(()),
        metrics=task.metrics(()),
        callbacks=[watch],
    )
    watch.federation = federation
    result = federation.run().summary
    return {"epsilon": result["epsilon"], "rounds": watch.rounds}


def finished(out: Path) -> dict[tuple[float | None, int], Run]:
    """The runs in the file, by epsilon and seed."""
    return {(run["target"], run["seed"]): run for run in lines(out)}


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"exposure": table(list(finished(out).values()), REPEATS, CANARIES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="three rounds on a model that has hardly read anything")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument("--docs", type=Path, help="write exposure.png there, and the table into extraction.md")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    rounds, steps = (EVERY, 20) if given.quick else (ROUNDS, 600)
    for seed in range(given.seeds) if given.folder else ():
        for epsilon in EPSILONS:
            if (epsilon, seed) in finished(given.out):
                continue
            started = time.perf_counter()
            line = one_run(given.folder, epsilon, seed, rounds, steps)
            line |= {"target": epsilon, "seed": seed, "seconds": time.perf_counter() - started}
            keep(given.out, line)
            mean = statistics.mean(line["rounds"][-1]["exposures"])
            print(epsilon, seed, f"{mean:.2f} bits in {line['seconds']:.0f} s", file=sys.stderr, flush=True)
    runs = list(finished(given.out).values())
    made = tables(given.out)
    print(machine("torch"), *made.values(), sep="\n\n")
    if given.docs:
        fill(given.docs / PAGE, made)
        put_picture(given.docs / "exposure.png", drawn(runs, REPEATS, CANARIES))


if __name__ == "__main__":
    main()
