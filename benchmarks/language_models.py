"""What a chat model learns from eight silos or from thousands of clients, with and without privacy, and what it gives away.

    python benchmarks/language_models.py MODEL GSM8K [--only silos] [--data dialogues] [--methods fedlora] [--epsilons inf 8]
    python benchmarks/language_models.py MODEL GSM8K --list                          the runs, and which are stored
    python benchmarks/language_models.py --docs docs                                 the page, from stored runs

MODEL: the folder of a chat model, such as SmolLM2-135M-Instruct (`examples/chat/smollm2.py`). GSM8K: a folder with
train.jsonl.gz and test.jsonl.gz of `text` and `answer`. The dialogues are those of `examples/chat/clinics.py`.

    pooled    no federation: one party has everybody's conversations, and trains LoRA
    alone     no federation: one silo of eight trains LoRA on its own conversations
    silos     eight silos take part in every round; privacy protects a conversation, with noise in every step
    clients   thousands of clients with a conversation each, drawn at random in every round; privacy protects a client
    noise     as `clients`, but the noise alone: nothing is trained

LoRA has rank 8 and is on all linear layers. The first three train on 512 dialogues, drawn from 1,600 with repetition, or on
256 of 800 rows of gsm8k: without privacy in steps of 8, or of 16 (2 of each silo) in a federation, by AdamW at the method's
default rate; under privacy in 8 steps of 64, or 4, by plain gradient descent with momentum .5 at the server, since AdamW
divides each number by a size that is mostly noise. Its rates are the best of `RATES` after 4 steps at epsilon 8 (`--only
search`, on other dialogues; charged to no epsilon). A client trains one step on its conversation, with the same optimiser and
rate.

Loss is the mean over the answers' tokens, over 96 test rows, with a 95 % interval over those rows (bootstrap). Right answers:
the most likely answer to the first question of these rows, by the dialogues' own rule; or of 200 rows of gsm8k, its number
after #### (exact match). Membership: how much the loss of each of 96 trained rows fell, against that of the test rows.
Canaries are conversations about a made-up person's two digits: four occur once, and four eight times. An exposure is among 33
numbers, and a number outside the training has 1.44 bits on average. Peak memory and seconds of computing are those of the
run's own process, all its threads together. Noise comes from the operating system. Every finished run is a line of
language_models.jsonl beside this file and is not run again.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "chat"))

import clinics
import numpy as np
from language_models_page import page
from runs_file import fill, keep, lines
from timing import machine

STORED, PAGE = Path(__file__).with_suffix(".jsonl"), "language_models.md"
HOWS = ("search", "pooled", "alone", "silos", "noise", "clients")
DATA, METHODS, EPSILONS = ("dialogues", "gsm8k"), ("fedlora", "ffa_lora", "federa", "fra_lora"), (math.inf, 8.0, 3.0)
SILOS, BATCH = 8, 8
EACH, ROUNDS, LONGEST = ({"dialogues": one, "gsm8k": two} for one, two in ((200, 100), (8, 4), (112, 144)))
RATES = (0.3, 1.0, 3.0)
POPULATION, COHORTS, OF_CLIENTS = 3000, (50, 100, 200), (8.0, 3.0, 1.0)
TESTED, DELTA = 96, 1e-5
ASKED, ASKED_BELOW = 200, 160  # rows of gsm8k whose answers are checked, and their tokens
ONCE, OFTEN, TIMES = 4, 4, 8  # canaries that occur once, canaries that occur `TIMES` times
NUMBER = re.compile(r"#### *(-?[\d,.]*\d)")  # the answer of a row of gsm8k
SECRETS = 32  # other secrets that a canary is compared with
WORDS = {"dialogues": 24, "gsm8k": 100}  # tokens of an answer
Figures = dict[str, Any]


class Cell(NamedTuple):
    data: str
    how: str
    method: str
    epsilon: float
    cohort: int
    seed: int = 0
    rate: float = 0.0  # of the search

    @property
    def named(self) -> dict[str, Any]:
        """The fields as JSON has them, without infinity."""
        return self._asdict() | {"epsilon": str(self.epsilon)}


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    """The chosen runs, in the order in which they are made."""
    if "search" in given.only:
        for method, rate in itertools.product(METHODS, RATES):
            yield Cell("dialogues", "search", method, 8.0, SILOS, -1, rate)
    for seed, data in itertools.product(range(given.seeds), given.data):
        if "pooled" in given.only:
            yield Cell(data, "pooled", "fedlora", math.inf, 1, seed)
        if "alone" in given.only:
            yield Cell(data, "alone", "fedlora", math.inf, 1, seed)
        if "silos" in given.only:
            for epsilon, method in itertools.product(EPSILONS, METHODS):
                yield Cell(data, "silos", method, epsilon, SILOS, seed)
    for seed, how in itertools.product(range(given.seeds), ("noise", "clients")):
        if how in given.only:
            for cohort, method, epsilon in itertools.product(COHORTS, METHODS, (math.inf, *OF_CLIENTS)):
                if how == "clients" or math.isfinite(epsilon):
                    yield Cell("dialogues", how, method, epsilon, cohort, seed)


class Rows(NamedTuple):
    """Conversations: of one party each, of nobody's training, those that are asked, and the planted ones."""

    train: list[dict[str, Any]]
    test: list[dict[str, Any]]
    asked: list[dict[str, Any]]
    planted: list[Any]  # attacks.extraction.exposure.Planted


