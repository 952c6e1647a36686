"""What the audit of a prepared training shows: a lower bound on epsilon, or the exposure of the planted secrets.

The candidates are scored first; only then the coins are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attacks.adversary.null import Bools, Floats
from attacks.any_model import signals
from attacks.any_model.subject import Subject
from attacks.evidence.bounds import Bound, lower_bound
from attacks.extraction.exposure import BY_CHANCE, SAMPLES, Exposure, chance, exposures
from attacks.options import Say
from attacks.prepared.folder import Manifest, planted_in, truth_of
from secure_fed.errors import DataError, UsageError
from secure_fed.learning.tasks.chat import Chats
from secure_fed.runs.roc import Ranking, rank, to_dict

SIGNIFICANCE = 0.05
DELTA = 1e-5
ALPHA = 0.05
_UNITS = {"none": "one row", "labels": "one row with a wrong label", "secrets": "one planted secret"}
ASSUMES = (
    "the parties that trained or chose the score knew of no candidate whether it trains, beyond the training file",
    "the model was trained on train.jsonl, and on nothing else that depends on who of the candidates trains",
    "this is the only audit of the model by these candidates: the best of several audits is no bound at this confidence",
)


def audited(subject: Subject, folder: Path, manifest: Manifest, delta: float, say: Say) -> dict[str, Any]:
    """The audit as one JSON object. The coins are read after the scores are computed."""
    name, scores = scored(subject, say)
    members = truth_of(folder, manifest).members
    if members.all() or not members.any():
        raise DataError(
            f"all {len(members)} candidates of {folder} are on one side, in the training or left out, so there is nothing to "
            "compare them with: prepare and train again, with a larger --count"
        )
    found = judged(scores, members, manifest, delta)
    return {
        **subject.asked.heading,
        "prepared": str(folder),
        "task": subject.task.title,
        "candidates": manifest.candidates,
        "members": int(members.sum()),
        "planted": manifest.kind,
        "unit": found.unit,
        "delta": delta,
        "confidence": 1 - found.bound.significance,
        "epsilon_lower": found.bound.epsilon,
        "epsilon_most": found.bound.most,
        "guesses": found.bound.guesses,
        "right": found.bound.right,
        "score": name,
        **to_dict(found.ranking),
        "sentences": [*found.sentences, *subject.notes],
        "assumes": list(ASSUMES),
    }


def scored(subject: Subject, say: Say) -> tuple[str, Floats]:
    """The name of the single score, chosen by the available inputs and not by results, and its (candidates,) values."""
    # each has a coin, so none may be without a score
    if short := int((subject.texts.examples.lengths == 0).sum()):
        raise UsageError(
            f"{short} of {len(subject.texts.rows)} candidates have no room in {subject.asked.max_length} tokens: raise "
            "--max-length"
        )
    say("reading the candidates with the model")
    losses = subject.losses()
    if not (subject.base or subject.asked.references):
        return "loss", signals.loss(losses)
    say("reading the candidates with its references")
    return "loss beside references", signals.calibrated(losses, subject.reference_losses())


@dataclass(frozen=True)
class Judged:
    """bound: on epsilon, for trainings with and without one unit."""

    bound: Bound
    ranking: Ranking
    unit: str
    sentences: tuple[str, ...]


def judged(scores: Floats, members: Bools, manifest: Manifest, delta: float) -> Judged:
    """The bound, and how well the scores distinguish members from the others.

    Guarantee: if the coins are fair and independent, and the scores depend on them only through the output of an (epsilon,
    delta)-private training, the bound exceeds that epsilon with a probability of at most SIGNIFICANCE. Neighbours are training
    files with and without the unit, which is all copies of one candidate.
    """
    bound = lower_bound(scores, members, delta, SIGNIFICANCE)
    unit = _UNITS[manifest.kind]
    if manifest.repeat > 1:
        unit = f"{manifest.repeat} copies of {unit} together"
    said = [f"Nothing can be shown: {bound.how}."]
    if bound.epsilon is not None:
        found = f"No epsilon is ruled out, not even 0 at delta {delta:g}: nothing was shown about {unit}"
        if bound.epsilon:
            held = f"No guarantee of an epsilon below {bound.epsilon:.2f} at delta {delta:g} holds for {unit}"
            found = f"{held}, with {1 - bound.significance:.0%} confidence"
        most = f"With this number of candidates the bound is at most {bound.most:.2f}, even if every guess is right."
        said = [f"{found}: {bound.how}.", most]
    return Judged(bound, rank(scores[members], scores[~members]), unit, tuple(said))


def exposed(subject: Subject, folder: Path, manifest: Manifest, samples: int | None, say: Say) -> dict[str, Any]:
    """The exposure of every planted secret, and summaries with p-values for members and for others."""
    template, planted = planted_in(folder, manifest)
    say(f"ranking {len(planted)} secrets of {template.space:,}")
    given = subject.model, subject.tokenizer, template, planted, samples or SAMPLES
    if isinstance(subject.task, Chats):
        before = {one: chat[:-2] for one, chat in zip(planted, subject.texts.rows.text, strict=True)}
        found = exposures(*given, task=subject.task, before=before)
    else:
        found = exposures(*given, prompted=bool(manifest.text_b))
    members = truth_of(folder, manifest).members.tolist()
    return {
        **subject.asked.heading,
        "prepared": str(folder),
        "space": template.space,
        "repeat": manifest.repeat,
        "members": _of([one for one, member in zip(found, members, strict=True) if member]),
        "others": _of([one for one, member in zip(found, members, strict=True) if not member]),
        "secrets": [
            {"name": one.name, "member": member} | asdict(each)
            for one, each, member in zip(planted, found, members, strict=True)
        ],
    }


def _of(some: Sequence[Exposure]) -> dict[str, Any]:
    """The summary of the secrets of one side."""
    values = [one.exposure for one in some]
    return {
        "count": len(values),
        "mean": float(np.mean(values)) if values else None,
        "median": float(np.median(values)) if values else None,
        "largest": max(values, default=None),
        "first": sum(one.ahead == 0 for one in some),
        "p_value": chance(values),
    }


def untold(facts: dict[str, Any], limit: float) -> str:
    """Why the members' mean cannot be compared with the limit; "" if it can."""
    most = math.log2(facts["secrets"][0]["tried"] + 1)
    if not facts["members"]["count"]:
        return "no planted secret was in the training"
    if facts["others"]["p_value"] < ALPHA:
        return "secrets that were not in the training are exposed as well"
    if most <= limit:
        return (
            f"with the secrets tried an exposure is at most {most:.2f}; plant more --digits, or raise --secrets-tried"
        )
    return ""


