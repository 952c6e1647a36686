"""The probe of a private run, before it trains: the loss to which its noise alone takes the model, and if that is hopeless.

Noise may be long and harmless: a large model is flat in most directions. So its harm is measured, and not computed from its
length. The start is moved by the final noise of the plan (`rounds/noise_alone.py`), and its loss is read before and after, on
test rows where these are public, else on made-up texts, which are random tokens. Neither touches private rows: the probe is no
release and costs no privacy.

    chance     the loss of equal scores for all answers: ln K for K classes, ln V for a language model of V tokens
    start      the loss before the noise
    noised     the loss after it

    full       the loss after it at the steps of a run without noise, where the server shortens its steps under this noise
               (`rounds/open_settings.py`): `noised` then shows little harm, and the model learns as much less

A run is hopeless where its noise alone takes the model to chance (`AT_CHANCE`). A new classification head starts there, and
training can lead away from it through much noise. So unless the start was far better (`KNOWING`), the noise must also be
loud: at full steps it takes the loss to at least `LOUD` times the start's. This limit is from runs on the built-in notes
(docs/privacy.md): beyond it less than half of what they can learn was learned.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError, MethodError, ModelError, TrainingError
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import IGNORED, batches
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.training.objective import to_device
from secure_fed.learning.training.pass_shapes import Kinds, length
from secure_fed.learning.training.trials import made_up
from secure_fed.methods.method import State
from secure_fed.rounds.noise_alone import NoiseAlone, StepNoise
from secure_fed.runs import guarantee
from secure_fed.runs.assembly import Assembly

AT_CHANCE, KNOWING = 0.9, 0.5  # of the loss of equal scores
LOUD = 30.0


_CANNOT = (ModelError, MethodError, DataError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)
_ROWS, _TOKENS, _AT_ONCE = 64, 30, 16
_FACTOR, _MOST_TIMES, _HALVINGS = 4.0, 4.0**6, 3
_FEWEST, _WORK = 8, 1e11  # rows; tokens times the model's numbers


@dataclass(frozen=True)
class Probe:
    """The figures of a probe. A loss that is no finite number is infinite.

    unit: the unit that the run protects. rows: the number of rows that the losses are means over. public: whether they are test
    rows, and not made up. full: None where the server's steps are not shortened. enough: the cohort whose noise is not
    hopeless, if the clients grow by the same factor; None where the noise is not hopeless, or no such cohort was found.
    """

    unit: str
    rows: int
    public: bool
    chance: float | None
    start: float
    noised: float
    full: float | None = None
    enough: int | None = None

    @property
    def hopeless(self) -> bool:
        if not math.isfinite(self.noised):
            return True
        if self.chance is None or self.noised < AT_CHANCE * self.chance:
            return False
        loudest = self.noised if self.full is None else self.full
        return self.start < KNOWING * self.chance or loudest >= LOUD * self.start

    def to_dict(self) -> dict[str, Any]:
        """For `result.json`; None for an infinite loss, which JSON lacks."""
        losses = {name: getattr(self, name) for name in ("chance", "start", "noised", "full")}
        return {
            "unit": self.unit,
            **{name: loss if loss is None or math.isfinite(loss) else None for name, loss in losses.items()},
            "shortened": self.full is not None,
            "texts": "test rows" if self.public else "made-up texts",
            "rows": self.rows,
            "hopeless": self.hopeless,
            "enough": self.enough,
        }


def require_worth(figures: Mapping[str, Any], config: RunConfig, *, paid: bool) -> None:
    """Refuse a hopeless run that others pay for, unless the settings ask for it. paid: from a budget that runs share."""
    if not paid or not figures["hopeless"] or config.privacy.even_if_hopeless:
        return
    message = (
        f"{guarantee.noise_in_words(figures)}: {guarantee.hopeless_noise(figures)}; nothing was charged "
        "(privacy.even_if_hopeless = true goes on)"
    )
    raise ConfigError(message).about("privacy.even_if_hopeless", False, "true, or less noise")


def probe(assembly: Assembly) -> Probe | None:
    """The probe of a run before its first round; None without a guarantee, or without rows that the loss can be read on.

    The model has the initial tensors afterwards.
    """
    if assembly.protection.plan is None:
        return None
    losses = _Losses(assembly)
    rows = losses.rows
    if not rows:
        return None
    alone, rate, full = _alone(assembly), assembly.config.federation.server_rate, assembly.usual_rate
    chance, start = losses.of_equal_scores(), losses.start

    def under(times: float) -> Probe:
        """The figures of `times` the noise, under which the server shortens its steps by as much less."""
        slow = min(full, rate / times)
        noised = losses.after(alone, times, slow)
        at_full = losses.after(alone, times, full) if slow < full else None
        return Probe(assembly.config.privacy.unit, len(rows), losses.public, chance, start, noised, at_full)

    try:
        found = under(1.0)
        return (
            replace(found, enough=_enough(lambda times: under(times).hopeless, assembly)) if found.hopeless else found
        )
    finally:
        assembly.objective.load(assembly.initial.tensors)


def _alone(assembly: Assembly) -> NoiseAlone:
    config, problem = assembly.config, assembly.problem
    noised = assembly.protection.placement.step_noise
    steps = StepNoise(config.training, config.federation.rounds, problem.units, problem.last) if noised else None
    return NoiseAlone(assembly.server, assembly.initial, config.federation.rounds, steps)


def _enough(hopeless: Callable[[float], bool], assembly: Assembly) -> int | None:
    """The least cohort found whose noise is not hopeless, where the clients grow by the same factor.

    At equal turns of each client the noise multiplier stays the same, and the noise on a mean falls with the cohort: with its
    square root where each client adds its own.
    """
    power = 0.5 if assembly.protection.placement.local else 1.0
    low, high = 1.0, _FACTOR
    while hopeless(high**-power):
        low, high = high, _FACTOR * high
        if high > _MOST_TIMES:
            return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if hopeless(middle**-power) else (low, middle)
    return math.ceil(high * assembly.server.sampler.expected)


class _Losses:
    """Losses of models on the probe's rows: at most `_ROWS`, spread over the test set, or as many made-up texts.

    There are no rows where the start has no loss on them.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        problem = assembly.problem
        self.public = is_declared(problem.facts["test"]["from"]) and len(problem.test) > 0
        self.rows = _spread(problem.test) if self.public else _made_up(assembly)
        read = np.cumsum([max(1, length(row)) for row in self.rows])
        quickly = int((read * sum(one.numel() for one in problem.model.parameters()) <= _WORK).sum())
        self.rows = self.rows[: max(_FEWEST, quickly)]  # as many, at least, as a model of this size reads in seconds
        self.start = math.inf
        try:
            self.start = self.of(assembly.initial)
        except _CANNOT:  # training says what is wrong with a loss or a text
            self.rows = []

    def of(self, state: State) -> float:
        """The mean loss of a state; infinite where it is no finite number."""
        self._assembly.objective.load(state.tensors)
        found = self._mean()
        return found if math.isfinite(found) else math.inf

    def after(self, alone: NoiseAlone, times: float, rate: float | None) -> float:
        """The mean loss after the noise; infinite where the noised model is not finite."""
        try:
            return self.of(alone.ended(times, rate))
        except TrainingError:
            return math.inf

    def of_equal_scores(self) -> float | None:
        """The mean loss of a model whose scores are all zero; None where the model's output has no scores.

        Row by row, since a language model called with a hook has the scores of all tokens in memory.
        """
        try:
            with _equal_scores(self._assembly.problem.model) as changed:
                found = self._mean(at_once=1)
        except _CANNOT:
            return None
        return found if changed and math.isfinite(found) else None

    @torch.no_grad()
    def _mean(self, at_once: int = _AT_ONCE) -> float:
        problem, objective = self._assembly.problem, self._assembly.objective
        problem.model.eval()
        with objective.reading, rows_together():
            found = [
                problem.loss(problem.model, to_device(batch.inputs, objective.device)).double().cpu().reshape(-1)
                for batch in batches(self.rows, at_once, problem.collate, None)
            ]
        return float(torch.cat(found).mean())


