"""AdaMix (Wang et al., 2022, arXiv 2205.12410): several bottlenecks behind every feed-forward, of which each pass of training
takes one at random (section 3.1), and which are merged into their mean otherwise (section 3.3).

    local loss of an example = task loss of pass a + 1/2 (KL(p_a || p_b) + KL(p_b || p_a))      (`consistency.py`)

with a and b two passes, each with its own random choice of experts, and p their predicted distributions (section 3.2). The
experts of a place share their upper layer (section 3.4), as in the authors' settings, so there are M lower layers. All are
averaged, expert by expert.

Guarantee: the mean of the parameters is exact. Experts are drawn for a whole pass, independently of its examples. For
example-level privacy each example has its own pass (`passes.tried`): with a shared draw, the examples that share it
would depend on the other examples.

Deviations. The upper layers start at zero, so that the adapted model starts equal to the original. Clients send experts
unmerged: they are merged where the model is used, so that experts stay different over the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.inserted import Mixtures
from secure_fed.learning.tasks.task import Loss
from secure_fed.methods.averaging import Averaged
from secure_fed.methods.consistency import consistent
from secure_fed.methods.method import Card

BOTTLENECK = 16

CARD = Card(
    name="adamix",
    paper="Wang et al., arXiv 2205.12410",
    travels="the experts' down, shared up, head",
    mean_exact=True,
    options=("bottleneck", "experts"),
)


def build(run: RunConfig) -> AdaMix:
    return AdaMix(Mixtures(run.method.bottleneck or BOTTLENECK, run.method.experts), CARD, run.data.task)


@dataclass(frozen=True)
class AdaMix(Averaged):
    """Averages the experts and the head; the loss makes two random passes agree."""

    task: str = "classification"

    def objective(self, loss: Loss) -> Loss:
        return consistent(loss, self.task)
