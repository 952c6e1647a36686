"""The page of `learns.py`: what each method reaches at its learning rate, beside its peer, and every rate that was tried."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learns_tasks import FORMER, LATER, MEAN, PEERS, SAME, SEARCHED, THIRD, defaults
from timing import machine

from secure_fed.methods import METHODS

Run = dict[str, Any]
RateOf = Callable[[Sequence[Run], str], float | None]
BestOn = Callable[[Sequence[Run], str, str], float | None]
CLOSE = 0.02 + 1e-9  # a method that is no further below its peer is as good


@dataclass(frozen=True)
class Reached:
    """The accuracy of a method on a data set, and over how many fresh seeds it is the mean; 0 is what seed 0 chose by.

    former: the rate stayed as it was within a round.
    """

    accuracy: float
    seeds: int
    former: bool

    def __sub__(self, other: Reached) -> float:
        return self.accuracy - other.accuracy

    def __str__(self) -> str:
        return _shown(self.accuracy) + ("" if self.seeds else "*") + ("°" if self.former else "")


TOP = """# Does every method learn, and at which learning rate?

Made by `python benchmarks/learns.py --docs docs` from the runs in `benchmarks/learns.jsonl`. One client holds all texts, so
that nothing here is lost by averaging. It trains the method and a classification head beside all-MiniLM-L6-v2, in 10 rounds on
texts of at most 32 tokens. The peer is what PEFT has of the same kind, or training of all weights, with as many steps of as
many texts. Three lengths of training:

- **1,000 steps** of 16 texts, of 16,000, as the 200; of a few, at one rate each.
- **200 steps** of 16 texts, of 3,200, with this project's defaults: the rate is constant and falls to zero over the last fifth
  of the steps (where a ° stands, over the last third of the rounds, and not within one), and the head's last layer has three
  times the rate. The peer has one rate for all, which falls linearly, as in
  Hugging Face's Trainer.
- **80 steps** of 16 texts, of 2,000, at a constant rate, the same for all parameters.

Rates are tried in steps of about three, on SST-2 until neighbours on both sides are no better, elsewhere as far as the last
tables show. Method and peer each have the rate that was best for them on that data set. A star stands where seed 0 chose by
this number; else it is the mean over further seeds. A test set has 872 (SST-2) or 1,000 texts: the standard error of a single
number is 1 to 1.6 points. "Rate" is the one with the best mean over SST-2 and AG News.

