"""The list of attacks: name, paper, and the weakest vantage point that can make each.

To add one, write attacks/NAME.py with a function run(case, settings) -> Finding, and add its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from attacks.adversary.case import Case, Finding, Settings

Run = Callable[["Case", "Settings"], "Finding"]


@dataclass(frozen=True)
class Attack:
    """name: of its module. vantage: the weakest that sees enough. again: stronger ones that see more of what it uses. shadows:
    whether it trains reference adapters, each of which takes as long as the run. membership: whether it ranks units by whether
    they are members. directions: whether it can do so where they are canaries of random direction, which learn no examples.
    """

    name: str
    title: str
    paper: str
    vantage: str
    again: tuple[str, ...] = ()
    shadows: bool = False
    membership: bool = True
    directions: bool = False

    @property
    def module(self) -> str:
        return f"attacks.{self.name}"

    def run(self, case: Case, settings: Settings) -> Finding:
        return cast("Run", import_module(self.module).run)(case, settings)


_LISTED = (
    Attack("loss", "Loss threshold", "Yeom et al. 2018", "outsider"),
    Attack("one_run", "One-run audit of canaries", "Steinke et al. 2023", "outsider", directions=True),
    Attack("lira", "Likelihood ratio, online", "Carlini et al. 2022", "outsider", shadows=True),
    Attack("lira_offline", "Likelihood ratio, offline", "Carlini et al. 2022", "outsider", shadows=True),
    Attack("rmia", "Robust membership inference", "Zarifzadeh et al. 2024", "outsider", shadows=True),
    Attack("round_losses", "Losses over the rounds", "Yeom et al. 2018", "fellow_client"),
    Attack("regression", "Steps explained by gradients", "this project", "fellow_client", again=("server",)),
    Attack(
        "canary_cosine",
        "Canaries of random direction",
        "Andrew et al. 2023",
        "fellow_client",
        again=("secure_server", "server"),
        directions=True,
    ),
    Attack("canary_likelihood", "Canary clients, by likelihood", "this project", "fellow_client", directions=True),
    Attack("sum_inversion", "Texts out of the secure sum", "Petrov et al. 2024", "secure_server", membership=False),
    Attack("update_score", "Gradients against single updates", "Zhu et al. 2024", "server"),
    Attack("gradient_inversion", "Texts out of one update", "Petrov et al. 2024", "server", membership=False),
    Attack("label_counts", "Labels out of one update", "Wainakh et al. 2022", "server", membership=False),
)
ATTACKS = {one.name: one for one in _LISTED}
