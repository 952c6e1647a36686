"""The sites that write the built-in notes: each has its own register, habits, layout and mix of classes.

The sites are part of the data's definition: they are the same whatever seed the notes are drawn with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from secure_fed.learning.data import notes_words as words

_WORLD = 20_240_607  # the sites' own seed
_PRIOR = 6.0  # concentration of a site's class mix: mild, about one third off the uniform share


@dataclass(frozen=True, slots=True)
class Site:
    """One site's habits, all fixed."""

    name: str
    findings: tuple[str, ...]  # the site's word for each finding
    families: tuple[tuple[tuple[str, str], ...], ...]  # the sentences it uses, per pair of classes
    current: str  # its mark on this visit's entry
    older: tuple[str, ...]  # its marks on older entries
    mark_last: bool  # marks stand behind the entry, not in front of it
    fillers: tuple[str, ...]
    separator: str
    label_ends: tuple[float, ...]  # cumulative class mix


def _register(sentence: str, choices: tuple[tuple[str, str], ...]) -> str:
    for plain, local in choices:
        sentence = sentence.replace(plain, local)
    return sentence


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _site(name: str, rng: np.random.Generator) -> Site:
    choices = tuple((row[0], _pick(rng, row)) for row in words.REGISTERS)
    families = []
    for family in words.FAMILIES:
        kept = sorted(rng.choice(len(family), size=4, replace=False))
        families.append(tuple((_register(family[k][0], choices), _register(family[k][1], choices)) for k in kept))
    separator = _pick(rng, (". ", ". ", "; ", "\n", "\n- ", " / "))
    return Site(
        name=name,
        findings=tuple(_pick(rng, row) for row in words.FINDINGS),
        families=tuple(families),
        current=_pick(rng, words.CURRENT),
        older=tuple(words.OLDER[k] for k in rng.choice(len(words.OLDER), size=3, replace=False)),
        mark_last=bool(rng.random() < 0.3),
        fillers=tuple(words.FILLERS[k] for k in rng.choice(len(words.FILLERS), size=8, replace=False)),
        separator=separator,
        label_ends=tuple(np.cumsum(rng.dirichlet(np.full(len(words.LABELS), _PRIOR))).tolist()),
    )


_RNG = np.random.default_rng(_WORLD)
SITES = tuple(_site(f"{place} {kind}", _RNG) for place in words.PLACES for kind in words.KINDS)

# The sites' cumulative shares of all notes: the largest writes up to three times as many as the smallest.
_SIZES = np.random.default_rng(_WORLD + 1).uniform(0.5, 1.5, len(SITES))
SHARE_ENDS: tuple[float, ...] = tuple(np.cumsum(_SIZES / _SIZES.sum()).tolist())
