"""The protection of a run: its mechanism, the place of its noise, and the plan with its guarantee.

With noise on the sum (`placement.SUM`) nothing may reveal who took part or how many: a reply has no loss and the weight one,
and records contain expected sizes. With shares of noise everybody sees who took part, and no amplification is used; or, with a
hidden cohort, everybody takes part, and each client tosses its own coin for whether to train.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from privacy.correlation import INDEPENDENT
from privacy.entropy import Entropy, Floats, SystemEntropy
from privacy.mechanisms import Mechanism, Named, NoMechanism
from secure_fed.learning.audit_pool.phantoms import Count
from secure_fed.methods.method import Method, State
from secure_fed.rounds.noise.correlated import CorrelatedNoise
from secure_fed.rounds.noise.own_mechanism import require_whole
from secure_fed.rounds.noise.placement import NOWHERE, Placement
from secure_fed.tensors.low_rank import in_own_factors
from secure_fed.tensors.tensors import Layout, Tensors

if TYPE_CHECKING:
    from privacy.distributed import DistributedGaussian
    from privacy.plan import Plan


@dataclass(frozen=True)
class Protection:
    """The mechanism of a run, with the plan that contains its guarantee.

    mechanism: bounds and noises; with shares of noise it only bounds. given: the mechanism is the user's own. shares: the
    mechanism of the shares. clip_norm: of the first round. entropy: the source of noise and secret coins. hidden: each client
    tosses its own coin for whether to train, and nobody else learns the outcome. audited: units are held out for an audit. The
    share depends on the number of units, so the guarantee takes that number as public. correlated: the server's noise, where a
    round's noise depends on earlier rounds. phantoms: units beside the real ones that are nobody's data. beside: the number of
    phantoms expected in a sum.
    """

    unit: str = "none"
    placement: Placement = NOWHERE
    mechanism: Mechanism = NoMechanism()  # noqa: RUF009 - it has no state
    shares: DistributedGaussian | None = None
    clip_norm: float = math.inf
    entropy: Entropy = SystemEntropy()  # noqa: RUF009 - it has no state
    plan: Plan | None = None
    hidden: bool = False
    audited: bool = False
    phantoms: Count = Count()  # noqa: RUF009 - it has no state
    beside: int = 0
    given: bool = False
    correlated: CorrelatedNoise | None = None

    @property
    def contribution_mechanism(self) -> Mechanism:
        """The mechanism on contributions and their sum. With noise in training steps it changes neither."""
        return NoMechanism() if self.placement.step_noise else self.mechanism

    @property
    def hides_cohort(self) -> bool:
        """Whether the guarantee requires that nobody learns who took part."""
        return self.placement.secret_cohort

    def layout(self, method: Method, state: State, pass_name: str, personal: Collection[str]) -> Layout:
        """The layout of a pass's sum: the method's tensors without personal ones, and the mechanism's counters."""
        entries = [entry for entry in method.layout(state, pass_name).entries if entry[0] not in personal]
        return Layout(tuple(sorted([*entries, *((name, ()) for name in self.contribution_mechanism.counters)])))

    def measurable(self, contribution: Tensors) -> Tensors:
        """A contribution in a form whose norm shows all of it: products in own factors, or dense for norms other than L2."""
        own = in_own_factors(contribution)  # otherwise a cancellation between its factors would distort the norm
        return own if self.contribution_mechanism.order == 2 else own.dense()

    def sum_noise_std(self, clip_norm: float, round_: int) -> float:
        """The standard deviation of the noise that the server adds to each coordinate of a round's sum."""
        spread = self.correlated.spread(round_) if self.correlated else 1.0
        return self.mechanism.std(clip_norm) * spread

    def noise_weights(self, rounds: int) -> Floats:
        """(rounds,) the noise of round t is sum_j weights[j] Z_(t - j), Z_t the independent noise that round t adds."""
        return (self.correlated.correlation if self.correlated else INDEPENDENT).weights(rounds)

    def noised(self, total: Named, clip_norm: float, round_: int, pass_name: str) -> dict[str, Tensor]:
        """The sum of a pass with the server's noise."""
        if self.correlated is not None:
            return self.correlated.noised(total, self.mechanism.std(clip_norm), round_, pass_name)
        noised = self.mechanism.noised(total, clip_norm, self.entropy.stream("sum", round_, pass_name))
        if self.given:
            require_whole(self.mechanism, total, noised)
        return noised

    def mean_noise_std(self, clip_norm: float, cohort: float, dim: int) -> float:
        """The standard deviation of the noise on each of `dim` coordinates of a round's mean; 0 without noise.

        cohort: the expected number of clients. Under correlated noise: of the round's new, independent noise alone
        (`noise_weights`). With shares of noise: as if no client had dropped out.
        """
        if self.shares is not None:
            return self.shares.std(clip_norm, dim, self.shares.contributors - self.beside) / cohort
        if self.placement.server_noise:
            return self.mechanism.std(clip_norm) / cohort
        std = self.contribution_mechanism.std(clip_norm)
        return std * math.sqrt(cohort + self.beside) / cohort

    def noise_over_way(self, cohort: float, dim: int, rounds: int) -> float:
        """The length of the noise in the sum of all rounds' means, relative to the longest such sum of clipped means."""
        std = self.mean_noise_std(self.clip_norm, cohort, dim)
        # The part of a round's independent noise that remains in the end: the sum of its weights up to then.
        left = self.noise_weights(rounds).cumsum()
        return std * math.sqrt(dim * float(left @ left)) / (rounds * self.clip_norm)
