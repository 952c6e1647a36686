"""A federation small enough to count by hand: six numbers in, three classes out, three clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from privacy.participation import FixedSize, Sampler
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.methods.averaged import moved, next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.server import Server
from secure_fed.rounds.server_optimizer import ServerOptimizer, Tail
from secure_fed.rounds.sums import OpenSum, Record
from secure_fed.rounds.transport import Reply, Request
from secure_fed.tensors.sums import PlainSum, Summation
from secure_fed.tensors.tensors import Layout, Tensors

Item = dict[str, Any]
NAMES = ("anna", "ben", "cleo", "dora")
# The methods that can adapt the toy's layers. `tests/contracts` runs all methods on a transformer.
METHODS = ("fedlora", "ffa_lora", "fra_lora", "fra_then_ffa")


def by_coins(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with open ones set to secret coins, independent noise and the mean as the server's step."""
    noise = settings.get("privacy.noise", "central")
    coins = noise == "central" or settings.get("privacy.hidden_cohort")
    sampling = "poisson" if coins else "fixed"
    left = {"privacy.noise": noise, "federation.sampling": sampling, "privacy.correlation": "none"}
    left |= {"federation.server_optimizer": "mean", "federation.server_lr": 1.0, "federation.average_last": 1}
    return {**left, "privacy.clip_norm": 1.0, **settings}


def config(settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Three rounds of one step with all clients and no dummies, changed by `settings` ("section.key": value).

    Clients train one after the other: a trial of common passes, one for every model, would take longer than all else here.
    """
    usual = {
        "method.name": "fedlora",
        "method.rank": 2,
        "method.modules_to_save": ["classifier"],
        "federation.rounds": 3,
        "training.steps": 1,
        "training.batch_size": 4,
        "training.lr": 0.05,
        "training.lr_schedule": "constant",
        "training.head_factor": 1.0,
        "training.together": 1,
    }
    chosen = {**usual, **(settings or {})}
    if chosen.get("privacy.unit", "none") != "none":
        chosen = {"evaluation.dummies": 0, **chosen}
    if chosen.get("privacy.unit") == "client":
        chosen = by_coins(chosen)
    return RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]


class Toy(nn.Module):
    """Two layers that an adapter finds, dropout between them, and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query = nn.Linear(6, 8)
        self.dropout = nn.Dropout(dropout)
        self.value = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.value(self.dropout(self.query(x).tanh())).tanh())
        return scores


def model(seed: int = 0, dropout: float = 0.0) -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Toy(dropout)


def weights(model: nn.Module) -> Tensors:
    """Copies of the parameters."""
    return Tensors((name, parameter.detach().clone()) for name, parameter in model.named_parameters())


def examples(seed: int, count: int) -> list[Item]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": int(row[:3].argmax())} for row in x]


def federation(
    settings: Mapping[str, Any] | None = None, *, sizes: Sequence[int] = (5, 8, 11), **own: Any
) -> Federation:
    parts = {
        "model": model(),
        "train": [examples(client + 1, size) for client, size in enumerate(sizes)],
        "test": examples(99, 20),
    }
    return Federation(config(settings), **{**parts, **own})


def same(left: Tensors, right: Tensors) -> bool:
    """Whether both are equal to the bit."""
    return left.to_bytes() == right.to_bytes()


def without_time(records: Sequence[Record]) -> list[Record]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


# A method and a transport without model or training, for tests of the round itself.


_CARD = Card("toy", "", "", True)


@dataclass(frozen=True)
class TwoPasses:
    """Averages `w` in a first pass; in a second one the mean squared distance from that average goes into `spread`."""

    adapter: Any = None
    card: Card = _CARD

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        raise NotImplementedError

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(("w",), ("w",), (CHANGE, "distance"))

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(state.tensors.select(["w"]))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        change = after - before.select(after)
        return change if pass_name == CHANGE else Tensors({"w": (change - means[CHANGE]).tensor("w").square()})

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        tensors = moved(state.tensors, means[CHANGE]) | {"spread": means["distance"].tensor("w")}
        return next_state(state, tensors)


@dataclass(frozen=True)
class OnePass(TwoPasses):
    """Averages `w` in a single pass."""

    def plan(self, state: State) -> RoundPlan:
        return RoundPlan(("w",), ("w",))

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, moved(state.tensors, means[CHANGE]))


@dataclass
class Scripted:
    """A transport whose clients reply with `answer(client, request)`; it notes each pass and the clients it requested."""

    answer: Callable[[int, Request], Reply]
    asked: list[tuple[str, list[int]]] = field(default_factory=list)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[Reply]:
        for request in list(requests.values())[:1]:
            self.asked.append((request.pass_name, list(requests)))
        return (self.answer(client, request) for client, request in requests.items())


def server(
    method: Any,
    sampler: Sampler | None = None,
    *,
    skip_nonfinite: bool = True,
    open_sum: Callable[[Layout], Summation] = PlainSum,
    **changed: Any,
) -> Server:
    usual: dict[str, Any] = {
        "method": method,
        "protection": Protection(),
        "sampler": sampler or FixedSize(len(NAMES), len(NAMES)),
        "optimizer": ServerOptimizer("mean", 1.0, 0.9),
        "names": NAMES,
        "personal": (),
        "seed": 0,
        "charge": lambda round_, pass_name: None,
        "tail": Tail(0, 1),
    }
    summing = OpenSum(NAMES, skip_nonfinite, open_sum)
    return Server(**{**usual, "summing": summing, **changed})


def state(*numbers: float) -> State:
    return State(Tensors({"w": torch.tensor(numbers), "spread": torch.zeros(len(numbers))}))