def gsm8k(place: Path, split: str, tokenizer: Any, below: int, some: int, rng: np.random.Generator) -> list[Figures]:
    """Conversations of so many of its rows, at random among those of fewer tokens than `below`."""
    texts = gzip.decompress((place / f"{split}.jsonl.gz").read_bytes()).splitlines()  # of bytes: U+2028 ends no line
    found = []
    for row in map(json.loads, texts):
        turns = [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["answer"]}]
        if len(tokenizer.apply_chat_template(turns, return_dict=False)) < below:
            found.append({"messages": turns})
    if len(found) < some:
        raise SystemExit(f"{place} has {len(found)} rows of fewer than {below} tokens in {split}: {some} are needed")
    return [found[at] for at in rng.permutation(len(found))[:some]]


def conversations(cell: Cell, gsm: Path, tokenizer: Any) -> Rows:
    """The rows of a cell; the seed decides which, and whose they are."""
    from attacks.extraction.exposure import USUAL_CHAT, Template
    from privacy.entropy import SeededEntropy

    template = Template(USUAL_CHAT, 2)
    planted = template.drawn(ONCE + OFTEN, SeededEntropy(cell.seed + 1).stream("canaries"))
    count = POPULATION if cell.how in ("clients", "noise") else SILOS * EACH[cell.data]
    if cell.data == "dialogues":
        found = list(itertools.islice(clinics.conversations(cell.seed + 1), count + TESTED))
        train, test, asked = found[:count], found[count:], found[count:]
    else:
        rng, longest = np.random.default_rng(cell.seed + 1), LONGEST["gsm8k"]
        train = gsm8k(gsm, "train", tokenizer, longest, count, rng)
        test = gsm8k(gsm, "test", tokenizer, longest, TESTED, rng)
        asked = gsm8k(gsm, "test", tokenizer, ASKED_BELOW, ASKED, rng)
    parties = count if cell.how in ("clients", "noise") else 1 if cell.how == "pooled" else SILOS
    owned = [row | {"party": f"party {at % parties}"} for at, row in enumerate(train)]
    for at, one in enumerate(planted):
        question, answer = template.turns(one)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        party = f"canary {at}" if parties == count else f"party {at % parties}"
        owned += [{"messages": messages, "party": party}] * (TIMES if at >= ONCE else 1)
    if cell.how == "alone":
        owned = [row for row in owned if row["party"] == "party 0"]
    return Rows(owned, test, asked, planted)


def best_rate(method: str, found: Sequence[Figures]) -> float:
    """The rate of the search after which the loss is least."""
    searched = [line for line in found if line["how"] == "search" and line["method"] == method]
    if not searched:
        raise SystemExit(f"no rate of {method} was searched: run --only search first")
    return float(min(searched, key=lambda line: sum(line["after"]))["rate"])