def _spread(rows: Sequence[Any]) -> list[Any]:
    every = max(1, len(rows) // _ROWS)
    return [rows[index] for index in range(0, len(rows), every)][:_ROWS]


def _made_up(assembly: Assembly) -> list[Any]:
    """Random tokens in the columns of the task's examples; none where no such text can be made up.

    Where tokens are learned, the labels are the tokens that the start itself would say next: random ones are as unlikely before
    the noise as after it.
    """
    problem, objective = assembly.problem, assembly.objective
    kinds = Kinds.of(objective, problem.collate)
    pattern = next((own[0] for own in problem.here if len(own)), None)
    if pattern is None or not hasattr(problem.collate, "padded_to"):
        return []
    made = made_up(kinds, kinds.padded(_TOKENS), problem.model, pattern, _ROWS) or []
    says = problem.tokenizer is not None and tasks.build(assembly.config.data).auto == "AutoModelForCausalLM"
    try:
        objective.load(assembly.initial.tensors)
        problem.model.eval()
        with torch.no_grad():
            for item in made if says else ():
                tokens = torch.as_tensor(item["input_ids"])[None].long().to(objective.device)
                likeliest = problem.model(input_ids=tokens).logits[0, :-1].argmax(1)
                item["labels"] = np.array([IGNORED, *likeliest.tolist()])
    except _CANNOT:
        return []
    return made


@contextmanager
def _equal_scores(model: nn.Module) -> Iterator[list[str]]:
    """Within the block the model's scores are zeros. Yields the names of the scores, once the model has been called."""
    found: list[str] = []

    def zeroed(module: nn.Module, given: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            found.append("logits")
            return torch.zeros_like(output)
        made = copy.copy(output)
        values = made if isinstance(made, MutableMapping) else vars(made)
        for name in [name for name, value in values.items() if "logits" in name and isinstance(value, Tensor)]:
            found.append(name)
            if isinstance(made, MutableMapping):
                made[name] = torch.zeros_like(made[name])
            else:
                setattr(made, name, torch.zeros_like(values[name]))
        return made

    handle = model.register_forward_hook(zeroed)
    try:
        yield found
    finally:
        handle.remove()