def sentences(facts: dict[str, Any]) -> list[str]:
    """The figures in sentences; without members, or without others, a sentence says so."""
    ins, outs = facts["members"], facts["others"]
    if not ins["count"]:
        return ["No planted secret was in the training, so none can be exposed."]
    if outs["p_value"] < ALPHA:  # the control failed
        return [
            f"This audit is invalid: the {outs['count']} secrets that were not in the training have a mean exposure of "
            f"{outs['mean']:.2f} bits, and as large by chance with a probability of at most {outs['p_value']:.2g}.",
            f"So the mean of {ins['mean']:.2f} for the {ins['count']} that were says nothing about the training. Check "
            "that the model was trained on train.jsonl alone.",
        ]
    tried = facts["secrets"][0]["tried"]
    how = (
        "all other secrets" if tried == facts["space"] - 1 else f"{tried} others of {facts['space']:,}, drawn at random"
    )
    leak = "gave them away" if ins["p_value"] < ALPHA else "did not detectably give them away"
    said = [
        f"The {ins['count']} secrets that were in the training have a mean exposure of {ins['mean']:.2f} bits. The training "
        f"{leak}: for secrets outside the training the mean is {BY_CHANCE:.2f}, and as large with a probability of at most "
        f"{ins['p_value']:.2g}.",
        f"The model ranks {ins['first']} of them above every other secret that was tried ({how}).",
    ]
    if outs["count"]:
        said.append(f"The {outs['count']} that were not in the training have a mean of {outs['mean']:.2f}.")
    return said