def settings(cell: Cell, model: str, rows: Rows, folder: Path, rate: float) -> dict[str, Any]:
    """The configuration of a cell, whose data are written into the folder."""
    for name, some in (("train", rows.train), ("test", rows.test)):
        columns = ("messages", "party") if name == "train" else ("messages",)
        text = "".join(json.dumps({column: row[column] for column in columns}) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    method: dict[str, Any] = {"name": cell.method, "target_modules": "all-linear"}
    if cell.method == "federa":
        method["rule"] = "ffa_lora"
    of_clients, private = cell.how in ("clients", "noise"), math.isfinite(cell.epsilon)
    training: dict[str, Any] = {"steps": 8, "batch_size": BATCH} if cell.cohort == 1 else {"steps": 4, "batch_size": 2}
    federation: dict[str, Any] = {"rounds": ROUNDS[cell.data], "cohort": cell.cohort, "seed": max(0, cell.seed)}
    if cell.how == "search":
        federation["rounds"] //= 2
    if private or of_clients:
        training = {"steps": 1, "batch_size": 1 if of_clients else BATCH, "optimizer": "sgd", "lr": rate}
        federation |= {"server_optimizer": "momentum", "server_momentum": 0.5}
    found: dict[str, Any] = {
        "model": {"name": model, "max_length": LONGEST[cell.data]},
        "data": {
            "task": "chat",
            "train": str(folder / "train.jsonl"),
            "test": str(folder / "test.jsonl"),
            "client": "party",
        },
        "federation": federation,
        "method": method,
        "training": training,
        "evaluation": {"every": 8, "audit_fraction": 0.0},  # the last round is measured, as always
    }
    if private:
        unit = "client" if of_clients else "example"
        found["privacy"] = {"unit": unit, "epsilon": cell.epsilon, "delta": DELTA, "even_if_hopeless": True}
        found["evaluation"] = {"every": 8, "dummies": 0}
    return found


class Noised(Exception):  # noqa: N818 - it ends a run whose noise is all that is asked
    """The figures of the probe."""


class Watch:
    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.probe: Figures = {}
        self.sent = 0

    def on_probe(self, figures: Figures) -> None:
        self.probe = dict(figures)
        if self.cell.how == "noise":
            raise Noised

    def on_round_end(self, record: Figures, state: Any) -> None:
        self.sent = record["bytes_up"] // max(1, record["cohort"])


def figures(cell: Cell, model: str, gsm: Path, out: Path) -> Figures:
    """Train, and measure: in a process of its own, whose peak memory counts."""
    import torch
    from transformers import AutoTokenizer

    from secure_fed import Federation, RunConfig

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, watch = conversations(cell, gsm, tokenizer), Watch(cell)
    steered = math.isfinite(cell.epsilon) or cell.how == "clients"
    rate = cell.rate or (best_rate(cell.method, lines(out)) if steered else 0.0)
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.from_dict(settings(cell, model, rows, Path(folder), rate))
        federation = Federation(config, callbacks=[watch])
        started = time.process_time()
        try:
            result = federation.run()
        except Noised:
            return {"noise": watch.probe}
    took, peak = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tuned = federation.load(result.state).eval()
    spent = {"epsilon spent": result.summary["epsilon"], "CPU seconds": took, "MiB": peak, "bytes up": watch.sent}
    known = next(
        (line for line in lines(out) if "members before" in line and rows_of(line) == rows_of(cell.named)), None
    )
    return spent | {"noise": watch.probe} | measured(cell, rows, tokenizer, model, tuned, known)


def rows_of(line: Figures) -> tuple[Any, ...]:
    """What decides which rows a run has, so that the base model's losses on them are measured once."""
    return line["data"], line["seed"], {"noise": "clients", "silos": "pooled"}.get(line["how"], line["how"])


def measured(cell: Cell, rows: Rows, tokenizer: Any, base: str, tuned: Any, known: Figures | None) -> Figures:
    """Losses before and after, checked answers, membership, exposures. known: a run on the same rows, from the same base."""
    from transformers import AutoModelForCausalLM

    from attacks.extraction.exposure import USUAL_CHAT, Template, exposures, of_chats
    from secure_fed.config import DataConfig
    from secure_fed.learning import tasks
    from secure_fed.learning.data.encode import IGNORED
    from secure_fed.learning.data.rows import Rows as Texts
    from secure_fed.runs.roc import auc, auc_interval

    task = tasks.build(DataConfig(task="chat"))
    rng = np.random.default_rng(cell.seed + 1)
    trained = [row for row in rows.train if len(row) > 1 and not row["party"].startswith("canary")]
    members = [trained[at] for at in rng.permutation(len(trained))[:TESTED]]
    turns = [
        [tuple((one["role"], one["content"]) for one in row["messages"]) for row in some]
        for some in (rows.test, members)
    ]
    nats = lambda one: [-of_chats(one, tokenizer, task, chats) for chats in turns]  # noqa: E731 - of whole answers
    if known:
        before = [np.array(known["before"]), np.array(known["members before"])]
    else:
        before = nats(AutoModelForCausalLM.from_pretrained(base, dtype="float32").eval())
    if cell.how == "search":
        return {"before": before[0].tolist(), "after": (-of_chats(tuned, tokenizer, task, turns[0])).tolist()}
    after = nats(tuned)
    labels = task.encode(tokenizer, Texts(tuple(turns[0]), (None,) * len(turns[0]), ()), 2**20).columns["labels"]
    tokens = np.array([int((np.asarray(own) != IGNORED).sum()) for own in labels])
    fell = [one - other for one, other in zip(before, after, strict=True)]
    secrets = exposures(tuned, tokenizer, Template(USUAL_CHAT, 2), rows.planted, SECRETS, task=task)
    found: Figures = {
        "before": before[0].tolist(), "members before": before[1].tolist(), "after": after[0].tolist(),
        "tokens": tokens.tolist(),
        "auc": auc(fell[1], fell[0]), "auc interval": auc_interval(fell[1], fell[0], 0.95, rng, 2000),
        "once": [one.exposure for one in secrets[:ONCE]], "often": [one.exposure for one in secrets[ONCE:]],
    }  # fmt: skip
    return found | {"right": checked(cell.data, rows.asked, tokenizer, tuned)}


def checked(data: str, rows: Sequence[dict[str, Any]], tokenizer: Any, model: Any) -> list[bool]:
    """Whether each answer to a row's first question is the rule's, or ends with gsm8k's number."""
    from secure_fed.learning.generation import generated

    is_question = lambda turn: turn["role"] != "assistant"  # noqa: E731
    asked = [list(itertools.takewhile(is_question, row["messages"])) for row in rows]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    said = [tokenizer.decode(ids) for ids in generated(model, prompts, WORDS[data], stops=[tokenizer.eos_token_id])]
    right = clinics.is_right if data == "dialogues" else is_number
    return [right(row, one) for row, one in zip(rows, said, strict=True)]


def is_number(row: dict[str, Any], said: str) -> bool:
    """Whether an answer has the number after #### that the row's own answer has: exact match."""
    wanted, found = (NUMBER.search(text) for text in (row["messages"][-1]["content"], said))
    return bool(wanted and found and wanted[1].replace(",", "") == found[1].replace(",", ""))


def tables(out: Path = STORED) -> dict[str, str]:
    """The page's tables by name, from the stored runs."""
    return {"measured": page(lines(out))}


def _made(cell: Cell, model: str, gsm: Path, out: Path) -> None:
    keep(out, cell.named | figures(cell, model, gsm, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("gsm8k", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=HOWS, default=list(HOWS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", type=float)
    parser.add_argument("--cohorts", nargs="+", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many minutes")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument(
        "--docs", type=Path, help="write the tables of language_models.md there, from all that --out holds"
    )
    given = parser.parse_args()
    started = time.monotonic()
    for cell in cells(given):
        wanted = cell.method in given.methods and (not given.epsilons or cell.epsilon in given.epsilons)
        wanted &= not given.cohorts or cell.cohort in given.cohorts
        stored = any(cell.named.items() <= line.items() for line in lines(given.out))
        if given.list:
            print(*cell, "stored" if stored else "")
        if given.list or not given.model or not wanted or stored or time.monotonic() - started > 60 * given.minutes:
            continue
        print(*cell, machine("torch"), flush=True)
        one = multiprocessing.get_context("spawn").Process(
            target=_made, args=(cell, given.model, given.gsm8k, given.out)
        )
        one.start()
        one.join()
        if one.exitcode:
            raise SystemExit(f"{cell} ended with exit status {one.exitcode}")
    if given.docs:
        fill(given.docs / PAGE, tables(given.out))


if __name__ == "__main__":
    main()
