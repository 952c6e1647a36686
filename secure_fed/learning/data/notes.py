"""`builtin/notes`: short clinical-style notes from 48 sites, made up here, in which word order decides the class.

A note has an entry of this visit among one to three entries copied from older notes:

    Last year: cough was severe on admission and is mild. Today: rash began after codeine was started.

The label is the statement of this visit's entry (here `drug_reaction`). The sentence of the other class of the
same pair has the same words ("codeine was started after rash began" is `drug_treatment`), and the older entries
make statements of the same kinds, so word counts contain little information.

Guarantees, for one `seed`:
- the same call returns the same rows, and a smaller `count` returns the first rows of a larger one;
- the splits are independent streams of one distribution, and no text is in both "train" and "test";
- in "train" and "test" a share `LABEL_NOISE` of the labels is replaced by another class, so a perfect rule
  scores about 1 - LABEL_NOISE on either; a share `IDENTIFIED` of the notes has a name, a record number and a
  telephone number, and no record number occurs twice in the two splits;
- "public" (for pre-training) has no identifying string, and its `label` column is all zero, without meaning.
  Its notes put conclusions in words, as published letters do: a title names this visit's subject (not its
  class), or every entry, this visit's and older ones alike, ends in its conclusion.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TypeVar

import numpy as np

from secure_fed.errors import DataError
from secure_fed.learning.data.rows import Rows

__all__ = ["IDENTIFIED", "LABELS", "LABEL_NOISE", "SITE_NAMES", "generate"]
# The classes come in four pairs. The two sentences of a pair have the same words and differ only in their order, or in the word
# after "not". `{x}` is a finding, `{d}` a drug.
LABELS = (
    "drug_reaction",  # the finding came after the drug
    "drug_treatment",  # the drug came after the finding
    "improving",
    "worsening",
    "confirmed",
    "excluded",
    "own_condition",
    "family_condition",
)
# One row per finding; a site uses one of the words.
FINDINGS = (
    ("fever", "pyrexia"), ("cough",), ("rash", "exanthem"), ("nausea", "queasiness"), ("headache", "cephalgia"),
    ("dizziness", "vertigo"), ("breathlessness", "dyspnoea", "sob"), ("angina",), ("lumbago", "backache"),
    ("diarrhoea", "gastroenteritis"), ("vomiting", "emesis"), ("fatigue", "tiredness"), ("insomnia",),
    ("itching", "pruritus"), ("swelling", "oedema"), ("palpitations", "palps"), ("jaundice", "icterus"),
    ("anaemia",), ("wheeze", "bronchospasm"), ("tremor",), ("constipation",), ("numbness", "paraesthesia"),
    ("arthralgia",), ("confusion", "delirium"), ("hoarseness", "dysphonia"), ("cramp", "myalgia"),
)  # fmt: skip
DRUGS = (
    "penicillin", "ibuprofen", "lisinopril", "metformin", "codeine", "warfarin", "prednisolone", "amoxicillin",
    "furosemide", "digoxin", "salbutamol", "naproxen", "omeprazole", "sertraline", "simvastatin", "bisoprolol",
    "gabapentin", "tramadol", "insulin", "diazepam",
)  # fmt: skip
# FAMILIES[k] has the sentences (for class 2k, for class 2k + 1) of the k-th pair of LABELS.
FAMILIES = (
    (
        ("{x} began after {d} was started", "{d} was started after {x} began"),
        ("{d} was given before {x} appeared", "{x} appeared before {d} was given"),
        ("first {d} , then {x}", "first {x} , then {d}"),
        ("{x} followed {d}", "{d} followed {x}"),
        ("after {d} was started , {x} began", "after {x} began , {d} was started"),
        ("{d} on monday , {x} on tuesday", "{x} on monday , {d} on tuesday"),
    ),
    (
        ("{x} was severe on admission and is mild", "{x} was mild on admission and is severe"),
        ("{x} is mild , was severe at first", "{x} is severe , was mild at first"),
        ("{x} went from severe to mild", "{x} went from mild to severe"),
        ("{x} severe before , then mild", "{x} mild before , then severe"),
        ("{x} mild after being severe", "{x} severe after being mild"),
        ("from severe , {x} went to mild", "from mild , {x} went to severe"),
    ),
    (
        ("{x} is confirmed , not excluded", "{x} is excluded , not confirmed"),
        ("{x} not excluded but confirmed", "{x} not confirmed but excluded"),
        ("first excluded , {x} was then confirmed", "first confirmed , {x} was then excluded"),
        ("{x} thought absent , found present", "{x} thought present , found absent"),
        ("{x} is present and not absent", "{x} is absent and not present"),
        ("tests found {x} present , not absent", "tests found {x} absent , not present"),
    ),
    (
        ("the patient has {x} , not the mother", "the mother has {x} , not the patient"),
        ("not the mother but the patient has {x}", "not the patient but the mother has {x}"),
        ("{x} in the patient , not in relatives", "{x} in relatives , not in the patient"),
        ("the mother never had {x} , the patient did", "the patient never had {x} , the mother did"),
        ("{x} affects the patient and not relatives", "{x} affects relatives and not the patient"),
        ("{x} : patient yes , mother no", "{x} : mother yes , patient no"),
    ),
)
# A site's register: in each row it uses one of the alternatives for the first word.
REGISTERS = (
    ("patient", "patient", "pt", "client"), ("mother", "mother", "mum", "father"), ("severe", "severe", "marked"),
    ("mild", "mild", "slight"), (" was ", " was ", " "), (" is ", " is ", " "), ("relatives", "relatives", "siblings"),
    ("started", "started", "commenced", "begun"), ("given", "given", "taken", "dispensed"),
    ("tests", "tests", "labs"), ("admission", "admission", "adm", "arrival"),
    (" and ", " and ", " & "), ("appeared", "appeared", "arose"), ("excluded", "excluded", "refuted"),
)  # fmt: skip
# How a site marks the entry of this visit, and entries copied from older notes.
CURRENT = ("today", "this visit", "new entry", "current", "this week")
OLDER = ("last year", "previous visit", "earlier entry", "old letter", "last month", "copied", "archive")
# A public note's conclusion from an entry, by class. Private notes never have a conclusion.
CONCLUSIONS = (
    ("adverse", "intolerance"), ("indication", "medicated"), ("recovering", "better"), ("deteriorating", "escalate"),
    ("established", "positive"), ("unlikely", "negative"), ("affected", "personal"), ("hereditary", "inherited"),
)  # fmt: skip
# The subject of this visit in the title of a public note, by pair of classes.
SUBJECTS = (("medication", "pharmacy"), ("progress", "trend"), ("diagnosis", "result"), ("kin", "household"))
FILLERS = (
    "bp {n} / 80 , pulse {m}", "sats {m} % on air", "weight {m} kg", "slept well", "eating and drinking",
    "seen on the ward round", "bloods sent", "ecg repeated", "discussed with the team", "walks with a stick",
    "lives alone", "plan : clinic in {m} days", "review by the nurse", "letter to the gp", "allergies checked",
    "mobile around the ward", "up to date with vaccines", "ct booked", "comfortable at rest", "alert and oriented",
    "referred to physio", "diet advice given", "room {n}", "works as a driver", "non smoker", "phoned on {m} may",
)  # fmt: skip
PLACES = (
    "Ashford", "Brackwater", "Cold Harbour", "Dunmere", "Eastfold", "Fairhaven", "Glenrowan", "Hollinside",
    "Inverlyn", "Jessamy", "Kestrel Bay", "Larkhill", "Millbrook", "Northgate", "Oakmoor", "Pendle Cross",
)  # fmt: skip
KINDS = ("General", "Clinic", "Infirmary")
GIVEN_NAMES = (
    "Ada", "Bruno", "Celia", "Dmitri", "Esme", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Katya", "Leif",
    "Mira", "Noor", "Otto", "Petra", "Quentin", "Rosa", "Stefan", "Thea", "Umar", "Vera", "Wanda", "Yusuf",
)  # fmt: skip
SURNAME_PARTS = (
    ("Ab", "Bren", "Cal", "Dor", "El", "Fen", "Gar", "Hal", "Is", "Jor", "Kal", "Lin", "Mor", "Nor", "Os", "Per"),
    ("a", "e", "i", "o", "u", "an", "en", "or"),
    ("dale", "feld", "gard", "ham", "kov", "lund", "mann", "neau", "quist", "ridge", "sen", "ton", "vik", "wood"),
)  # fmt: skip
LABEL_NOISE = 0.03
IDENTIFIED = 0.02
TITLED = 0.5  # share of public notes with a title; the others conclude every entry
_STREAMS = {"public": 0, "train": 1, "test": 2}
_OTHERS = {"public": (0, 0, 1, 2, 3), "train": (1, 2, 3), "test": (1, 2, 3)}  # older entries
_DRAWS = 56  # uniform draws set aside for each note; no note needs more
_CHUNK = 1024  # notes drawn at a time; fixed, so that a smaller count is a prefix of a larger one
_RECORDS = 10_000_000
_KEPT = 100_000  # notes of a split that are cached in memory: some 30 MB
_WORLD = 20_240_607  # the seed of the sites, which do not depend on the seed of the notes
_PRIOR = 6.0  # concentration of a site's class mix: mild, shares differ from uniform by about a third
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Site:
    """One site's register, habits, layout and mix of classes, all fixed."""

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
    choices = tuple((row[0], _pick(rng, row)) for row in REGISTERS)
    families = []
    for family in FAMILIES:
        kept = sorted(rng.choice(len(family), size=4, replace=False))
        families.append(tuple((_register(family[k][0], choices), _register(family[k][1], choices)) for k in kept))
    separator = _pick(rng, (". ", ". ", "; ", "\n", "\n- ", " / "))
    return Site(
        name=name,
        findings=tuple(_pick(rng, row) for row in FINDINGS),
        families=tuple(families),
        current=_pick(rng, CURRENT),
        older=tuple(OLDER[k] for k in rng.choice(len(OLDER), size=3, replace=False)),
        mark_last=bool(rng.random() < 0.3),
        fillers=tuple(FILLERS[k] for k in rng.choice(len(FILLERS), size=8, replace=False)),
        separator=separator,
        label_ends=tuple(np.cumsum(rng.dirichlet(np.full(len(LABELS), _PRIOR))).tolist()),
    )


