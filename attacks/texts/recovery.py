"""Recovery of tokens from updates: exact finds, guesses, and the reason where neither is possible, and how well both do.

`prior_knowledge` is the adversary's knowledge before an inversion: first layers, public texts, and settings of the run.
`recover` gives tokens. The data show whether the exact test (`span`) applies: a token that begins every text, such as [CLS], is
in every batch, so it must be in every row space. If it is not, either the rows do not span the inputs (more inputs than rows)
or they are not combinations of inputs (several steps of AdamW, dropout, noise), and nothing is reported as certain.

`score` compares tokens with a client's texts: recall and precision of distinct pairs of position and token, without special and
padding tokens, which are in every text: recovering them shows nothing. For a model whose first inputs do not depend on the
position, tokens are counted. Exact finds are evidence by themselves. Guesses may be right because texts are alike, so they are
reported beside the recall of naming equally many of the commonest pairs, and of the commonest tokens, of public texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attacks.adversary.case import Case, Inapplicable
from attacks.evidence import attempts
from attacks.texts.factor_changes import Sent, families
from attacks.texts.span import Family, FirstLayer, Found, Key, NoFirstLayerError, first_layer, search
from secure_fed.learning.models.adapters.lora import scaling_of
from secure_fed.learning.tasks.chat import template_tokens
from secure_fed.learning.training.local import Falling, batch_sampler, planned_steps
from secure_fed.rounds.masked.encoding_plan import Rounded
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.recording import Summed, Update
from secure_fed.tensors.tensors import Layout

NO_FACTORS = "the update holds no change of the first layer's A, B or product"
VACUOUS = "every candidate would pass: the batch has at least as many inputs as {room} dimensions"
NO_FIT = (
    "a token that is known to be in every text is not in the row space of {rank} dimensions: the batch has more inputs, "
    "or the update is no sum of plain gradients"
)
NOTHING = "nothing of the change stands out from its rounding and noise"
POSITIONS = 128
_SEEN_TEXTS = 500
CERTAIN = ("recall", "precision", "bag_recall", "bag_precision")
GUESSED = ("guessed_recall", "guessed_precision", "guessed_bag_recall", "guessed_bag_precision")
USUAL = ("baseline_recall", "baseline_bag_recall")
_WHICH = ("client", "clients", "round")  # fields that identify a row


@dataclass(frozen=True)
class PriorKnowledge:
    """first: the layers whose inputs are searched. known: tokens in every batch. special: tokens that do not count.

    scale: s of W + s B A. each: the most texts in a client's `training.steps`; without this setting, in one batch. length: of a
    usual public text, in tokens. common: the common tokens of public texts, to compare guesses with.
    """

    case: Case
    first: FirstLayer
    known: list[Key]
    special: frozenset[int]
    scale: float
    each: int
    length: int
    common: Common

    def sent(self, one: Update) -> Sent:
        """An update and the state where it started."""
        step, times = adamw_step(self.case, one), faster(self.case.assembly)
        noise = update_noise(self.case, _units(self.case, one.client), one.round)
        return Sent(one.contribution, self.before(one.round), noise, step=step, faster=times)

    def summed(self, one: Summed) -> Sent:
        """A sum and the state where it started."""
        noise = math.hypot(sum_noise(self.case, one), grid_noise(self.case, one))
        return Sent(one.total, self.before(one.round), noise, one.clients)

    def recovered(self, batches: Sequence[Sequence[Sent]], clients: int = 1) -> list[Recovery]:
        """The tokens recovered from the updates of each batch, each batch with `clients` clients."""
        return recover(batches, self.first, self.scale, self.known, self.each * clients)

    def before(self, round_: int) -> Any:
        """The tensors that the clients of that round started from; frozen factors keep their initial values."""
        return self.case.assembly.initial.tensors | self.case.seen.states[round_]

    def truth(self, clients: Sequence[str]) -> set[Key]:
        """The tokens of these clients' texts, for scoring alone; dummies have none."""
        parts = self.case.assembly.problem
        named = dict(zip(parts.names, parts.train, strict=True))
        return truth_of([text for name in clients for text in texts_of(named.get(name, ())) or []], self.first)

    def scored(self, found: Recovery, clients: Sequence[str]) -> dict[str, Any]:
        """A recovery compared with the truth, as JSON."""
        truth = self.truth(clients)
        exact, near = score(found.certain, truth, self.special), score(found.guessed, truth, self.special)
        pairs, tokens = self.common.beside(found.guessed, truth, self.special)
        return {
            "exact_applicable": found.applies,
            "why": found.why,
            "rank": found.rank,
            "true": exact.true,
            "found": exact.found,
            **{name: getattr(exact, name) for name in CERTAIN},
            **{f"guessed_{name}": getattr(near, name) for name in CERTAIN},
            "baseline_recall": pairs,
            "baseline_bag_recall": tokens,
        }