From the 80 steps come the defaults of `training.lr`: those of a model of width 256 or less, and 256 / width times as much in a
wider one. `secure-fed methods --model NAME` lists them. For this encoder, of width 384, that is 0.0033 for LoRA and its
relatives, which are 3 to 8 points better at 0.003 than at 0.005 on SST-2; for the built-in one, of width 128, it is 0.005,
which its notes were tuned with. In inverse proportion to the width, wider models come by rates that are usual for LoRA: 0.0017
at 768, 0.0003 at 4,096. `fedft`, `adapter_houlsby`, `ia3`, `prompt_tuning`, `prefix_tuning` and `c2a` have rates of their own,
since they learn little or nothing at 0.005. So do `fedtt` and `fedtt_plus`: at 0.005 they end 9 and 14 points lower among many
clients ([methods.md](methods.md#the-learning-rate-in-a-federation)).

## What was wrong, and what was not

- **What the head reads was, for some.** This encoder was made for the mean over its tokens, and a BERT classifier's head reads
  the first one. With `model.pooling = "mean"` ("sst2, mean") the head alone ends at 77 % in place of 66. AdaMix, Pfeiffer,
  Compacter and C2A end 2.6 to 4.7 points higher; BitFit, FedTT, FedTT+, LoRA and training of all weights end within two
  points of what they have from the first token (one further seed each). By what seed 0 chose it would look like more.
- **One rate for adapter and head was.** The head's last layer is new, the adapter stands on layers that are trained already,
  and AdamW moves both equally far in a step. On 20 Newsgroups, of 20 classes, LoRA ended at 50 % where the head alone had 59
  and training of all weights 65 (seed 0). With three times the rate for the last layer (`training.head_factor`) LoRA and its
  relatives end at 63 to 65 there, PEFT's LoRA at 58.6, and keep what they have on the others: the next table. On the built-in
  notes `secure-fed train` has 94.0 % with one rate for all, 93.0 with three times and 91.4 with ten times (`--set
  training.head_factor=3`, or 10), and on 1,600 of them three times costs 2 to 9 points (seeds 0 to 2; `--set
  data.examples=1600 --set federation.clients=8 --set federation.cohort=8 --set federation.rounds=12 --set
  evaluation.audit_fraction=0.5`). So models up to width 256 keep one rate. Ten times has 64.2 for LoRA on 20 Newsgroups
  (`--methods fedlora --rates 0.003 --head 10`).
  A hidden layer of the head keeps the common rate: where the built-in model's took part, it ended lower (not stored).
- **A rate that falls from the start was.** In the end a rate should fall, or single batches move the adapter as far as in the
  beginning: of the eight methods of the third table six end 1 to 15 points higher with one that falls linearly. But a short
  training needs all of its way. On the notes `secure-fed train` with three times the head's rate ended at 93.0 %, and with
  `--set training.lr_schedule=linear` beside that at 88.1 %; on SST-2
  the two are level. So it falls at the end alone (`"stable_decay"`).
- **A rate that stayed up until a round's last step was, for some.** With ten rounds the last 20 steps were made at nearly a
  third of the full rate. Step by step BitFit, Compacter and FedTT end two points higher from the mean; LoRA and its relatives
  end level or up to 1.5 points lower; over all it is hardly decided (the second table).
  Over three clients that are averaged, where training is far from its end, a fall over the last third costs 2.1 points, one
  over the last fifth 0.5 (nine pairs each; `python benchmarks/federated_against_centralised.py fedlora ffa_lora rolora
  --examples 1200 --clients 3 --rounds 8 --steps 10 --seed 0`, seeds 0 to 2, before the changes and after; not stored). Hence
  the fifth.
- **Compacter and BitFit themselves were not.** AdapterHub's Compacter, and biases in a plain loop, end where ours end (one
  seed of theirs, from the mean; below the table of 200 steps): what they lack beside training of all weights is the method's,
  not this project's.
- **One seed as the yardstick was.** On 20 Newsgroups training of all weights ends at 65.0 with seed 0, and at 60.1 and 58.6
  with two others. Eight methods are more than two points below it with seed 0; with further seeds `head` alone is.
- **Too few steps were.** With 200 steps and a falling rate `fedlora` ends at 81 on SST-2, with 80 at 76.4; PEFT's LoRA goes
  from 78.0 to 81.1, training of all weights from 81.3 to 82.1. With 1,000 steps LoRA stays behind that (87.5):
  at a rate of 0.003 `fedlora` has 81.1 and PEFT's 81.5, which at 0.001 has 83.9. One seed each.
- **What C2A trains with was.** It trained with the context of a batch and a client's class shares, and predicted with each
  text's own context and uniform shares. By default it trains with what it predicts with now. Below, "c2a, context of a batch"
  is what it was first, and "c2a, the client's shares" has each text's own context alone.
- **What is still below** on SST-2 has training of all weights beside it, and that has 82.7 over two further seeds: from the
  first token what trains least (`bitfit`), what starts furthest from the model (`compacter`, `adamix`, `fedtt`, `fedtt_plus`,
  `c2a`), and `adapter_pfeiffer`. `rolora` and `fedsvd` miss PEFT's LoRA there by 2.3 and 2.5, with one seed. From the mean the
  table says which. On AG News `head` alone is below.
- **AdamW that starts anew in each round was not**, though its first steps are up to four times as long as later ones. Scaling
  them to one length was tried for five methods on SST-2, keeping the optimiser's memory over rounds for two: no end was higher,
  beyond a point, than the plain one's at a rate in between (not stored).
- On SST-2 PEFT's own P-tuning learns at no rate in 80 steps.
- `head` trains no adapter: it is what an adapter has to beat. Its default rate lies between the best one
  here and that of the built-in model.

"""


_BEFORE = "The best over rates: with one rate for all that falls linearly, and with the defaults; 200 steps, seed 0."
_ELSEWHERE = (
    "The same methods elsewhere, as the peers at one rate that falls linearly: AdapterHub's (`adapters`, in an environment of "
    "its own) with bottlenecks of the same size, and biases that train in a plain loop."
)
_STEPWISE = {THIRD: "the last third", "stable_decay": "the last fifth"}
_STEPS = (
    "A round's rate stayed as it was until its last step, over the last third of ten rounds of 20 steps; now it falls with "
    "every step, over the last fifth. The same seeds, other than the one that chose the rate; 200 steps."
)


def page(runs: Sequence[Run], rate_of: RateOf, best_on: BestOn) -> str:
    """rate_of: the rate of a method over data sets, by these runs. best_on: the one chosen on a data set."""
    one_rate = [run for run in runs if run["head"] == 1]
    parts = [
        TOP,
        machine("torch", "peft"),
        f"\n\n## Before and now\n\n{_BEFORE}\n\n",
        _heads(runs),
        "\n\n## A rate that falls within a round\n\n",
        _within(runs),
    ]
    parts += ["\n\n## A constant rate beside one that falls\n\n", _falling(one_rate), "\n"]
    runs = [run for run in runs if (_now(run["falls"]), run["head"]) == defaults(run["method"], run["steps"])]
    for steps in sorted({run["steps"] for run in runs}, reverse=True):
        own = [run for run in runs if run["steps"] == steps]
        datas = [data for data in (*SEARCHED, *LATER) if any(run["data"] == data for run in own)]
        parts += [f"\n## {steps} steps: accuracy beside the peer\n\n", _beside(own, datas, rate_of, best_on)]
        parts += [f"\n\n## {steps} steps: every rate that was tried\n\nPer cent, seed 0.\n"]
        for data in datas:
            of_data = [run for run in own if run["data"] == data]
            usual = f"Always the commonest label: {_shown(of_data[0]['commonest'])}."
            parts += [f"\n### {data}, {steps} steps\n\n{usual}\n\n{_tried(of_data)}\n"]
    return "".join(parts)


def _heads(runs: Sequence[Run]) -> str:
    """The best over rates with one rate for all that falls linearly, and with the defaults, of every method that has both."""
    known = [data for data in (*SEARCHED, *LATER) if not data.endswith(MEAN)]  # where there was a before
    datas = [data for data in known if any(run["data"] == data and run["falls"] == FORMER for run in runs)]
    lines = []
    for method in METHODS:
        ways = ("linear", 1.0), (FORMER, defaults(method, 200)[1])
        cells = [_pair_of(*(_best(runs, data, method, *way) for way in ways)) for data in datas]
        if any(cells):
            lines.append([f"`{method}`", *cells])
    head = ["method", *(f"{data}: before, now" for data in datas)]
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, lines)])


def _best(runs: Sequence[Run], data: str, method: str, falls: str, head: float) -> float | None:
    """Over the rates that were tried, in 200 steps, on seed 0."""
    at = (200, falls, head, data, method, 0)
    names = ("steps", "falls", "head", "data", "method", "seed")
    return max((run["accuracy"] for run in runs if tuple(run[name] for name in names) == at), default=None)


def _now(falls: str) -> str:
    """How a rate falls that fell so by rounds alone."""
    return "stable_decay" if falls == FORMER else falls


def _within(runs: Sequence[Run]) -> str:
    """Runs on the same seeds with a rate that falls by rounds alone, and with one that falls step by step."""
    names = ("data", "method", "rate", "head", "steps", "seed")
    found = {(run["falls"], *(run[name] for name in names)): run["accuracy"] for run in runs if run["seed"]}
    known = {key[1:]: accuracy for key, accuracy in found.items() if key[0] == FORMER}
    pairs: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for (falls, *rest), accuracy in found.items():
        if falls in _STEPWISE and tuple(rest) in known:
            pairs.setdefault((falls, rest[0], rest[1]), []).append((known[tuple(rest)], accuracy))
    lines = [["falls over", "data", "method", "seeds", "by rounds", "step by step"]]
    for (falls, data, method), own in sorted(pairs.items()):
        means = (_shown(statistics.mean(pair[which] for pair in own)) for which in (0, 1))
        lines.append([_STEPWISE[falls], data, f"`{method}`", str(len(own)), *means])
    said = [_STEPS]
    for falls, share in _STEPWISE.items():
        gains = [
            100 * (after - before) for (which, *_), own in pairs.items() if which == falls for before, after in own
        ]
        spread = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
        said.append(f"Over {share}, {len(gains)} pairs of runs: {statistics.mean(gains):+.1f} ± {spread:.1f} points.")
    table = "\n".join([_line(lines[0]), _line(["---"] * 6), *map(_line, lines[1:])])
    return " ".join(said) + f"\n\n{table}"


def _pair_of(one: float | None, other: float | None) -> str:
    return f"{_shown(one)}, {_shown(other)}" if one and other else ""


def _falling(runs: Sequence[Run]) -> str:
    """What was run with both, with as many steps at the same rate."""
    found = {(r["data"], r["method"], r["rate"], r["steps"], r["falls"]): r["accuracy"] for r in runs if r["seed"] == 0}
    lines = [["data", "method", "rate", "steps", "constant", "falling"]]
    for data, method, rate, steps, falls in found:
        other = found.get((data, method, rate, steps, "linear"))
        if falls == "constant" and other is not None:
            cells = (_shown(found[data, method, rate, steps, falls]), _shown(other))
            lines.append([data, f"`{method}`" if method in METHODS else method, f"{rate:g}", str(steps), *cells])
    return "\n".join([_line(lines[0]), _line(["---"] * 6), *map(_line, lines[1:])])


def _beside(runs: Sequence[Run], datas: Sequence[str], rate_of: RateOf, best_on: BestOn) -> str:
    """Every method on every data set beside its peer, each at the rate that was best for it there."""
    methods = [method for method in METHODS if any(run["method"] == method for run in runs)]
    found = {
        (data, name): _reached(runs, data, name, best_on) for data in datas for name in (*methods, *PEERS.values())
    }
    compared = {
        data: {
            method: own - peer
            for method in methods
            if (own := found[data, method]) and (peer := found[data, PEERS[method]])
        }
        for data in datas
    }
    head = ["method", "rate", "peer", *(f"{data}: method, peer" for data in datas), "more than two points below on"]
    rows = []
    for method in methods:
        cells = [_pair(found[data, method], found[data, PEERS[method]]) for data in datas]
        below = [data for data in datas if compared[data].get(method, 0) < -CLOSE]
        rate = rate_of(runs, method)
        rows.append([f"`{method}`", f"{rate:g}" if rate else "", PEERS[method], *cells, "; ".join(below)])
    near = [
        f"{sum(d >= -CLOSE for d in own.values())} of {len(own)} on {data}" for data, own in compared.items() if own
    ]
    table = "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])
    return (
        f"Within two points of the peer, or above it: {'; '.join(near)}.\n\n{table}{_elsewhere(runs, datas, best_on)}"
    )


def _elsewhere(runs: Sequence[Run], datas: Sequence[str], best_on: BestOn) -> str:
    """Of methods that PEFT does not have: ours beside AdapterHub's or a plain loop's, where that was run."""
    lines = []
    for data, (method, other) in itertools.product(datas, SAME.items()):
        own, theirs = (_reached(runs, data, name, best_on) for name in (method, other))
        if own and theirs:
            seeds = f"{own.seeds or 1}, {theirs.seeds or 1}"
            lines.append([data, f"`{method}`", other, f"{own}, {theirs}", seeds])
    if not lines:
        return ""
    head = ["data", "method", "the same elsewhere", "ours, theirs", "seeds"]
    return "\n".join(["\n\n" + _ELSEWHERE, "", _line(head), _line(["---"] * 5), *map(_line, lines)])


def _reached(runs: Sequence[Run], data: str, method: str, best_on: BestOn) -> Reached | None:
    """The mean over seeds on which the rate was not chosen, or what seed 0 has, if there are no others."""
    rate = best_on(runs, data, method)
    of_rate = [run for run in runs if (run["data"], run["method"], run["rate"]) == (data, method, rate)]
    fresh = [run for run in of_rate if run["seed"]]
    found = [run for run in fresh if run["falls"] != FORMER] or fresh or of_rate
    former = any(run["falls"] == FORMER for run in found)
    accuracies = [run["accuracy"] for run in found]
    return Reached(statistics.mean(accuracies), len(found) if fresh else 0, former) if found else None


def _pair(own: Reached | None, peer: Reached | None) -> str:
    return f"{own or ''}, {peer or 'not run'}" if own else ""


def _tried(runs: Sequence[Run]) -> str:
    rates = sorted({run["rate"] for run in runs})
    head = ["method", *(f"{rate:g}" for rate in rates)]
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        found = {run["rate"]: run["accuracy"] for run in runs if run["method"] == method and run["seed"] == 0}
        rows.append([f"`{method}`" if method in METHODS else method, *(_shown(found.get(rate)) for rate in rates)])
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
