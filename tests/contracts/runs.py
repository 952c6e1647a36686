"""A federation of four clinics with a small BERT, for any method, so that one contract is tested on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from privacy.entropy import SeededEntropy
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.methods import METHODS, card
from secure_fed.methods.method import State
from secure_fed.rounds.transport import Reply, Request
from secure_fed.tensors.tensors import Tensors

SIZES = (6, 9, 7, 8)
ROUNDS = 2
VOCABULARY = 30
# Options that make a method small, and let its later phase begin within two rounds.
OPTIONS: dict[str, dict[str, Any]] = {
    "fra_then_ffa": {"switch_round": 1},
    "fedara": {"final_rank": 1, "warmup_rounds": 1, "final_rounds": 0},
    "fedpower": {"oversampling": 1, "power_iterations": 1},
    "fedask": {"oversampling": 1},
    "prompt_tuning": {"prompt_length": 3},
    "prefix_tuning": {"prompt_length": 3},
    "p_tuning": {"prompt_length": 3},
    "c2a": {"context_dim": 3, "hyper_dim": 4, "bottleneck": 4},
    "compacter": {"kronecker": 2},
}
PRIVACY: dict[str, dict[str, Any]] = {
    "none": {},
    "client": {"privacy.unit": "client", "privacy.noise_multiplier": 0.5, "privacy.clip_norm": 0.5},
    "example": {"privacy.unit": "example", "privacy.noise_multiplier": 0.5, "privacy.clip_norm": 0.5},
}
SUMS: dict[str, dict[str, Any]] = {"plain": {}, "masked": {"secure_aggregation.enabled": True}}
CELLS = [(name, unit, how) for name in METHODS for unit in PRIVACY for how in SUMS]
# One method of every class (`test_methods` checks that none is missing): nine more methods are an `Averaged` of other modules.
OF_A_CLASS = (
    *("bitfit", "adamix", "fedlora", "ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "svd_adaptation", "fedara"),
    *("fedtt", "fedtt_plus", "c2a", "fedsvd", "fedask", "fedpower"),
)
WAYS = ("fedlora", "fra_lora", "fedask")  # a method of each way of sending: changes, products, and several sums


def supported(name: str, unit: str) -> bool:
    return unit == "none" or unit in card(name).units


def quick(name: str, unit: str, how: str) -> bool:
    """Whether a cell is tested on every change: one method of every class, alternately without and with client privacy.

    The methods of WAYS are tested behind masks too. Per-example gradients take longest, and have tests of their own.
    """
    mine = ("none", "client")[OF_A_CLASS.index(name) % 2] if name in OF_A_CLASS else ""
    return unit == mine and (how == "plain" or name in WAYS)


def turn(name: str, unit: str) -> str:
    """Plain or masked sums: under every privacy unit, each for half of the methods."""
    return tuple(SUMS)[([*METHODS].index(name) + [*PRIVACY].index(unit)) % 2]


def settings(name: str, unit: str = "none", how: str = "plain", **more: Any) -> RunConfig:
    own = {"rank": 2, "bottleneck": 4, **OPTIONS.get(name, {})}
    read = {option: value for option, value in own.items() if option in card(name).options}
    values = {
        "method.name": name,
        **{f"method.{option}": value for option, value in read.items()},
        "federation.rounds": ROUNDS,
        "federation.cohort": len(SIZES),
        "training.steps": 2,
        "training.batch_size": 4,
        "training.lr": 0.02,
        "training.optimizer": "sgd",
        "training.together": 1,  # trying out common passes takes time for each model; `after_a_round` does
        "privacy.delta": 1e-3 if unit != "none" else 1e-5,
        **PRIVACY[unit],
        **SUMS[how],
        **more,
    }
    return RunConfig().replace({tuple(key.split(".", 1)): value for key, value in values.items()})  # type: ignore[misc]


def model() -> BertForSequenceClassification:
    """Two layers of width 16, with weights large enough for gradients to reach the first; no dropout: it depends on padding."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY, num_labels=3, pad_token_id=0, max_position_embeddings=24, **shape, **still
            )
        )


