"""The exposure of the planted secrets of a prepared audit, members beside non-members."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attacks.any_model.subject import Subject
from attacks.extraction.exposure import BY_CHANCE, SAMPLES, Exposure, chance, exposures
from attacks.prepared.folder import Manifest, planted_in, truth_of
from secure_fed.learning.tasks.chat import Chats

ALPHA = 0.05
Say = Callable[[str], None]


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
    groups = {"members": True, "others": False}
    by_group = {
        name: [one for one, member in zip(found, members, strict=True) if member == side]
        for name, side in groups.items()
    }
    return {
        "schema": 1,
        "model": subject.asked.model,
        "adapter": None if subject.asked.adapter is None else str(subject.asked.adapter),
        "prepared": str(folder),
        "space": template.space,
        "repeat": manifest.repeat,
        **{name: _of(some) for name, some in by_group.items()},
        "secrets": [
            {
                "name": one.name,
                "member": bool(member),
                "exposure": each.exposure,
                "interval": list(each.interval),
                "modelled": each.modelled,
                "ahead": each.ahead,
                "tried": each.tried,
            }
            for one, each, member in zip(planted, found, members, strict=True)
        ],
    }


def _of(some: Sequence[Exposure]) -> dict[str, Any]:
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
    if outs["p_value"] < ALPHA:
        return _invalid(ins, outs)
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


def _invalid(ins: dict[str, Any], outs: dict[str, Any]) -> list[str]:
    """Of an audit whose control failed."""
    return [
        f"This audit is invalid: the {outs['count']} secrets that were not in the training have a mean exposure of "
        f"{outs['mean']:.2f} bits, and as large by chance with a probability of at most {outs['p_value']:.2g}.",
        f"So the mean of {ins['mean']:.2f} for the {ins['count']} that were says nothing about the training. Check "
        "that the model was trained on train.jsonl alone.",
    ]
