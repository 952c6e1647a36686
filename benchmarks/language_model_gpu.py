"""Steps on language models of 1 and 8 billion numbers on one GPU, beside plain PEFT, in less than four minutes.

    python benchmarks/language_model_gpu.py [--device cuda] [--tiny]

The models have the shapes of Llama 3.2 1B and Llama 3.1 8B, and random weights in bfloat16; nothing is downloaded. LoRA of rank
8 on all linear layers, AdamW. Texts have 128 to 256 tokens; the second half of each is learned. Rows:

    plain       forward, backward and AdamW on one padded batch, adapters in bfloat16
    ours        one client of a federation with as many texts
    private     the same, private by example: every step takes all texts
    4 clients   in common passes (together), or one after the other (in turn); `/ plain` is for one client's share

A row's step is the median of three rounds, after a first one, divided by the two steps of a round. A round of ours contains the
server's work. `first s`: seconds until the end of the first round, with all comparisons of passes. `GiB`: the most memory that
torch had allocated. `rate`: tokens a second (without padding) times 4 operations a number, as a forward and a backward pass
over frozen weights need, over the rate of a large product. The embedding of an untied model, and activations that are
computed again, do not count.

The exit status is 1 if a limit is missed. A row that would start after 200 seconds is left out. --tiny: two layers and texts of
an eighth of the length, to try the script out, also with --device cpu; the limits then mean nothing, and the status is 0.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from timing import Limit, at_most, machine, show, timed, turns
from transformers import LlamaConfig, LlamaForCausalLM, logging

from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig
from secure_fed.errors import SecureFedError
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import Collate, per_token

BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
EIGHT = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "tie_word_embeddings": False}
SHAPES = {"1B": BILLION, "8B": BILLION | EIGHT}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512}
LONGEST, STEPS, ROUNDS, LAST_START = 256, 2, 5, 200
Item = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A training. batch: texts of a client in a step. together: the number of clients in common passes, 0 for the default."""

    shape: str
    batch: int
    way: str
    checkpointing: bool = False
    clients: int = 1
    together: int = 0

    def __str__(self) -> str:
        who = f" {self.clients} clients {'in turn' if self.together else 'together'}" if self.clients > 1 else ""
        return f"{self.shape}, batch {self.batch}: {self.way}{who}{', checkpointing' * self.checkpointing}"


@dataclass(frozen=True)
class Found:
    """first: seconds until the end of the first round; step: seconds; peak: GiB; operations: of a step."""

    first: float = math.nan
    step: float = math.nan
    peak: float = math.nan
    tokens: int = 0
    operations: int = 0


ROWS = [
    Row("1B", batch, way, kept) for batch in (32, 8) for kept in (False, True) for way in ("plain", "private", "ours")
]
ROWS += [Row("1B", 8, "ours", clients=4), Row("1B", 8, "ours", clients=4, together=1)]
ROWS += [Row("8B", 8, way) for way in ("plain", "private")]