def examples(seed: int, count: int) -> list[dict[str, Any]]:
    """Texts of 4 to 9 words; the second word determines the label."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        words = torch.randint(5, VOCABULARY, (4 + number % 6,), generator=generator)
        words[1] = 2 + number % 3
        found.append({"input_ids": words.numpy(), "labels": number % 3})
    return found


def federation(config: RunConfig, **own: Any) -> Federation:
    """A federation with noise and coins from a seed, so that a run can be repeated."""
    train = [examples(seed + 1, size) for seed, size in enumerate(SIZES)]
    return Federation(config, model=model(), train=train, test=examples(99, 12), entropy=SeededEntropy(3), **own)


@dataclass
class Events:
    """The events of a run, in order.

    log: ("charge", round, pass), ("ask", client, round, pass) or ("allow", client, round, count).
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    means: list[Mapping[str, Tensors]] = field(default_factory=list)
    replies: dict[tuple[int, str], dict[int, Reply]] = field(default_factory=dict)
    requests: dict[tuple[int, str], dict[int, Request]] = field(default_factory=dict)

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.log if event[0] == kind]


def watch(built: Federation) -> Events:
    """Record every charge of the budget, and every request to a client with its reply, masked or not."""
    events = Events()

    def charging(charge: Callable[[int, str], None]) -> Callable[[int, str], None]:
        def charged(round_: int, pass_name: str) -> None:
            charge(round_, pass_name)
            events.log.append(("charge", round_, pass_name))

        return charged

    def handling(handle: Callable[[Request], Reply], client: int) -> Callable[[Request], Reply]:
        def handled(request: Request) -> Reply:
            events.log.append(("ask", client, request.round, request.pass_name))
            reply = handle(request)
            place = request.round, request.pass_name
            events.requests.setdefault(place, {})[client] = request
            events.replies.setdefault(place, {})[client] = reply
            return reply

        return handled

    method = _Watched(built.assembly.server.method, events.means)
    charge = charging(built.assembly.server.charge)
    server = replace(built.assembly.server, charge=charge, method=method)  # type: ignore[arg-type]
    built.assembly = replace(built.assembly, server=server)
    built.callbacks.append(SimpleNamespace(on_run_begin=lambda *given: events.means.clear()))  # of the probe
    for client in built.assembly.clients:
        client.handle = handling(client.handle, client.index)  # type: ignore[method-assign]
        setup = client._setup
        client._setup = replace(setup, allowance=_allowing(setup.allowance, events))
    return events


class _Watched:
    """A method that records the means passed to `apply`."""

    def __init__(self, inner: Any, means: list[Mapping[str, Tensors]]) -> None:
        self._inner, self._means = inner, means

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        self._means.append(means)
        after: State = self._inner.apply(state, means, noise_std)
        return after


def _allowing(allowance: Callable[[str, int, int], int], events: Events) -> Callable[[str, int, int], int]:
    def allowed(name: str, count: int, round_: int) -> int:
        granted = allowance(name, count, round_)
        events.log.append(("allow", int(name.rpartition("-")[2]), round_, granted))
        return granted

    return allowed


@dataclass
class States:
    """A callback that keeps the state after every round."""

    after: list[State] = field(default_factory=list)

    def on_round_end(self, record: Mapping[str, Any], state: State) -> None:
        self.after.append(state)


class KilledError(Exception):
    """Stands in for the end of a process."""


@dataclass
class KilledAfter:
    """A callback that raises KilledError after `rounds` rounds."""

    rounds: int

    def on_round_end(self, record: Mapping[str, Any], state: State) -> None:
        if state.round == self.rounds:
            raise KilledError


def logits(built: Federation, tensors: Tensors) -> torch.Tensor:
    """The logits of the model with these tensors, on the test set."""
    network = built.assembly.objective.load(tensors).eval()
    with torch.no_grad():
        problem = built.assembly.problem
        batch = problem.collate([problem.test[i] for i in range(len(problem.test))])
        found: torch.Tensor = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found
