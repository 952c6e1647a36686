"""Time of greedy generation, without a cache of keys and values and with one (`learning/generation.py`).

    python benchmarks/generation.py MODEL_FOLDER [--repeats 1]

Prints processor seconds, for one thread and a model with LoRA (rank 8 on all linear layers), of

    8 x 2      8 tokens after each of 2 prompts
    32 x 16    32 tokens after each of 16 prompts

Prompts have 16 to 64 random tokens. No token ends a text.

    loop       every token reads its whole text again, all texts in one batch, as `secure-fed predict` did
    cached     this project's way, with the comparison that each call makes: 3 passes of a few tokens

Without a cache 8 tokens cost 8 passes over the texts; with one they cost a pass over the prompts and 7 passes of a token each.
So their ratio stays below about 8, and no limit is set for it. A pass of one token reads all weights of the model, so that the
ratio of short prompts is smaller.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from evaluation_memory import model_of
from timing import at_least, machine, medians, ratio, show, timed, turns

from secure_fed.learning.data.encode import Collate, per_token
from secure_fed.learning.generation import generated
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.matrix_products import hasten
from secure_fed.learning.tasks.next_tokens import last_scores

CASES = ((8, 2, 0.0), (32, 16, 10.0))  # tokens, prompts, and the least ratio
SHORTEST, LONGEST = 16, 64


def prompts_of(count: int, vocabulary: int) -> list[list[int]]:
    draws = torch.Generator().manual_seed(0)
    lengths = torch.linspace(SHORTEST, LONGEST, count).round().int().tolist()
    return [torch.randint(1, vocabulary, (length,), generator=draws).tolist() for length in lengths]


@torch.no_grad()
def loop(model: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    texts, pad = [list(own) for own in prompts], Collate(0, per_token)
    for _ in range(count):
        batch = pad([{"input_ids": own, "labels": own} for own in texts])
        for own, token in zip(texts, last_scores(model, batch).argmax(1).tolist(), strict=True):
            own.append(token)
    return [own[-count:] for own in texts]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", metavar="MODEL_FOLDER")
    arguments.add_argument("--repeats", type=int, default=1)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "transformers") + "; one thread", flush=True)
    model = model_of(given.folder).eval()
    hasten(model)
    LoraAdapter(target_modules="all-linear").inject(model, (), 0)
    generated(model, [[1, 2]], 2)  # each library plans its first call
    limits = []
    for count, rows, least in CASES:
        prompts, found = prompts_of(rows, model.config.vocab_size), dict[str, list[list[int]]]()

        def of_loop() -> None:
            found["loop"] = loop(model, prompts, count)  # noqa: B023  # called within this turn

        def of_cached() -> None:
            found["cached"] = generated(model, prompts, count, batch_size=rows)  # noqa: B023

        seconds = turns(
            {"loop": timed(of_loop, time.process_time), "cached": timed(of_cached, time.process_time)}, given.repeats
        )
        same = sum(one == other for one, other in zip(found["loop"], found["cached"], strict=True))
        name, faster = f"{count} x {rows}", ratio(seconds["loop"], seconds["cached"])
        for way, median in medians(seconds).items():
            print(f"{name:<10}{way:<10}{median:10.2f} s")
        print(f"{name:<10}{faster:20.1f} times as fast, {same} of {rows} texts the same", flush=True)
        limits += [at_least(f"times as fast, {name}", faster, least)] if least else []
    show(limits)


if __name__ == "__main__":
    main()
