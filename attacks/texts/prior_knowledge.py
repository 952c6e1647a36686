"""The adversary's knowledge before an inversion of updates: first layers, public texts, and settings of the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attacks.adversary.case import Case, Inapplicable
from attacks.texts.factor_changes import Sent
from attacks.texts.first_layer import FirstLayer, NoFirstLayerError, first_layer
from attacks.texts.recovery import Recovery, recover
from attacks.texts.span import Key
from attacks.texts.token_scores import CERTAIN, Common, known_tokens, score, texts_of, truth_of
from secure_fed.learning.models.adapters.lora import scaling_of
from secure_fed.learning.tasks.chat_template import template_tokens
from secure_fed.learning.training.private_steps import batch_sampler
from secure_fed.learning.training.schedule import Falling, planned_steps
from secure_fed.rounds.masked.encoding import Rounded
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.recording import Summed, Update
from secure_fed.tensors.layout import Layout

POSITIONS = 128
_SEEN_TEXTS = 500


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
        """The tokens of these clients' texts, for scoring alone; phantoms have none."""
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
    assembly = case.assembly
    public = texts_of(_shown(case))
    if not public or not any(public):
        raise Inapplicable("inverting updates needs test examples with one list of whole-number input_ids each")
    longest = min(max(map(len, public)), POSITIONS)
    model = assembly.objective.load(assembly.initial.tensors)
    try:
        first = first_layer(model, list(assembly.initial.tensors), longest, _types(case))
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

    from the noise z C in each of T steps of SGD on a client with n `units`, q n of which are expected in a step. The effect of
    noise on later gradients is not counted. The head's last layer, whose rate differs, is not searched for texts.

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
    length = case.seen.lr.get(round_, training.rate) * _length(falling, planned_steps(units, training))
    return length * protection.mechanism.std(protection.clip_norm) / batch_sampler(units, training).expected


def _units(case: Case, client: str) -> int:
    """The number of a client's examples, or of the groups that privacy protects; 0 for a phantom."""
    parts = case.assembly.problem
    return dict(zip(parts.names, parts.units, strict=True)).get(client, 0)


def _length(falling: Falling, steps: int) -> float:
    """length(T) = sqrt(sum_t (sum_{s >= t} f_s m^(s - t))^2): the change by T independent gradients of variance one, in SGD
    with momentum m, whose rate in step s is f_s times the round's.
    """
    reach, square = 0.0, 0.0
    for step in reversed(range(steps)):
        reach = falling.left(step / steps) + falling.settings.momentum * reach
        square += reach**2
    return math.sqrt(square)


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


def _shown(case: Case) -> list[Any]:
    """Some public examples. A user's data set has a length and items, but no slices."""
    return [case.population[index] for index in range(min(len(case.population), _SEEN_TEXTS))]


def _types(case: Case) -> tuple[int, ...]:
    """The token types in public texts."""
    examples = [one for one in _shown(case) if "token_type_ids" in one]
    return tuple(sorted({int(kind) for one in examples for kind in one["token_type_ids"]}))