def prior_knowledge(case: Case) -> PriorKnowledge:
    """The prior knowledge in a case, or Inapplicable."""
    assembly, shown = case.assembly, case.from_population(_SEEN_TEXTS)
    public = texts_of(shown)
    if not public or not any(public):
        raise Inapplicable("inverting updates needs test examples with one list of whole-number input_ids each")
    longest = min(max(map(len, public)), POSITIONS)
    model = assembly.objective.load(assembly.initial.tensors)
    try:
        types = tuple(sorted({int(kind) for one in shown for kind in one.get("token_type_ids", ())}))
        first = first_layer(model, list(assembly.initial.tensors), longest, types)
    except NoFirstLayerError as error:
        raise Inapplicable(f"inverting updates is not possible here: {error}") from error
    special = frozenset(getattr(assembly.problem.tokenizer, "all_special_ids", ()))
    if assembly.config.data.task == "chat":
        special |= template_tokens(assembly.problem.tokenizer)
    return PriorKnowledge(
        case,
        first,
        known_tokens(public, first),
        special,
        scaling_of(assembly.method),
        assembly.config.training.batch * (assembly.config.training.steps or 1),
        sorted(map(len, public))[len(public) // 2],
        Common.of(public, first, special),
    )


def update_noise(case: Case, units: int, round_: int) -> float:
    """The standard deviation of the known noise on a coordinate of an update: that which the client adds to the update, or

        lr length(T) z C / (q n)

    from the noise z C in each of T steps of SGD on a client with n `units`, q n of which are expected in a step.

        length(T) = sqrt(sum_t (sum_{s >= t} f_s m^(s - t))^2)

    is the change by T independent gradients of variance one, in SGD with momentum m, whose rate in step s is f_s times the
    round's. The effect of noise on later gradients is not counted. The head's last layer, whose rate differs, is not searched
    for texts.

    0 for noise in steps of AdamW, which is unknown: a step is divided by the size of its gradient, noise included, so that the
    noise in it depends on gradients that the server does not see. The exact test then counts rounding alone, and is applied
    only if it finds the tokens that are in every text (`recovery`).
    """
    protection, training = case.assembly.protection, case.assembly.config.training
    if protection.placement.own_noise:
        return protection.contribution_mechanism.std(protection.clip_norm)
    if not units or not protection.placement.step_noise or training.optimizer != "sgd":
        return 0.0
    falling = Falling(training, round_, case.assembly.config.federation.rounds)
    steps, reach, square = planned_steps(units, training), 0.0, 0.0
    for step in reversed(range(steps)):
        reach = falling.left(step / steps) + falling.settings.momentum * reach
        square += reach**2
    length = case.seen.lr.get(round_, training.rate) * math.sqrt(square)
    return length * protection.mechanism.std(protection.clip_norm) / batch_sampler(units, training).expected


def _units(case: Case, client: str) -> int:
    """The number of a client's examples, or of the persons that privacy protects; 0 for a dummy."""
    parts = case.assembly.problem
    return dict(zip(parts.names, parts.units, strict=True)).get(client, 0)


def sum_noise(case: Case, one: Summed) -> float:
    """The noise of a sum of updates, before the server's own noise. Shares of noise include their rounding.

    Which clients are in a sum may be unknown, so the variance of noise in their steps is the mean over all clients.
    """
    protection = case.assembly.protection
    if protection.shares is not None:
        return protection.shares.std(protection.clip_norm, Layout.of(one.total).size, one.clients)
    counts = Counter(case.assembly.problem.units)
    variance = sum(clients * update_noise(case, units, one.round) ** 2 for units, clients in counts.items())
    return math.sqrt(one.clients * variance / counts.total())


def grid_noise(case: Case, one: Summed) -> float:
    """The noise of rounding contributions to the grid of the run's masked sums: uniform, of variance w^2 / 12 for each, with w
    the width of the grid. 0 without masks, and with shares of noise (`sum_noise`).
    """
    masks = case.assembly.masks
    if masks is None:
        return 0.0
    encoding = masks.sums.terms.encoding(Layout.of(one.total).size, case.assembly.protection.clip_norm)
    if not isinstance(encoding, Rounded):
        return 0.0
    return encoding.most / encoding.codec.scale * math.sqrt(one.clients / 12)


def adamw_step(case: Case, one: Update) -> float:
    """The learning rate of an update made by one step of AdamW; 0 for other updates."""
    training = case.assembly.config.training
    plain = training.optimizer == "adamw" and not training.weight_decay
    if not plain or planned_steps(_units(case, one.client), training) != 1:
        return 0.0
    return case.seen.lr.get(one.round, training.rate)


def faster(assembly: Assembly) -> dict[str, float]:
    """The tensors with a different learning rate, and its ratio to the usual one."""
    return dict.fromkeys(assembly.problem.last, assembly.config.training.head_times)


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
    # texts ending with the known token at its position
    ending = [torch.full((1, max(place, 0) + 1), token) for place, token in known]
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


@dataclass(frozen=True)
class Common:
    """The pairs and tokens of public texts without special ones, the most frequent first; ties by the smaller value."""

    pairs: Sequence[Key]
    tokens: Sequence[int]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], first: FirstLayer, special: Collection[int]) -> Common:
        pairs = sorted(key for text in texts for key in truth_of([text], first) if key[1] not in special)
        tokens = sorted(token for text in texts for token in set(text) if token not in special)
        # of equally frequent ones the first comes first
        return cls([one for one, _ in Counter(pairs).most_common()], [one for one, _ in Counter(tokens).most_common()])

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
