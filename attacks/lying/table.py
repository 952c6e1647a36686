"""The setting of a lying server's trials: a federation, and texts that are drawn afresh for every trial.

The victim and the other clients of a sum get texts from one part; the server gets public texts from another part. So trials are
independent, except that they share the federation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from attacks.adversary.active import LyingServer
from attacks.adversary.case import Inapplicable
from attacks.lying import membership
from attacks.lying.head import Head
from secure_fed.tensors.tensors import Tensors

CANDIDATES, PUBLIC, FEWEST = 1000, 1000, 100


@dataclass
class Table:
    """A lying server, and the texts for trials.

    each: the number of texts of a client. candidates: the texts that clients may have; inputs: their inputs to the head.
    public: other texts of the same kind, with their inputs. nulls: the number of simulated clients for a membership verdict.
    inside: whether the victim had the target in the last trial with a target, which alternates. With masks the server reads
    sums, else single contributions.
    """

    server: LyingServer
    head: Head
    each: int
    candidates: list[Any]
    inputs: Tensor
    public: list[Any]
    public_inputs: Tensor
    rng: np.random.Generator
    nulls: int = membership.NULLS
    inside: bool = False

    @classmethod
    def laid(cls, server: LyingServer, each: int, seed: int) -> Table:
        """Texts of the test set: half for clients, half public, up to a thousand each."""
        texts, rng = list(server.assembly.problem.test), np.random.default_rng(seed)
        order = rng.permutation(len(texts))
        cut = min(CANDIDATES, len(texts) // 2)
        if cut < FEWEST:
            raise Inapplicable(
                f"{len(texts)} test examples are too few: a lying server needs {2 * FEWEST} to prepare; give a larger "
                "data.test, or for the built-in notes more data.test_examples"
            )
        held, public = ([texts[i] for i in part] for part in (order[:cut], order[cut : cut + PUBLIC]))
        head = Head.of(server, held[0])
        return cls(server, head, each, held, head.inputs(server, held), public, head.inputs(server, public), rng)

    @property
    def adamw(self) -> bool:
        return self.server.assembly.config.training.optimizer == "adamw"

    @property
    def cohort(self) -> list[int]:
        """The clients of a sum, the victim first; without masks, the victim alone."""
        assembly = self.server.assembly
        return assembly.server.draw(self.server.round) if assembly.masks else [0]

    def flip(self) -> bool:
        """Whether the victim has the target in this trial."""
        self.inside = not self.inside
        return self.inside

    def deal(self) -> list[int]:
        """Indices of the candidates that the victim has in a trial."""
        return [int(one) for one in self.rng.choice(len(self.candidates), self.each, replace=False)]

    def answer(self, tensors: Tensors, held: Sequence[int], told: Tensors | None = None) -> tuple[Tensors, int]:
        """The contribution or sum that the server reads when the victim has these candidates, and the number of clients in it.

        told: tensors for the victim alone; then the server reads a sum, with masks or without.
        """
        texts, cohort = [self.candidates[one] for one in held], self.cohort
        if told is None and len(cohort) == 1:
            return self.server.answer(0, tensors, texts), 1
        if len(cohort) == 1:
            cohort = list(range(min(_OPEN_SUM, self.server.clients)))
        held_by = {one: texts if one == cohort[0] else self._of_others(held) for one in cohort}
        told_to = None if told is None else {cohort[0]: told}
        return self.server.summed(cohort, tensors, told_to, held_by), len(cohort)

    def null_answers(self, tensors: Tensors) -> list[Tensors]:
        """`nulls` simulations of the contribution or sum that the server reads if every client has public texts.

        Every sum has its own clients. If sums shared clients, the client with the largest score would be in several, and a real
        sum would exceed all of them too easily.
        """
        people = len(self.cohort)

        def answer() -> Tensors:
            return self.server.answer(0, tensors, self._of_public())

        if people == 1:
            return [answer() for _ in range(self.nulls)]
        return [self.server.simulated_sum([answer() for _ in range(people)]) for _ in range(self.nulls)]

    def usual(self, tensors: Tensors, clients: int) -> Tensors:
        """The simulated sum of `clients` clients with public texts, without noise: the server's expectation for others."""
        total = self.server.replayed(0, tensors, self._of_public())
        for _ in range(clients - 1):
            total = total + self.server.replayed(0, tensors, self._of_public())
        return total

    def _of_public(self) -> list[Any]:
        return [self.public[one] for one in self.rng.choice(len(self.public), self.each, replace=False)]

    def _of_others(self, held: Sequence[int]) -> list[Any]:
        rest = np.setdiff1d(np.arange(len(self.candidates)), held)
        return [self.candidates[one] for one in self.rng.choice(rest, self.each, replace=False)]


_OPEN_SUM = 10  # clients in a sum without masks
