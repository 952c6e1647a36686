"""Every attack there is: what it is called, where it comes from, and who can make it.

To add one, write its file with a function run(case, settings) -> Finding, and add its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from attacks.case import Case, Finding, Settings

Run = Callable[["Case", "Settings"], "Finding"]


@dataclass(frozen=True)
class Attack:
    """name: of its module, or module:function. vantage: the weakest that sees enough. shadows: whether it trains reference
    adapters, which takes as long as that many runs. membership: whether it ranks units by how likely they are members.
    directions: whether it can do so where units are canaries of random direction, which learn nothing of their examples.
    """

    name: str
    title: str
    paper: str
    vantage: str
    module: str
    function: str = "run"
    shadows: bool = False
    membership: bool = True
    directions: bool = False

    def run(self, case: Case, settings: Settings) -> Finding:
        return cast("Run", getattr(import_module(self.module), self.function))(case, settings)


ATTACKS = {
    one.name: one
    for one in (
        Attack("loss", "Loss threshold", "Yeom et al. 2018", "outsider", "attacks.loss"),
        Attack(
            "one_run",
            "One-run audit of canaries",
            "Steinke et al. 2023",
            "outsider",
            "attacks.one_run",
            directions=True,
        ),
        Attack("lira", "Likelihood ratio, online", "Carlini et al. 2022", "outsider", "attacks.lira", shadows=True),
        Attack(
            "lira_offline",
            "Likelihood ratio, offline",
            "Carlini et al. 2022",
            "outsider",
            "attacks.lira",
            "run_offline",
            shadows=True,
        ),
        Attack(
            "rmia", "Robust membership inference", "Zarifzadeh et al. 2024", "outsider", "attacks.rmia", shadows=True
        ),
        Attack(
            "round_models",
            "Gradients against steps of rounds",
            "this project",
            "fellow_client",
            "attacks.round_models",
        ),
        Attack(
            "round_losses",
            "Losses over the rounds",
            "Yeom et al. 2018",
            "fellow_client",
            "attacks.round_models",
            "run_losses",
        ),
        Attack(
            "canary_cosine",
            "Canaries of random direction",
            "Andrew et al. 2023",
            "fellow_client",
            "attacks.canary_cosine",
            directions=True,
        ),
        Attack(
            "canary_likelihood",
            "Canary clients, by likelihood",
            "this project",
            "fellow_client",
            "attacks.canary_likelihood",
            directions=True,
        ),
        Attack(
            "sum_inversion",
            "Texts out of the secure sum",
            "Petrov et al. 2024",
            "secure_server",
            "attacks.sum_inversion",
            membership=False,
        ),
        Attack("update_score", "Gradients against single updates", "Zhu et al. 2024", "server", "attacks.update_score"),
        Attack(
            "gradient_inversion",
            "Texts out of one update",
            "Petrov et al. 2024",
            "server",
            "attacks.gradient_inversion",
            membership=False,
        ),
        Attack(
            "label_counts",
            "Labels out of one update",
            "Wainakh et al. 2022",
            "server",
            "attacks.label_counts",
            membership=False,
        ),
    )
}
