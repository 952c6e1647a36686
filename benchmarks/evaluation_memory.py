"""Memory and time of a language model's losses, from all scores at once and in chunks (`learning/tasks/next_tokens.py`).

    python benchmarks/evaluation_memory.py [MODEL_FOLDER] [--rows 48] [--tokens 256] [--repeats 2]

Prints, for one thread and texts of random tokens,

    evaluate    the metrics of `--rows` texts of `--tokens` tokens, all of them labelled, at the default evaluation.batch_size
    step        loss and gradient of LoRA (rank 8 on all linear layers) on 4 such texts with 47 % of the tokens labelled, as in
                a set of questions and answers

MiB: at the peak, above the memory before, in a process of its own that has done the same with short texts. s: of the processor,
the median of `--repeats` turns within one process.

    whole       the scores of all tokens, as transformers' own loss reads them
    chunks      this project's way; a step keeps rows apart, as where they are protected
    together    its way where nobody is protected

Without MODEL_FOLDER the model is random: a LLaMA of SmolLM2-135M's shape (30 layers, width 576, 49,152 tokens).
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from private_fra import memory
from timing import at_most, machine, medians, ratio, show, timed, turns
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import RunConfig
from secure_fed.learning.data.encode import IGNORED, Collate, per_token
from secure_fed.learning.evaluation import evaluate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.loading import quiet
from secure_fed.learning.models.matrix_products import hasten
from secure_fed.learning.tasks import causal_lm
from secure_fed.learning.tasks.causal_lm import loss
from secure_fed.learning.tasks.next_tokens import rows_together

LABELLED, TRAINED = 0.47, 4
WAYS = ("whole", "chunks", "together")


def whole_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) mean losses from the scores of all tokens."""
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    targets = batch["labels"][:, 1:]
    each = functional.cross_entropy(scores[:, :-1].flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape).sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


def whole_metrics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    return {"loss": float(torch.cat([whole_loss(model, batch) for batch in batches]).mean())}


def model_of(folder: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    with quiet():
        if folder:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=49_152, **shape, num_key_value_heads=3, tie_word_embeddings=True)
        )


def texts(rows: int, tokens: int, vocabulary: int, labelled: float) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)
    items = []
    for _ in range(rows):
        ids = torch.randint(1, vocabulary, (tokens,), generator=draws)
        labels = ids.clone()
        labels[: round(tokens * (1 - labelled))] = IGNORED
        items.append({"input_ids": ids.numpy(), "labels": labels.numpy()})
    return items


def evaluation(model: Any, rows: int, tokens: int, way: str) -> Callable[[], object]:
    items, size = texts(rows, tokens, model.config.vocab_size, 1.0), RunConfig().evaluation.batch_size
    metrics = whole_metrics if way == "whole" else causal_lm.metrics
    return lambda: evaluate(model, items, Collate(0, per_token), metrics, size, torch.device("cpu"))


def step(model: Any, rows: int, tokens: int, way: str) -> Callable[[], object]:
    batch = Collate(0, per_token)(texts(TRAINED, tokens, model.config.vocab_size, LABELLED))
    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_each = whole_loss if way == "whole" else loss

    def once() -> object:
        with rows_together() if way == "together" else nullcontext():
            return torch.autograd.grad(of_each(model, batch).mean(), moving)

    return once


def prepared(folder: str, what: str, rows: int, tokens: int) -> Callable[[str], Callable[[], object]]:
    """The work of each way. The model is loaded, and each library has planned its first call."""
    torch.set_num_threads(1)
    model = model_of(folder)
    hasten(model)
    if what == "step":
        LoraAdapter(target_modules="all-linear").inject(model, (), 0)
    made = {"evaluate": evaluation, "step": step}[what]

    def of(way: str) -> Callable[[], object]:
        made(model, 2, 8, way)()
        return made(model, rows, tokens, way)

    return of


def peak(folder: str, what: str, way: str, rows: int, tokens: int, answer: Connection) -> None:
    work = prepared(folder, what, rows, tokens)(way)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
    before = memory("VmRSS")
    work()
    answer.send(memory("VmHWM") - before)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", default="", metavar="MODEL_FOLDER")
    arguments.add_argument("--rows", type=int, default=48)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=2)
    given = arguments.parse_args()
    print(machine("torch", "transformers") + "; one thread")
    fresh, peaks = multiprocessing.get_context("spawn"), dict[tuple[str, str], float]()
    for what, way in (*(("evaluate", way) for way in WAYS[:2]), *(("step", way) for way in WAYS)):
        here, there = fresh.Pipe()
        process = fresh.Process(target=peak, args=(given.folder, what, way, given.rows, given.tokens, there))
        process.start()
        there.close()
        peaks[what, way] = here.recv()
        process.join()
        print(f"{what:<10}{way:<10}{peaks[what, way]:12.0f} MiB", flush=True)
    of = prepared(given.folder, "step", given.rows, given.tokens)
    seconds = turns({way: timed(of(way), time.process_time) for way in WAYS}, given.repeats)
    for way in WAYS:
        print(f"{'step':<10}{way:<10}{medians(seconds)[way]:12.2f} s")
    limits = [at_most("GiB that an evaluation adds", peaks["evaluate", "chunks"] / 1024, 1.0)]
    for way in WAYS[1:]:
        limits.append(at_most(f"time of a step, {way} over whole", ratio(seconds[way], seconds["whole"]), 1.0))
    show(limits)


if __name__ == "__main__":
    main()
