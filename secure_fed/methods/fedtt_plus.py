"""FedTT+: of each tensor train, three cores train in a round: the first, the last, and one between, by turns.

Ghiasvand et al. (arXiv 2410.13097), section 4.3 and algorithm 2. With one core moving, the mean of clients' trains is the train
of the mean core; with three it is closer to it than with all J. In round t, counted from 0, a train of J cores moves

    G_1, G_r, G_J        r = 2 + (t mod (J - 2))

and the head trains as ever. Clients send the trained cores. The server sends all cores that have changed so far, since a client
may be drawn for the first time in any round. A train of one or two cores moves whole.

Deviations: line 3 of the algorithm asks for mod(t, J - 2) = r - 1, by which r would be 1 to J - 2 and core J - 1 never trained,
against the set {2, .., J - 1} of the text. The train on the head's square layer is added to its frozen weight, as in FedTT
(`fedtt.py`). The adapters have no biases: the algorithm trains cores alone.

Counts a round, at rank 5: on DeBERTa-base 13 440 or 18 240 in the adapters, 15 040 on average, and 320 in the head's train: the
0.02M printed, without biases. On RoBERTa-large, 1024 x 64 as [8, 8, 16, 8, 8], 26 880 where r is 2, and 27 240 with the head's
train: the 27K of Table 8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.tensor_train import CORE, NAME, TensorTrains, frozen
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card, RoundPlan, State
from secure_fed.tensors.tensors import Tensors

CARD = Card(
    name="fedtt_plus",
    paper="Ghiasvand et al., arXiv 2410.13097, algorithm 2",
    travels="up cores 1, r and J of each train, r by turns, and the head; down all that moved so far",
    mean_exact=False,
    options=("rank", "bottleneck"),
    memoryless="each round moves other cores, so the means of two rounds are of other tensors",
    lr=1.5e-2,
)

_CORE = re.compile(rf"(.*\b{NAME}(?:\.\w+)?){re.escape(CORE)}(\d+)")


def build(run: RunConfig) -> FedTtPlus:
    return FedTtPlus(TensorTrains(run.method.rank, run.method.bottleneck or 64, biases=False), CARD)


@dataclass(frozen=True)
class FedTtPlus(Averaged):
    """Averages the head and the round's cores."""

    def trained(self, state: State) -> Tensors:
        return state.tensors.select(moving(state.tensors, [state.round]))

    def plan(self, state: State) -> RoundPlan:
        """The server sends all cores that have changed. After as many rounds as there are cores each has trained, so earlier
        rounds add none.
        """
        most = sum(_CORE.fullmatch(name) is not None for name in state.tensors)
        rounds = range(max(0, state.round - most), state.round + 1)
        return RoundPlan(trainable=tuple(self.trained(state)), down=moving(state.tensors, rounds))


def turn(cores: int, round_: int) -> tuple[int, ...]:
    """The cores of a train of so many that move in a round, counted from 1 as in the paper."""
    if cores < 3:
        return tuple(range(1, cores + 1))
    return 1, 2 + round_ % (cores - 2), cores


def moving(tensors: Tensors, rounds: Iterable[int]) -> tuple[str, ...]:
    """The names that move in any of these rounds: the head, and the cores whose turn it is."""
    cores: dict[str, int] = {}
    for name in tensors:
        if found := _CORE.fullmatch(name):
            cores[found[1]] = max(cores.get(found[1], 0), int(found[2]) + 1)
    rest = frozen(tensors)
    turns = {train: {core for t in rounds for core in turn(count, t)} for train, count in cores.items()}
    return tuple(
        name
        for name in tensors
        if name not in rest and (not (found := _CORE.fullmatch(name)) or int(found[2]) + 1 in turns[found[1]])
    )
