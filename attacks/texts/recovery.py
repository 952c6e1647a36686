"""Recovery of tokens from updates: exact finds, guesses, and the reason where neither is possible.

The data show whether the exact test applies: a token that begins every text, such as [CLS], is in every batch, so it must be in
every row space. If it is not, either the rows do not span the inputs (more inputs than rows) or they are not combinations of
inputs (several steps of AdamW, dropout, noise), and nothing is reported as certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attacks.texts.factor_changes import Sent, families
from attacks.texts.first_layer import FirstLayer
from attacks.texts.span import Family, Found, Key, search

NO_FACTORS = "the update holds no change of the first layer's A, B or product"
VACUOUS = "every candidate would pass: the batch has at least as many inputs as {room} dimensions"
NO_FIT = (
    "a token that is known to be in every text is not in the row space of {rank} dimensions: the batch has more inputs, "
    "or the update is no sum of plain gradients"
)
NOTHING = "nothing of the change stands out from its rounding and noise"


@dataclass(frozen=True)
class Recovery:
    """certain: pairs of position and token in the batch, by the exact test; empty if it does not apply. guessed: the nearest
    candidates, if the test may fail only because directions are lost. why: the reason why the test does not apply; empty if it
    does. rank: of the row spaces used.
    """

    certain: frozenset[Key]
    guessed: frozenset[Key]
    why: str
    rank: int

    @property
    def applies(self) -> bool:
        return not self.why


def recover(
    batches: Sequence[Sequence[Sent]], first: FirstLayer, scale: float, known: Sequence[Key], each: int
) -> list[Recovery]:
    """The tokens recovered from the updates of each batch of inputs, in one pass over all candidates.

    scale: s of W + s B A. known: tokens certainly in every batch. each: the most texts in a batch, for guesses.
    """
    every = [families(sent, first, scale) for sent in batches]
    count = first.vocabulary * first.positions * max(1, len(first.types))
    judged = [[_fitting(family, first, known, count) for family in found] for found in every]
    wanted = [family for found in judged for family, _ in found]
    conclusive = any(not family.vacuous for family in wanted)
    left = iter(search(first.blocks() if conclusive else (), wanted))
    return [_joined([(next(left), why) for _, why in found], each) for found in judged]


def _fitting(family: Family, first: FirstLayer, known: Sequence[Key], count: int) -> tuple[Family, str]:
    """The family without the tests that a known token fails while it passes others; and, if no test is usable, the reason.

    Query gradients fit. The key gradients of a text sum to zero, because attention does not change if a constant is added to
    all keys. So the span of B's rows lacks a direction there, and the keys' test is left out.
    """
    if not any(test.rank for test in family.tests):
        return family, NOTHING
    if family.vacuous:
        return family, VACUOUS.format(room=max(test.room for test in family.tests))
    if not known:
        return family, ""
    ending = [
        torch.full((1, max(place, 0) + 1), token) for place, token in known
    ]  # texts ending with the known token at its position
    kind = first.types[0] if first.types else None
    inputs = torch.cat([first.inputs(text, kind)[:, -1] for text in ending])
    fit = [test for test in family.tests if test.missing and float(test.distances(inputs).max()) < test.tolerance]
    kept = replace(family, tests=tuple(fit))
    if fit and float(kept.distances(inputs).max()) < kept.tolerance(count):
        return kept, ""
    why = NO_FIT.format(rank=family.rank)
    return (replace(family, tests=()) if family.name == "B" else family), why  # B gives no guesses


def _joined(found: Sequence[tuple[Found, str]], each: int) -> Recovery:
    """The findings of all families together. A token is certain if one family is certain of it; guesses come from the rows of A
    or of a product, whose large space keeps nearness meaningful when a direction is lost.
    """
    if not found:
        return Recovery(frozenset(), frozenset(), NO_FACTORS, 0)
    good = [one for one, why in found if not why]
    certain = frozenset[Key]().union(*(one.certain() for one in good))
    able = [one for one, _ in found if not one.family.vacuous and one.family.name != "B"]
    guessed = frozenset(able[0].nearest(each)) if able else frozenset[Key]()
    why = "" if good else "; ".join(dict.fromkeys(f"{one.family.name}: {why}" for one, why in found))
    return Recovery(certain, guessed | certain, why, max(one.family.rank for one, _ in found))
