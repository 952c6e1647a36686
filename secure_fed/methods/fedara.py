"""FedARA: B E A whose least important ranks are pruned over the rounds.

Wu, Hu, Min and Wang, "Adaptive Rank Allocation for Federated Parameter-Efficient Fine-Tuning of Language Models"
(arXiv 2501.14406). The adapter is `svd_adaptation`'s. All adapted modules together have a budget of ranks, with T the
rounds of the run, t_w `warmup_rounds`, t_f `final_rounds`, b(0) `rank` and b(T) `final_rank` times the number of modules:

    b(t) = b(0) up to t_w,   b(T) + (b(0) - b(T)) (1 - (t - t_w) / (T - t_w - t_f))^3,   b(T) from T - t_f         eq. (7)
    I_i = |E_i| + mean |B_:i| + mean |A_i:|                                                                        eq. (8)
    a rank stays if more than T_h (`vote_threshold`) of the clients have it among the b(t) of largest I            eq. (9)

Pruned ranks never return. Only live ranks train and are sent, in both directions: the state's tensors shrink, and a module
without ranks is skipped.

A vote is 0 or 1 for each live rank, an entry of the contribution like any other, so that secure aggregation can sum it; the
method sees the share of votes (by weight, with federation.weighting = 'examples'). With masks = 'global' clients do not vote:
the server keeps the b(t) ranks of largest I in the mean, at no extra privacy cost where the mean is noised. Under client-level
privacy this is the only way, since votes would need their own noise, and a part of the clip norm.

Settled here: the printed (7) has t - t_w - t_f above the fraction bar, which begins far above b(0) and cannot be meant. Masks
made in round t, counted from 1 as in the paper, have the budget b(t), so that the state after t rounds has that budget. b(t) is
rounded. Ranks of equal importance stay in the order of module and index. Where no rank has enough votes, the rank with most
votes stays; without any votes (an empty cohort), the server decides as with 'global'. The paper's learning rate falls linearly
over the rounds, which is training.lr_schedule = 'linear'; its budget is warmup_rounds = 5 and final_rounds = 50 of 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secure_fed.config import MethodConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter
from secure_fed.learning.models.adapters.triplet import TripletAdapter, importance, kept, triplets
from secure_fed.methods.averaged import TABLE, AveragedTriplet, change, moved, next_state
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.tensors import Layout, Tensors

CARD = Card(
    name="fedara",
    paper="Wu et al., arXiv 2501.14406",
    travels="B, E, A at live ranks, head; up a vote for each rank",
    mean_exact=False,
    options=(*LORA_OPTIONS, "final_rank", "warmup_rounds", "final_rounds", "vote_threshold", "masks"),
    memoryless="its tensors shrink, so the means of two rounds are of other ranks",
    needs_means="it counts the clients' votes",
    reach=TABLE["svd_adaptation"].reach,
)

# A client gets the name of a pass and not the round, and needs the number of ranks to vote for: the pass's name ends in it.
_VOTING = f"{CHANGE} and votes for "
_VOTES = ".votes"
# Shares of votes that differ by no more than this are equal: means are rounded, masked sums more than plain ones.
_ROUNDING = 1e-5
_FEW = 8  # with fewer rounds, 2 warm-up and 5 final rounds leave none


def build(run: RunConfig) -> FedAra:
    method = run.method
    votes = _by_votes(run)
    last = method.final_rank or -(-method.rank // 4)
    if last > method.rank:
        wrong = ConfigError(f"method.final_rank = {last} is above method.rank = {method.rank}, the starting rank")
        raise wrong.about("method.final_rank", last, "at most method.rank")
    few = (rounds := run.federation.rounds) < _FEW
    warmup = (rounds // 4 if few else 2) if method.warmup_rounds is None else method.warmup_rounds
    final = (rounds // 3 if few else 5) if method.final_rounds is None else method.final_rounds
    if warmup + final >= rounds:
        raise ConfigError(
            f"method.warmup_rounds = {warmup} and method.final_rounds = {final} leave none of "
            f"federation.rounds = {rounds} for reducing ranks: lower them, or raise federation.rounds"
        ).about("method.warmup_rounds", warmup, "below federation.rounds with method.final_rounds")
    budget = Budget(method.rank, last, warmup, final, rounds)
    return FedAra(TripletAdapter(LoraAdapter.of(method)), CARD, budget, method.vote_threshold if votes else None)


def _by_votes(run: RunConfig) -> bool:
    """Whether clients vote; refuses settings that would falsify votes, or that have no effect without votes."""
    method, by_client = run.method, run.privacy.unit == "client"
    if method.masks == "votes" and by_client:
        raise ConfigError(
            "method.masks = 'votes' is refused with privacy.unit = 'client', where votes would need noise of their own: use "
            "'global', which chooses ranks from noised tensors"
        ).about("method.masks", method.masks, "global with privacy.unit = 'client'")
    votes = method.masks == "votes" or (method.masks == "auto" and not by_client)
    if votes and run.federation.server_rate != 1:
        raise ConfigError(
            f"federation.server_lr = {run.federation.server_rate:g} would scale the votes of method.name = 'fedara': leave "
            "it at 1, or set method.masks = 'global'"
        ).about("federation.server_lr", run.federation.server_rate, "1 with votes")
    masked = run.secure_aggregation
    if votes and masked.enabled and masked.range < 1:
        raise ConfigError(
            f"secure_aggregation.range = {masked.range:g} is below 1, the value of a vote of method.name = 'fedara': set it to "
            "1 or more, or set method.masks = 'global'"
        ).about("secure_aggregation.range", masked.range, "at least 1")
    if not votes and method.vote_threshold != MethodConfig().vote_threshold:
        raise ConfigError(
            f"method.vote_threshold = {method.vote_threshold:g} has no effect without votes (method.masks = 'global', or "
            "privacy.unit = 'client'): leave it out"
        ).about("method.vote_threshold", method.vote_threshold, "unset without votes")
    return votes


@dataclass(frozen=True)
class Budget:
    """The number of ranks of all modules together after each round; `first` and `last` are averages for one module."""

    first: int
    last: int
    warmup: int
    final: int
    rounds: int

    def ranks(self, finished: int, modules: int) -> int:
        """b(t), with t = `finished`; it never rises."""
        whole, least = self.first * modules, self.last * modules
        if finished <= self.warmup:
            return whole
        if finished >= self.rounds - self.final:
            return least
        left = 1 - (finished - self.warmup) / (self.rounds - self.warmup - self.final)
        return least + round((whole - least) * left**3)


@dataclass(frozen=True)
class FedAra(AveragedTriplet):
    """Averages B, E, A and the head, and prunes ranks. threshold: the share of votes; None where the server decides."""

    budget: Budget
    threshold: float | None

    def settings(self, rounds: int) -> dict[str, Any]:
        """The phases of the budget, fixed so that resuming with more rounds does not move them."""
        return {"warmup_rounds": self.budget.warmup, "final_rounds": self.budget.final}

    def rewritten(self, tensors: Tensors) -> tuple[str, ...]:
        """All triplets: the server takes ranks out of them."""
        return tuple(name for triplet in triplets(tensors) for name in (triplet.a, triplet.e, triplet.b))

    def plan(self, state: State) -> RoundPlan:
        names, stay = tuple(state.tensors), self._to_stay(state)
        voting = stay is not None and self.threshold is not None
        return RoundPlan(names, names, (f"{_VOTING}{stay}" if voting else CHANGE,))

    def layout(self, state: State, pass_name: str) -> Layout:
        votes = ((vote, state.tensors[e].shape) for vote, e in _ballots(state.tensors, pass_name).items())
        return Layout(tuple(sorted([*Layout.of(state.tensors).entries, *((n, tuple(shape)) for n, shape in votes)])))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        sent = change(before, after)
        if pass_name == CHANGE:
            return sent
        chosen = foremost(importance(after), int(pass_name.removeprefix(_VOTING)))
        ballots = _ballots(before, pass_name)
        return sent | {module + _VOTES: mask.float() for module, mask in chosen.items() if module + _VOTES in ballots}

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        (mean,) = means.values()
        votes = {name.removesuffix(_VOTES): mean.tensor(name) for name in mean if name.endswith(_VOTES)}
        trained = moved(state.tensors, mean.without(module + _VOTES for module in votes))
        stay = self._to_stay(state)
        if stay is None:
            return next_state(state, trained)
        scores = importance(trained)
        if self.threshold is None or all(bool((share <= _ROUNDING).all()) for share in votes.values()):
            return next_state(state, kept(trained, foremost(scores, stay)))
        shares = {module: votes.get(module, torch.zeros(0)) for module in scores}
        return next_state(state, kept(trained, elected(shares, self.threshold)))

    def reported(self, means: Mapping[str, Tensors], following: State) -> dict[str, float]:
        """The number of ranks that are left after the round."""
        tensors = following.tensors
        return {"ranks": float(sum(tensors[found.e].shape[0] for found in triplets(tensors)))}

    def admits(self, round_: int, initial: Tensors, tensors: Tensors) -> bool:
        """Whether the names are the same, each module has one number of ranks in A, E and B that is at most the initial
        number, and the total is possible after `round_` rounds, also in a run that was resumed with more rounds.
        """
        if set(tensors) != set(initial):
            return False
        found = triplets(initial)
        expected = {name: tuple(initial[name].shape) for name in initial}
        for module in found:
            (_, n), (m, _) = expected[module.a], expected[module.b]
            rank = min(*tensors[module.e].shape[:1], *expected[module.e]) if len(tensors[module.e].shape) == 1 else 0
            expected |= {module.a: (rank, n), module.e: (rank,), module.b: (m, rank)}
        least, most = self._limits(round_, len(found))
        total = sum(expected[module.e][0] for module in found)
        return least <= total <= most and all(tuple(tensors[name].shape) == expected[name] for name in tensors)

    def _to_stay(self, state: State) -> int | None:
        """The budget after this round; None as long as it is all ranks."""
        modules = len(triplets(state.tensors))
        stay = self.budget.ranks(state.round + 1, modules)
        return stay if stay < self.budget.first * modules else None

    def _limits(self, finished: int, modules: int) -> tuple[int, int]:
        """The fewest and the most ranks that may be left, also in a run that was resumed with more rounds."""
        whole, now = self.budget.first * modules, self.budget.ranks(finished, modules)
        if finished <= self.budget.warmup:
            return whole, whole
        if self.threshold is None:
            return self.budget.last * modules, now
        # Each client has b(t) votes, so no more than b(t) / T_h ranks can have a share of votes above T_h.
        return 1, min(whole, int(now / self.threshold)) if self.threshold else whole


def foremost(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The entries among the `count` largest of all, the first of equals: (k,) booleans by module."""
    order = torch.cat(list(scores.values())).argsort(descending=True, stable=True)[:count]
    chosen = torch.zeros(sum(map(len, scores.values())), dtype=torch.bool)
    chosen[order] = True
    return dict(zip(scores, chosen.split([len(score) for score in scores.values()]), strict=True))


def elected(shares: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """The ranks with a share of votes above `threshold`, or the rank with most votes: (k,) booleans by module."""
    chosen = {module: share > threshold + _ROUNDING for module, share in shares.items()}
    return chosen if any(bool(mask.any()) for mask in chosen.values()) else foremost(shares, 1)


def _ballots(tensors: Tensors, pass_name: str) -> dict[str, str]:
    """{name of the votes in this pass: name of their E}."""
    if pass_name == CHANGE:
        return {}
    return {found.module + _VOTES: found.e for found in triplets(tensors) if tensors[found.e].shape[0]}