@dataclass(frozen=True)
class Bench:
    device: torch.device
    dtype: torch.dtype
    tiny: bool

    def found(self, row: Row) -> Found:
        """The figures of a training; nan if it is refused or the memory is too small."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        model = self.model(row.shape)
        embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        tokens = sum(len(item["input_ids"]) for own in texts(row, model) for item in own)
        operations = 4 * (model.num_parameters() - embedding) * tokens
        started = time.perf_counter()
        try:
            ticks = (self.plain if row.way == "plain" else self.ours)(row, model)
        except (torch.OutOfMemoryError, SecureFedError) as error:
            print(f"{row}: {str(error).splitlines()[0]}", flush=True)
            return Found()
        # the last round is not counted, since ours evaluates in it
        rounds = [after - before for before, after in itertools.pairwise(ticks[:-1])]
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else math.nan
        return Found(ticks[0] - started, statistics.median(rounds) / STEPS, peak, tokens, operations)

    def model(self, shape: str) -> LlamaForCausalLM:
        own = SHAPES[shape] | (TINY if self.tiny else {})
        config = LlamaConfig(
            **own, max_position_embeddings=LONGEST // 8 if self.tiny else LONGEST, pad_token_id=0, dtype=self.dtype
        )
        torch.manual_seed(0)
        with self.device:
            return LlamaForCausalLM(config).to(self.dtype)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def plain(self, row: Row, model: LlamaForCausalLM) -> list[float]:
        """The times at the ends of the rounds."""
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
        if row.checkpointing:
            adapted.gradient_checkpointing_enable({"use_reentrant": False})
        batch = {name: value.to(self.device) for name, value in Collate(0, per_token)(texts(row, model)[0]).items()}
        optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], 1e-4)
        ticks = []
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                optimizer.zero_grad()
                adapted(**batch).loss.backward()
                optimizer.step()
            ticks.append(self.now())
        return ticks

    def ours(self, row: Row, model: LlamaForCausalLM) -> list[float]:
        ticks: list[float] = []

        class Rounds:
            def on_round_end(_, record: Any, state: Any) -> None:  # noqa: N805
                ticks.append(self.now())

        task, clients = tasks.build(DataConfig(task="causal_lm")), texts(row, model)
        Federation(
            RunConfig.from_dict(settings(row, self.device)),
            model=model,
            train=clients,
            test=clients[0][:1],
            collate=Collate(0, per_token),
            loss=task.loss(()),
            metrics=task.metrics(()),
            callbacks=[Rounds()],
        ).run()
        return ticks

    def rate(self) -> float:
        """Operations a second of a large matrix product."""
        side = 8192 if self.device.type == "cuda" else 512
        one = torch.randn(side, side, device=self.device, dtype=self.dtype)

        def products() -> None:
            for _ in range(10):
                one @ one
            self.now()

        return float(10 * 2 * side**3 / min(turns({"": timed(products)}, 5, warm=1)[""]))


def settings(row: Row, device: torch.device) -> dict[str, Any]:
    """The settings of ours."""
    tables: dict[str, Any] = {
        "model": {"device": str(device)},
        "federation": {"rounds": ROUNDS, "cohort": row.clients, "sampling": "fixed"},
        "method": {"name": "fedlora", "rank": 8, "alpha": 16.0, "target_modules": "all-linear"},
        "training": {"lr": 1e-4, "lr_schedule": "constant", "batch_size": row.batch, "steps": STEPS},
        "evaluation": {"every": ROUNDS, "audit_fraction": 0.0},
    }
    if row.way == "private":
        tables["privacy"] = {"unit": "example", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
        tables["evaluation"] = {"every": ROUNDS, "dummies": 0}
    if row.checkpointing:
        tables["training"]["checkpointing"] = True
    if row.together:
        tables["training"]["together"] = row.together
    return tables


def texts(row: Row, model: LlamaForCausalLM) -> list[list[Item]]:
    """A list of texts for each client: random tokens, of which the second half has labels."""
    rng, longest = np.random.default_rng(0), model.config.max_position_embeddings

    def text(length: int) -> Item:
        ids = rng.integers(1, model.config.vocab_size, length)
        return {"input_ids": ids, "labels": np.where(np.arange(length) < length // 2, -100, ids)}

    return [[text(round(one)) for one in np.linspace(longest // 2, longest, row.batch)] for _ in range(row.clients)]


def limits(found: dict[Row, Found]) -> list[Limit]:
    def ratio(of: Callable[[Found], float], one: Row, other: Row) -> float:
        return of(found.get(one, Found())) / of(found.get(other, Found()))

    plain, private = Row("1B", 32, "plain"), Row("1B", 32, "private")
    kept = [Row("1B", 32, way, True) for way in ("ours", "private", "plain")]
    return [
        at_most(f"time of a step, private over plain, {plain.shape}, batch 32", ratio(step, private, plain), 1.25),
        at_most(f"peak memory, private over plain, {plain.shape}, batch 32", ratio(peak, private, plain), 1.15),
        at_most("peak memory with checkpointing, ours over plain", ratio(peak, kept[0], kept[2]), 1.15),
        at_most("peak memory with checkpointing, private over plain", ratio(peak, kept[1], kept[2]), 1.15),
    ]


def step(found: Found) -> float:
    return found.step


def peak(found: Found) -> float:
    return found.peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    began, device = time.perf_counter(), torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --device cpu --tiny tries the script out")
    logging.set_verbosity_error()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    bench = Bench(device, torch.float32 if device.type == "cpu" else torch.bfloat16, given.tiny)
    rate = bench.rate()
    print(f"{machine('torch', 'transformers', 'peft')}; {name}, {rate / 1e12:.1f} TFLOP/s in a product")
    print(f"{'':44}{'first s':>9}{'step ms':>9}{'/ plain':>9}{'tokens/s':>10}{'rate':>7}{'GiB':>8}{'/ plain':>9}")
    found: dict[Row, Found] = {}
    for row in ROWS:
        if time.perf_counter() - began > LAST_START:
            print(f"{row!s:44} left out: {LAST_START} s have passed")
            continue
        found[row] = one = bench.found(row)
        if not one.tokens:
            continue
        beside = found.get(Row(row.shape, row.batch, "plain", row.checkpointing), Found())
        print(
            f"{row!s:44}{one.first:9.1f}{1000 * one.step:9.1f}{one.step / beside.step / row.clients:9.2f}"
            f"{one.tokens / one.step:10.0f}{one.operations / one.step / rate:7.2f}{one.peak:8.2f}{one.peak / beside.peak:9.2f}",
            flush=True,
        )
    kept = limits(found)
    show(kept)
    print(f"{time.perf_counter() - began:.0f} s")
    return int(not given.tiny and not all(limit.met for limit in kept))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:  # no comparison of passes is found there
        os.environ |= dict.fromkeys(("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), home)
        sys.exit(main())
