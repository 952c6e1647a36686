"""What a run needs, before it starts: its data, its guarantee and cost, its traffic, and its memory part by part.

Everything that a run refuses at once is refused here too. Nothing is trained, reserved or written, and no weights are loaded:
the model is on the meta device, which has shapes and no numbers (`learning/training/cohort/pass_memory.py`).

"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from secure_fed.config import RunConfig
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.problem import Problem, configured
from secure_fed.learning.tasks.item_extras import ASIDE
from secure_fed.methods import build
from secure_fed.runs import guarantee
from secure_fed.runs.assembly import Assembly, assemble
from secure_fed.runs.budget import cost_in_words, require_room
from secure_fed.runs.budget_terms import Subject
from secure_fed.runs.needs import needs


def foreseen(config: RunConfig) -> dict[str, Any]:
    """The facts on a run of this configuration, as JSON. Refuses what the run would refuse before trials of the model."""
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
    return found | needs(assembly)


def _data(assembly: Assembly, whole: Problem) -> dict[str, Any]:
    """Counts of clients and rows. They have no noise, and are for the owner of the data."""
    config, problem = assembly.config, assembly.problem
    here = [] if problem.lazy else [item for own in problem.train for item in own]
    names, most = problem.facts["label_names"], config.model.max_length
    lengths = np.array([len(item["input_ids"]) for item in here])
    pool = assembly.pools["data"]
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
        "held_out_for_an_audit": 0 if pool.of == "phantoms" else pool.out,
        "labels": _labels(here, names),
        "rows_at_the_limit": cut,
        "rows_left_out": whole.left_out,
        "rows_with_nothing_to_learn": sum(map(_learns_nothing, here)),
        "empty_test_rows": sum(1 for item in problem.test if len(item["input_ids"]) <= _special(problem.tokenizer)),
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


def _special(tokenizer: Any) -> int:
    return len(tokenizer("")["input_ids"])


def _traffic(assembly: Assembly) -> dict[str, Any]:
    """Bytes of all participants in a round; with masks too."""
    server, state = assembly.server, assembly.initial
    up, down = server.traffic(state, server.plan(state), assembly.sampler.expected)
    rounds = assembly.config.federation.rounds
    return {"rounds": rounds, "cohort": assembly.sampler.expected, "bytes_up": round(up), "bytes_down": round(down)}
