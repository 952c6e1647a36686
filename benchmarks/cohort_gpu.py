"""Clients in common passes on an accelerator, against one client at a time and against one plain batch.

    HF_HUB_OFFLINE=1 python benchmarks/cohort_gpu.py [--device cuda] [--clients 32] [--batch 8] [--tokens 64] [--repeats 20]

A model of RoBERTa-base's size with random weights, LoRA of rank 8 on query and value and a head, float32 or --dtype bfloat16.
Four ways make one step, in alternation. Times are measured with device events, medians over the turns:

    plain       one batch of all clients' texts with one shared adapter: a lower limit for any engine of clients
    in turn     `train` for one client after the other
    together    `train_together`
    public      `train_together` in passes of public shapes, required by a guarantee for clients

and two make the step of one client with clipping and noise for each example, and without. Also printed: the floors (the
operations of matrix products at the measured rate of a large product) and the peak memory in use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from cohort import SETTINGS, Work, adapted, texts
from timing import Limit, Timed, at_least, at_most, machine, medians, ratio, show, turns
from torch.utils.flop_counter import FlopCounterMode
from transformers import RobertaConfig, RobertaForSequenceClassification

from privacy.entropy import SystemEntropy
from privacy.mechanisms import Gaussian
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import PrivateSteps, train
from secure_fed.learning.training.objective import Objective

WORDS = 50_265


def work(given: argparse.Namespace, device: torch.device) -> Work:
    """The clients, and the model on the device."""
    size = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = RobertaConfig(
        vocab_size=WORDS,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **(size if given.small else {}),
    )
    torch.manual_seed(0)
    model = RobertaForSequenceClassification(config).to(device, getattr(torch, given.dtype))
    clients = texts(np.random.default_rng(0), [[given.tokens] * given.batch] * given.clients, WORDS)
    made = adapted(model, clients, LoraAdapter(), only_b=False, collate=Collate(1))
    return replace(made, objective=Objective(model, made.objective.loss, device))


def by_events(action: Callable[[], object], device: torch.device) -> Timed:
    """The action, timed with device events, or with the clock on a CPU."""

    def once() -> float:
        if device.type != "cuda":
            started = time.perf_counter()
            action()
            return time.perf_counter() - started
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        action()
        after.record()
        torch.cuda.synchronize(device)
        return before.elapsed_time(after) / 1000

    return once


def ways_of(made: Work, ways: Ways) -> dict[str, Callable[[], object]]:
    """The alternating ways, by name."""
    flat = replace(made, clients=[[item for own in made.clients for item in own]])
    whole = replace(flat, settings=replace(SETTINGS, batch_size=len(flat.clients[0])))
    one = replace(made, clients=made.clients[:1], settings=replace(SETTINGS, batch_size=len(made.clients[0])))

    def privately() -> object:
        steps = PrivateSteps(Gaussian(1.0), 1.0, 1, SystemEntropy().stream("benchmark"))
        return train_together(one.objective, [replace(one.jobs()[0], private=steps)], ways)

    return {
        "plain": lambda: train(whole.objective, whole.jobs()[0]),
        "in turn": lambda: [train(made.objective, job) for job in made.jobs()],
        "together": lambda: train_together(made.objective, made.jobs(), ways),
        "public": lambda: train_together(made.objective, made.jobs(), ways, public=True),
        "one client": lambda: train(one.objective, one.jobs()[0]),
        "one client, each example clipped": privately,
    }


def floor(action: Callable[[], object], device: torch.device, dtype: torch.dtype) -> float:
    """Seconds for the action's matrix products, at the rate of a product of 4,096 by 4,096."""
    side = 4096 if device.type == "cuda" else 512
    one = torch.randn(side, side, device=device, dtype=dtype)
    product = by_events(lambda: [one @ one for _ in range(10)], device)
    rate = 10 * 2 * side**3 / min(turns({"": product}, 5, warm=1)[""])
    with FlopCounterMode(display=False) as counter:
        action()
    return float(counter.get_total_flops()) / rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a model of two layers, to try the script out")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --device cpu --small tries the script out")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{machine('torch', 'transformers', 'peft')}; {name}, {given.dtype}")
    made, ways = work(given, device), Ways()
    ready = ways_of(made, ways)
    found = turns({name: by_events(action, device) for name, action in ready.items()}, given.repeats, warm=2)
    least = floor(ready["plain"], device, getattr(torch, given.dtype))
    for name, seconds in medians(found).items():
        print(f"  {name:36} {1000 * seconds:9.2f} ms")
    print(f"  {'floor of the plain batch':36} {1000 * least:9.2f} ms")
    if device.type == "cuda":
        print(f"  {'memory at the peak':36} {torch.cuda.max_memory_allocated(device) / 2**20:9.0f} MiB")
    if ways.why_not:
        print(f"  clients were trained one after the other: {ways.why_not}")
    show(limits(found))


def limits(found: dict[str, list[float]]) -> list[Limit]:
    clipped, one = found["one client, each example clipped"], found["one client"]
    return [
        at_least("together over in turn", ratio(found["in turn"], found["together"]), 6.0),
        at_least("throughput of together over the plain batch's", ratio(found["plain"], found["together"]), 0.5),
        at_most("a step with clipping for each example over one without", ratio(clipped, one), 1.15),
    ]


if __name__ == "__main__":
    main()
