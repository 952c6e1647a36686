"""The audit of a model by texts that were in its training and others: all signals, baselines, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.adversary.null import Floats
from attacks.any_model import neighbours, own, recall, signals
from attacks.any_model.p_values import above_by_chance
from attacks.any_model.subject import Subject
from attacks.any_model.verdict import Found, Verdict, judged
from attacks.evidence.baseline import Baseline
from attacks.evidence.blind import blind
from secure_fed.errors import UsageError
from secure_fed.runs.membership.roc import Band, band, rank, to_dict

FEWEST = 10
Say = Callable[[str], None]


@dataclass(frozen=True)
class Audit:
    """scores: by signal, (texts,) with members first."""

    subject: Subject
    scores: dict[str, Floats]
    found: dict[str, Found]
    baselines: dict[str, Baseline | str]
    verdict: Verdict

    @property
    def largest_auc(self) -> float:
        return max(one.ranking.auc for one in self.found.values())

    @property
    def best(self) -> Band:
        """The ROC curve of the verdict's signal."""
        scores, members = self.scores[self.verdict.best], self.subject.texts.members
        return band(scores[:members], scores[members:])

    def to_dict(self) -> dict[str, Any]:
        asked = self.subject.asked
        return {
            "schema": 1,
            "model": asked.model,
            "adapter": None if asked.adapter is None else str(asked.adapter),
            "references": [*(["base model"] if self.subject.base else []), *asked.references],
            "shadows": asked.shadows,
            "task": self.subject.task.title,
            "members": self.subject.texts.members,
            "non_members": len(self.subject.texts.rows) - self.subject.texts.members,
            "verdict": self.verdict.level,
            "sentences": [*self.verdict.sentences, *self.subject.notes],
            "best": self.verdict.best,
            "baselines": [{"by": name, **_told(one)} for name, one in self.baselines.items()],
            "signals": [
                {
                    "signal": name,
                    "paper": signals.PAPERS.get(name, "your own"),
                    **to_dict(one.ranking),
                    "p_value": one.p_value,
                }
                for name, one in self.found.items()
            ],
        }


@dataclass(frozen=True)
class _One:
    """A text in the form of a baseline's unit."""

    examples: tuple[Any, ...]


def audited(subject: Subject, say: Say) -> Audit:
    """Compute every signal that the model allows. UsageError for fewer than ten texts on a side."""
    members, count = subject.texts.members, len(subject.texts.rows)
    if min(members, count - members) < FEWEST:
        raise UsageError(
            f"there are {members} members and {count - members} others: give at least {FEWEST} of each, and a hundred to see a "
            "small leak"
        )
    say("reading the texts with the model")
    scores = _signals(subject, say) | _by_shadows(subject, say)
    truth = np.arange(count) < members
    say("separating them without any model")
    units = [_One((subject.texts.examples[index],)) for index in range(count)]
    without = blind(units, subject.texts.plain, truth, subject.dates)
    found = {name: _found(own[truth], own[~truth]) for name, own in scores.items()}
    return Audit(subject, scores, found, without, judged(found, without))


def _told(one: Baseline | str) -> dict[str, Any]:
    return {"why": one} if isinstance(one, str) else {"auc": one.ranking.auc, "at_chance": one.at_chance}


def _signals(subject: Subject, say: Say) -> dict[str, Floats]:
    losses, asked = subject.losses(), subject.asked
    scores = {"loss": signals.loss(losses)}
    if subject.base or asked.references:
        say("reading the texts with its references")
        scores |= _beside(subject, losses, subject.reference_losses())
    if subject.language_model:
        tokens = subject.tokens()
        scores["loss by zlib"] = signals.per_zlib(tokens, subject.texts.learned)
        scores["Min-K %"] = signals.min_k(tokens)
        scores["Min-K %++"] = signals.min_k_plus(tokens)
        if asked.recall is not None:
            say("reading the texts after the texts of --recall")
            scores["ReCaLL"] = signals.recall(tokens, recall.conditional(subject, asked.recall))
    if asked.neighbours:
        say(f"reading {asked.neighbours} neighbours of each text")
        near = neighbours.losses(subject, asked.neighbours, asked.neighbour_model)
        scores["neighbourhood"] = signals.neighbourhood(losses, near)
    return scores | {file.stem: own.scores(file, subject) for file in asked.attacks}


def _beside(subject: Subject, losses: Floats, of_references: list[Floats]) -> dict[str, Floats]:
    """Signals that use references. With a single reference RMIA ranks texts nearly as the first does, and LiRA has no
    variance.
    """
    found = {"loss beside references": signals.calibrated(losses, of_references)}
    if len(of_references) == 1:
        return found
    likely = subject.asked.data.task != "regression"
    phi, *others = (signals.confident(own, likely=likely) for own in (losses, *of_references))
    return found | signals.offline(phi, np.stack(others))


def _by_shadows(subject: Subject, say: Say) -> dict[str, Floats]:
    """LiRA and RMIA, if shadows were requested."""
    asked = subject.asked
    if asked.config is None:
        return {}
    from attacks.any_model import shadows

    say(f"training {asked.shadows} shadow models")
    shown = _Progress(say)
    trained = shadows.made(asked, asked.config, asked.shadows, shown, subject.kept)
    return shadows.scored(shadows.target(subject), trained)


@dataclass
class _Progress:
    """Reports the progress of a training, in tenths."""

    say: Say
    said: int = 0

    def __call__(self, done: int, total: int) -> None:
        if 10 * done // total > self.said:
            self.said = 10 * done // total
            self.say(f"shadow models: {done} of {total} rounds")


def _found(members: Floats, others: Floats) -> Found:
    return Found(rank(members, others), above_by_chance(members, others))
