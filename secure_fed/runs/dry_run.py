"""What a run needs, before it starts: its data, its guarantee and cost, its traffic, its memory part by part, and its time.

Everything that a run refuses at once is refused here too. Nothing is trained, reserved or written, and no weights are loaded:
the model is on the meta device, which has shapes and no numbers (`learning/training/common_passes/pass_memory.py`).

Memory is that of the device that trains, at the run's peak; on a processor with what Python, the libraries and the data take.

    training     weights, the tensors, gradients and moments of the clients trained at once, and the largest pass
    evaluation   weights, the state, and the largest batch of test rows, without gradients

Not counted: what an allocator loses to gaps, scratch space within an operation, and audits. The time is the least time of a
round.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privacy.entropy import SystemEntropy
from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.learning.data.encode import ASIDE, IGNORED
from secure_fed.learning.models.dropout_and_checkpointing import is_checkpointing, memory
from secure_fed.learning.problem import Problem, configured
from secure_fed.learning.training.common_passes import pass_memory
from secure_fed.learning.training.common_passes.packing import Public
from secure_fed.learning.training.common_passes.pass_memory import Footprint
from secure_fed.learning.training.common_passes.passes import Pack, Places, Trial
from secure_fed.learning.training.common_passes.trainings import clients_at_once, packing_of, whole_batches
from secure_fed.learning.training.local import Job, PrivateSteps, planned_steps
from secure_fed.methods import build
from secure_fed.methods.auto import decided
from secure_fed.runs import guarantee
from secure_fed.runs.assembly import Assembly, assemble
from secure_fed.runs.budget import Subject, cost_in_words, require_room

_STATES = 4  # the state before a round, the next one, the sum and the mean
_STEPS, _LOOKED_AT = 16, 1024
_META = torch.device("meta")


def foreseen(config: RunConfig) -> dict[str, Any]:
    """The facts on a run of this configuration, as JSON. Refuses what the run would refuse before trials of the model."""
    config, chosen = decided(config)
    method = build(config)
    whole = configured(config, shapes=True)
    assembly = assemble(config, method, whole)
    config, problem, plan = assembly.config, assembly.problem, assembly.protection.plan
    found: dict[str, Any] = {
        "method": config.method.name,
        "model": config.model.name,
        "data": _data(assembly, whole),
        "privacy": None,
        "traffic": _traffic(assembly),
    }
    if plan:
        fitted = require_room(config.privacy, plan, None, Subject.of(config, problem))
        words = guarantee.promised(assembly, fitted, cost_in_words(config.privacy, fitted, None))
        found["privacy"] = {
            **guarantee.planned(assembly)["privacy"],
            "releases": fitted.releases,
            "releases_planned": plan.releases,
            "words": words,
        }
    return found | _needs(assembly) | {"chosen": chosen}


def _data(assembly: Assembly, whole: Problem) -> dict[str, Any]:
    """Counts of clients and rows. They have no noise, and are for the owner of the data."""
    config, problem = assembly.config, assembly.problem
    here = [] if problem.lazy else [item for own in problem.train for item in own]
    names, most = problem.facts["label_names"], config.model.max_length
    lengths = np.array([len(item["input_ids"]) for item in here])
    pool = assembly.pools["data"]
    special = len(problem.tokenizer("")["input_ids"])
    cut = sum(1 for item in here if (item[ASIDE] if config.data.task == "chat" else len(item["input_ids"]) >= most))
    return {
        "task": problem.facts["task"],
        "clients": len(problem.names),
        "clients_without_rows": sum(1 for count in problem.units if not count),
        "unit": config.privacy.unit,
        "units": [int(count) for count in problem.units],
        "rows": len(here),
        "test_rows": len(problem.test),
        "test_from": problem.facts["test"]["from"],
        "held_out_for_an_audit": 0 if pool.of == "dummies" else pool.out,
        "labels": _labels(here, names),
        "rows_at_the_limit": cut,
        "rows_left_out": whole.left_out,
        "rows_with_nothing_to_learn": sum(map(_learns_nothing, here)),
        "empty_test_rows": sum(1 for item in problem.test if len(item["input_ids"]) <= special),
        "tokens": {"mean": float(lengths.mean()), "longest": int(lengths.max())} if len(lengths) else None,
        "warning": whole.warning or None,
    }


def _labels(items: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, int] | None:
    """The number of rows of each class; None where labels are no classes."""
    labels = [item["labels"] for item in items if "labels" in item]
    if not names or not all(isinstance(label, int | np.integer) for label in labels):
        return None
    counts = Counter(map(int, labels))
    return {name: counts.get(number, 0) for number, name in enumerate(names)}


def _learns_nothing(item: Mapping[str, Any]) -> bool:
    """Whether each token of a text is without a label, since the text was cut before the first one that has one."""
    labels = np.asarray(item.get("labels", 0))
    return bool(labels.ndim == 1 and labels.dtype.kind == "i" and (labels[1:] == IGNORED).all())


def _traffic(assembly: Assembly) -> dict[str, Any]:
    """Bytes of all participants in a round; with masks too."""
    server, state = assembly.server, assembly.initial
    up, down = server.traffic(state, server.plan(state), assembly.sampler.expected)
    rounds = assembly.config.federation.rounds
    return {"rounds": rounds, "cohort": assembly.sampler.expected, "bytes_up": round(up), "bytes_down": round(down)}


def hidden_cohort_traffic(assembly: Assembly) -> str:
    """The bytes that a client sends and receives in a round of a hidden cohort, and all clients in the run; "" without one."""
    if not assembly.protection.hidden:
        return ""
    server, clients = assembly.server, len(assembly.clients)
    rounds = assembly.config.federation.rounds
    up, down = server.traffic(assembly.initial, server.plan(assembly.initial), clients)  # the model goes to everybody
    each, back, whole = map(_megabytes, (up / clients, down / clients, rounds * (up + down)))
    return (
        f"privacy.hidden_cohort = true: each of the {clients:,} clients sends {each} and receives {back} in every round, "
        f"whether it trains or not, which makes {whole} for all clients over the whole run"
    )


def _megabytes(bytes_: float) -> str:
    return f"{bytes_ / 1e6:.3g} MB" if bytes_ < 1e9 else f"{bytes_ / 1e6:,.0f} MB"


def _needs(assembly: Assembly) -> dict[str, Any]:
    """Bytes and seconds, by name. assembly: with a model on the meta device."""
    config, objective, state = assembly.config, assembly.objective, assembly.initial.tensors
    device, jobs = objective.device, _jobs(assembly)
    with activity("adding up the memory of a pass"):
        passes = _Passes.of(assembly, jobs)
        by_length = sorted(assembly.problem.test, key=lambda item: -len(item.get("input_ids", " ")))
        batch = by_length[: config.evaluation.batch_size]  # the largest of test rows
        evaluating = pass_memory.of_evaluation(objective, batch, assembly.problem.collate)
    trained = 4 * sum(math.prod(state[name].shape) for name in assembly.method.plan(assembly.initial).trainable)
    moments = 2 if config.training.optimizer == "adamw" else int(config.training.momentum > 0)
    noised = 3 if assembly.protection.placement.step_noise else 0  # a sum in float64, and its noised form
    always = {
        "python, libraries and data": _resident() if device.type == "cpu" else 0,
        "weights": pass_memory.weights(assembly.problem.model),
        "state of the server": _STATES * 4 * state.numel,
    }
    parts = always | {
        "tensors of the clients trained at once": len(jobs) * trained,
        "their gradients and moments": len(jobs) * trained * (1 + moments + noised),
        "scores of tokens": passes.at_once * passes.largest.scores,
        "inputs of layers computed again": passes.at_once * passes.largest.kept,
        "activations": passes.at_once * passes.largest.rest,
    }
    training = sum(parts.values())
    evaluation = sum(always.values()) + evaluating.peak
    return {
        "memory": {
            "device": str(device),
            "of_device": memory(device),
            "peak": max(training, evaluation),
            "training": training,
            "evaluation": evaluation,
            "parts": parts,
            "clients_at_once": len(jobs),
            "passes_at_once": passes.at_once,
            "pass": {"examples": passes.examples, "tokens": passes.tokens},
            "checkpointing": is_checkpointing(assembly.problem.model),
        },
        "checkpoint_bytes": 4 * state.numel * (1 + (config.federation.optimizer != "mean")),
        "seconds_a_round_at_least": _seconds(assembly, passes),
    }


def _jobs(assembly: Assembly) -> list[Job]:
    """The trainings of the clients that are trained at once; of those looked at, the ones with most examples."""
    problem, protection, settings = assembly.problem, assembly.protection, assembly.config.training
    tensors, trainable = assembly.initial.tensors, assembly.method.plan(assembly.initial).trainable
    numbers = sum(math.prod(tensors[name].shape) for name in trainable)
    most = settings.together or max(2, clients_at_once(numbers, assembly.objective.device))
    looked_at = range(min(len(problem.train), _LOOKED_AT))
    order = sorted(looked_at, key=lambda number: -len(problem.train[number]))
    count = max(1, min(most, math.ceil(assembly.sampler.expected)))
    jobs = []
    for number in (one for one in order[:count] if len(problem.train[one])):
        examples, steps, rng = problem.train[number], None, np.random.default_rng(0)
        if protection.placement.step_noise:
            persons = None if problem.persons is None else problem.persons[number]
            made, stream = planned_steps(len(examples), settings), SystemEntropy().stream("dry run")
            steps = PrivateSteps(protection.mechanism, protection.clip_norm, made, stream, persons)
        jobs.append(Job(tensors, trainable, examples, problem.collate, settings, 0.0, rng, steps, problem.last))
    return jobs


@dataclass(frozen=True)
class _Passes:
    """The passes of a round. largest: the memory of the largest, which has so many examples and tokens. at_once: how many are
    computed at the same time.
    """

    largest: Footprint
    at_once: int
    examples: int
    tokens: int

    @classmethod
    def of(cls, assembly: Assembly, jobs: Sequence[Job]) -> _Passes:
        """In the division that training uses, over the first steps of these jobs; empty without jobs."""
        objective, found = assembly.objective, list(_packs(assembly, jobs))
        if not found:
            return cls(Footprint(), 1, 0, 0)
        largest = max(found, key=_tokens)
        places = Places.of([job.placed(_META) for job in jobs])
        spread = objective.device.type == "cpu" and not _whole(assembly, jobs)
        at_once = min(torch.get_num_threads(), len(found)) if spread else 1
        return cls(pass_memory.of_pass(objective, places, largest), at_once, len(largest.items), _tokens(largest))


def _packs(assembly: Assembly, jobs: Sequence[Job]) -> Iterator[Pack]:
    """Passes of the first steps of these jobs, or of a public shape for each kind of their examples."""
    objective, private = assembly.objective, assembly.protection.placement.private
    if not jobs:
        return
    if _whole(assembly, jobs):
        most = jobs[0].settings.microbatch
        parts = [batch[:most] for batch in islice(jobs[0].batches(), _STEPS)]
        yield from (Pack([0] * len(part), part, jobs[0].collate, len(part)) for part in parts)
        return
    packing = packing_of(objective, jobs[0], jobs[0].placed(_META), Trial(), public=private)
    if isinstance(packing, Public):
        yield from packing.largest([item for job in jobs for item in job.examples])
        return
    ahead = [job.batches() for job in jobs]
    for _ in range(_STEPS):
        entries = [
            (row, item) for row, own in enumerate(ahead) if (batch := next(own, None)) is not None for item in batch
        ]
        yield from (pack for pack, _ in packing.packs(entries, range(len(jobs))))


def _whole(assembly: Assembly, jobs: Sequence[Job]) -> bool:
    return not assembly.protection.placement.private and whole_batches(assembly.objective, jobs)


def _tokens(pack: Pack) -> int:
    """The tokens of a pass, padding included; its examples where tokens are not known."""
    return len(pack.items) * max(len(item.get("input_ids", " ")) for item in pack.items)


def _seconds(assembly: Assembly, passes: _Passes) -> float | None:
    """The time that the products of a round take here at the speed of one large product.

    None where it is not known, and for an encoder that reads each text once in the run.
    """
    if not passes.tokens or assembly.objective.reads_once:
        return None
    settings, problem = assembly.config.training, assembly.problem
    sizes = [len(own) for own in islice(problem.train, _LOOKED_AT)]
    steps = np.mean([planned_steps(size, settings) for size in sizes])
    lengths = [len(item.get("input_ids", " ")) for own in islice(problem.train, _LOOKED_AT) for item in islice(own, 16)]
    texts = assembly.sampler.expected * float(steps) * min(settings.batch, max(sizes))
    return texts * float(np.mean(lengths)) * passes.largest.flops / passes.tokens / _speed(assembly.objective.device)


def _speed(device: torch.device) -> float:
    """The operations a second of a product of two matrices on this device."""
    one, other = torch.randn(512, 1024, device=device), torch.randn(1024, 1024, device=device)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        float((one @ other).sum())
        times.append(time.perf_counter() - begun)
    return 2 * 512 * 1024 * 1024 / min(times)


def _resident() -> int:
    """The bytes of this process that are in memory now; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * 4096 if statm.exists() else 0
