"""A run without clients: in each round, one adapter trains on as many texts as the cohort has.   python one_adapter.py FOLDER

Nothing is sampled, averaged or sent. The round's texts are sorted by length and divided into passes of about 1,536 tokens, with
one optimiser step for all. It starts like the plain loop and evaluates as often. A simulator that trains an adapter for each
client computes at least as much, so to be faster it must make the arithmetic itself faster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from common import Clock, Example, Work, accuracy, padded, trainable

TOKENS = 1536


def passes(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    ordered, at = sorted(examples, key=lambda example: -len(example[0])), 0
    while at < len(ordered):
        count = max(1, TOKENS // len(ordered[at][0]))
        yield ordered[at : at + count]
        at += count


def run(work: Work) -> None:
    clock, settings = Clock(), work.settings
    model = work.adapted()
    optimizer = work.optimizer(model)
    clock.tick()
    for number in range(settings["rounds"]):
        chosen = [(number * settings["cohort"] + i) % len(work.clients) for i in range(settings["cohort"])]
        model.train()
        optimizer.zero_grad()
        for some in passes([example for client in chosen for example in work.clients[client]]):
            model(**padded(some)).loss.backward()
        optimizer.step()
        clock.tick(accuracy(model, work.test))
    clock.report(work, sum(tensor.numel() for tensor in trainable(model).values()))


if __name__ == "__main__":
    run(Work.read(sys.argv[1]))