_RNG = np.random.default_rng(_WORLD)
SITES = tuple(_site(f"{place} {kind}", _RNG) for place in PLACES for kind in KINDS)
# The sites' cumulative shares of all notes: the largest writes up to three times as many as the smallest.
_SIZES = np.random.default_rng(_WORLD + 1).uniform(0.5, 1.5, len(SITES))
SHARE_ENDS: tuple[float, ...] = tuple(np.cumsum(_SIZES / _SIZES.sum()).tolist())
SITE_NAMES = tuple(site.name for site in SITES)


class _Draws:
    """The uniform draws of one note, used in order. next: returns the next draw."""

    __slots__ = ("next",)

    def __init__(self, values: list[float]) -> None:
        self.next = iter(values).__next__

    def chance(self, share: float) -> bool:
        return self.next() < share

    def below(self, bound: int) -> int:
        return int(self.next() * bound)

    def choose(self, options: tuple[T, ...]) -> T:
        return options[int(self.next() * len(options))]

    def weighted(self, ends: tuple[float, ...]) -> int:
        return min(bisect_right(ends, self.next()), len(ends) - 1)


@dataclass(frozen=True, slots=True)
class _Note:
    site: Site
    entries: list[tuple[str, int]]  # (text, class); this visit's entry comes first


def _sample(draws: _Draws, older: tuple[int, ...]) -> _Note:
    site = SITES[draws.weighted(SHARE_ENDS)]
    label = draws.weighted(site.label_ends)
    findings = _distinct(draws, site.findings, 4)
    marks = [site.current, *_distinct(draws, site.older, 3)]
    families = [k for k in _distinct(draws, (0, 1, 2, 3), 4) if k != label // 2]
    families = [label // 2, *families[: draws.choose(older)]]
    entries = []
    for k, family in enumerate(families):
        side = draws.below(2) if k else label % 2
        sentence = draws.choose(site.families[family])[side]
        said = sentence.replace("{x}", findings[k]).replace("{d}", draws.choose(DRUGS))
        entries.append((f"{said} ({marks[k]})" if site.mark_last else f"{marks[k]}: {said}", 2 * family + side))
    return _Note(site, entries)


def _distinct(draws: _Draws, options: tuple[T, ...], count: int) -> list[T]:
    """`count` different options in random order (a partial Fisher-Yates shuffle)."""
    pool, left, following = list(options), len(options), draws.next
    for k in range(count):
        j = k + int(following() * (left - k))
        pool[k], pool[j] = pool[j], pool[k]
    return pool[:count]


def _layout(site: Site, entries: list[str], extra: list[str], draws: _Draws) -> str:
    """The note in its site's layout: `extra` lines, then entries and fillers in random order."""
    fillers = _distinct(draws, site.fillers, draws.below(3))
    measured = [filler.format(n=100 + draws.below(60), m=60 + draws.below(40)) for filler in fillers]
    body = _distinct(draws, (*entries, *measured), len(entries) + len(measured))
    return site.separator.join([line[0].upper() + line[1:] for line in (*extra, *body)]) + "."


def _published(note: _Note, draws: _Draws) -> str:
    """A public note: this visit's subject as the title, or every entry's conclusion behind it."""
    if draws.chance(TITLED):
        title = draws.choose(SUBJECTS[note.entries[0][1] // 2])
        return f"{title.capitalize()}: {_layout(note.site, [text for text, _ in note.entries], [], draws)}"
    concluded = [f"{text} - {draws.choose(CONCLUSIONS[label])}" for text, label in note.entries]
    return _layout(note.site, concluded, [], draws)


def _identity(index: int, split: str, seed: int, draws: _Draws) -> list[str]:
    """One line naming the patient; the record number is a bijection of (split, index)."""
    surname = "".join(draws.choose(part) for part in SURNAME_PARTS)
    record = f"{_STREAMS[split]}{(7_368_787 * index + 1_299_709 * (seed + 1)) % _RECORDS:07d}"
    phone = f"0{draws.below(9000) + 1000} {draws.below(900_000) + 100_000}"
    return [f"Patient {draws.choose(GIVEN_NAMES)} {surname}, MRN {record}, phone {phone}"]


def _stream(seed: int, split: str) -> Iterator[tuple[str, int, str]]:
    """Endless (text, label, site) of one split."""
    rng = np.random.default_rng([seed, _STREAMS[split]])
    index = 0
    while True:
        for values in rng.random((_CHUNK, _DRAWS)).tolist():
            draws = _Draws(values)
            note = _sample(draws, _OTHERS[split])
            if split == "public":
                yield _published(note, draws), 0, note.site.name
                continue
            observed = note.entries[0][1]  # the label as written down: now and then another class
            if draws.chance(LABEL_NOISE):
                observed = (observed + 1 + draws.below(len(LABELS) - 1)) % len(LABELS)
            identity = _identity(index, split, seed, draws) if draws.chance(IDENTIFIED) else []
            text = _layout(note.site, [text for text, _ in note.entries], identity, draws)
            if zlib.crc32(text.encode()) % 2 == _STREAMS[split] % 2:  # so that no text is in both train and test
                index += 1
                yield text, observed, note.site.name


def generate(count: int, *, seed: int, split: str) -> Rows:
    """The first `count` notes of a split ("public", "train" or "test") under `seed`; see the module."""
    if split not in _STREAMS:
        raise DataError(f"split {split!r} of builtin/notes is none of {', '.join(_STREAMS)}")
    if not 0 < count <= _RECORDS:
        raise DataError(f"builtin/notes cannot make {count} notes; data.examples must be from 1 to {_RECORDS}")
    if seed < 0:
        raise DataError(f"seed {seed} for builtin/notes is negative; set federation.seed to 0 or more")
    return (_kept if count <= _KEPT else _generated)(count, seed, split)


def _generated(count: int, seed: int, split: str) -> Rows:
    text, label, client = zip(*islice(_stream(seed, split), count), strict=True)
    return Rows(text=text, label=label, label_names=LABELS, client=client)


_kept = lru_cache(maxsize=2)(_generated)  # the two splits of a run, for its audit and a comparison run too
