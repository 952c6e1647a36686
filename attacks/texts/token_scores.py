"""The recall and precision of tokens recovered from a client's texts.

Distinct pairs of position and token are counted, without special and padding tokens: these are in every text, and recovering
them shows nothing. For a model whose first inputs do not depend on the position, tokens are counted.

Exact finds are evidence by themselves. Guesses may be right because texts are alike, so they are reported beside the recall of
naming equally many of the commonest pairs, and of the commonest tokens, of public texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks.evidence import attempts
from attacks.texts.first_layer import FirstLayer
from attacks.texts.span import Key

CERTAIN = ("recall", "precision", "bag_recall", "bag_precision")
GUESSED = ("guessed_recall", "guessed_precision", "guessed_bag_recall", "guessed_bag_precision")
USUAL = ("baseline_recall", "baseline_bag_recall")
_WHICH = ("client", "clients", "round")  # fields that identify a row


@dataclass(frozen=True)
class Common:
    """The pairs and tokens of public texts without special ones, the most frequent first; ties by the smaller value."""

    pairs: Sequence[Key]
    tokens: Sequence[int]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], first: FirstLayer, special: Collection[int]) -> Common:
        pairs = Counter(key for text in texts for key in truth_of([text], first) if key[1] not in special)
        tokens = Counter(token for text in texts for token in set(text) if token not in special)
        return cls(
            sorted(pairs, key=lambda one: (-pairs[one], one)), sorted(tokens, key=lambda one: (-tokens[one], one))
        )

    def beside(self, found: Collection[Key], truth: Collection[Key], special: Collection[int]) -> tuple[float, float]:
        """The recall of as many of the commonest pairs as pairs were found, and the same for tokens."""
        claimed = {key for key in found if key[1] not in special}
        pairs = self.pairs[: len(claimed)]
        tokens = self.tokens[: len({token for _, token in claimed})]
        return score(pairs, truth, special).recall, score([(-1, token) for token in tokens], truth, special).bag_recall


@dataclass(frozen=True)
class Score:
    """recall: the share of true pairs that was found; precision: the share of found pairs that is true (None if nothing was
    found). bag_recall, bag_precision: the same for distinct tokens at any position.
    """

    recall: float
    precision: float | None
    bag_recall: float
    bag_precision: float | None
    true: int
    found: int


def score(found: Collection[Key], truth: Collection[Key], special: Collection[int]) -> Score:
    """The scores of pairs without special tokens; a batch with only special tokens scores zero."""
    claimed = {key for key in found if key[1] not in special}
    true = {key for key in truth if key[1] not in special}
    hits, words, named = len(claimed & true), {token for _, token in true}, {token for _, token in claimed}
    return Score(
        hits / len(true) if true else 0.0,
        hits / len(claimed) if claimed else None,
        len(named & words) / len(words) if words else 0.0,
        len(named & words) / len(named) if named else None,
        len(true),
        len(claimed),
    )


def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over rows, beside the row with the most recovered. A row to which the exact test does not apply has an exact recall
    of 0; if it applies to no row, there is no such figure. Rows without finds have no precision.
    """
    applicable = [row for row in rows if row["exact_applicable"]]
    return {
        "updates": len(rows),
        "exact_applicable": len(applicable),
        **{
            name: mean([row[name] for row in rows if row[name] is not None]) if applicable else None for name in CERTAIN
        },
        **{name: mean([row[name] for row in rows if row[name] is not None]) for name in (*GUESSED, *USUAL)},
        "why_not": sorted({row["why"] for row in rows if row["why"]}),
        "most_exposed": _most(applicable, CERTAIN, attempts.exact, "exact"),
        "most_exposed_guess": _most(rows, (*GUESSED, *USUAL), attempts.guessed, "guessed"),
    }


def _most(
    rows: Sequence[dict[str, Any]],
    names: Sequence[str],
    named: Callable[[dict[str, Any]], attempts.Named],
    how: attempts.How,
) -> dict[str, Any] | None:
    """The figures of the row with the most recovered, as the verdict counts it."""
    found = [(named(row), row) for row in rows]
    if not found:
        return None
    _, best = max(found, key=lambda one: (one[0].share(how), one[0].most or 0.0))
    return {name: best[name] for name in (*_WHICH, *names) if name in best}


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def texts_of(examples: Iterable[Any]) -> list[list[int]] | None:
    """The token ids of every example; None if examples are not single texts."""
    texts = []
    for example in examples:
        ids = np.asarray(example["input_ids"]) if isinstance(example, Mapping) and "input_ids" in example else None
        if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
            return None
        texts.append([int(token) for token in ids])
    return texts


def truth_of(texts: Iterable[Sequence[int]], first: FirstLayer) -> set[Key]:
    """The tokens and pairs to recover in these texts."""
    return {first.key(place, token) for text in texts for place, token in enumerate(text)}


def known_tokens(texts: Sequence[Sequence[int]], first: FirstLayer) -> list[Key]:
    """Tokens that begin every public text, such as [CLS]: certainly in every client's batch."""
    starts = {text[0] for text in texts if text}
    return [(0, starts.pop())] if len(starts) == 1 and first.placed else []
