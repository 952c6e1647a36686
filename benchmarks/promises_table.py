"""The computed noise that each guarantee needs; nothing is trained.

    python benchmarks/promises_table.py [sums] [amplified] [workloads] [examples]

sums        20 rounds of 250 of 5,000 clients: secret coins, and each client once in a public order with independent and with
            correlated noise
amplified   banded noise over groups of clients in a cycle, with coins inside a group's turn (Choquette-Choo et al.,
            "(Amplified) Banded Matrix Factorization", 2023), for 20, 100 and 1,000 rounds; holds only against readers of the
            model
workloads   more and smaller rounds, bands, and momentum, for clients that take part once
examples    the steps inside one client, with an example as the unit: Poisson batches, an order over batches, correlated noise

Noise is the standard deviation on one coordinate of the sum of all rounds (or steps), in clip norms; delta is 1e-5.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from timing import machine

from privacy import accounting, correlation
from privacy.correlation import Correlation, best, square_root
from privacy.forecast import Possible, Setting, compared
from privacy.plan import Target

EPSILONS = (8.0, 3.0, 1.0)
DELTA = 1e-5
CLIENTS, COHORT = 5000, 250


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---:|' * len(head)}")
    for row in rows:
        print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row) + " |")


def last(made: Correlation, rounds: int) -> float:
    """The noise on the sum of all rounds, for Z with standard deviation one."""
    return float(made.errors(rounds)[-1])


def plain(epsilon: float, turns: float) -> float:
    """The noise multiplier of a release of squared sensitivity `turns`."""
    return accounting.calibrate(accounting.unamplified, turns, epsilon, DELTA)


def sampled(rate: float, count: int, epsilon: float) -> float:
    """The noise multiplier of `count` releases of samples by secret coins."""
    return accounting.calibrate(partial(accounting.poisson_sampled, rate), count, epsilon, DELTA)


def in_order(rounds: int, gap: int, turns: int, epsilon: float) -> tuple[float, float, int]:
    """The final noise under a public order: independent, correlated; and the band."""
    made = best(rounds, gap, turns)
    independent = plain(epsilon, turns) * math.sqrt(rounds)
    return independent, plain(epsilon, made.exposures(rounds, gap, turns)[-1]) * last(made, rounds), made.band


def sums() -> None:
    def row(epsilon: float) -> list[object]:
        setting = Setting(CLIENTS, COHORT, 20, DELTA)
        ways = compared(setting, Target(epsilon, None, DELTA), Possible(counted=COHORT, counted_of_all=CLIENTS))
        found = {(way.sampling, way.noise, way.correlation): way for way in ways}
        banded = plain(epsilon, 1.0) * last(square_root(10), 20)
        cells: list[object] = [f"{epsilon:g}"]
        for name in (("coins", "central", "none"), ("schedule", "central", "none")):
            cells.append(f"z {found[name].noise_multiplier:.3f}, {found[name].final_noise:.3g}")
        chosen = found["schedule", "central", "banded"]
        shares = found["schedule", "distributed", "none"], found["coins", "distributed", "none"]
        return [*cells, banded, f"{chosen.final_noise:.3g} (band {chosen.band})", *(way.final_noise for way in shares)]

    head = ("epsilon", "secret coins", "once, independent", "once, band 10", "once, best band", "once, shares")
    title = "Final noise of 20 rounds of 250 of 5,000 clients (shares: all are counted on)"
    table(title, (*head, "hidden coins, shares"), map(row, EPSILONS))


def amplified() -> None:
    """Groups of N / b clients have turns in a cycle of b rounds, and each client of a group tosses a coin of b q.

    With a band of at most b, a client's rounds do not overlap in C, so the run's cost is that of ceil(rounds / b) sampled
    Gaussians. b = 1 is secret coins; b = 1 / q is a public order.
    """
    rate = COHORT / CLIENTS

    def row(rounds: int, epsilon: float) -> list[object]:
        cycles = [b for b in (1, 2, 3, 4, 5, 7, 10, 14, 20) if b <= rounds]
        found = {}
        for b in cycles:
            z = sampled(min(1.0, b * rate), -(-rounds // b), epsilon)
            found[b] = min(z * last(square_root(band), rounds) for band in range(1, b + 1))
        gap = round(1 / rate)
        _, ordered, band = in_order(rounds, gap, -(-rounds // gap), epsilon)
        between = min((b for b in cycles if 1 < b < gap), key=found.__getitem__)
        gain = 1 - found[between] / min(found[1], ordered)
        return [
            rounds,
            f"{epsilon:g}",
            found[1],
            f"{ordered:.3g} (band {band})",
            f"{found[between]:.3g} (cycle {between})",
            f"{100 * gain:.0f} %",
        ]

    head = (
        "rounds",
        "epsilon",
        "secret coins",
        "order, banded",
        "amplified, best cycle below 20",
        "less than the better",
    )
    cases = [(rounds, epsilon) for rounds in (20, 100, 1000) for epsilon in EPSILONS]
    table("Final noise of rounds of 250 of 5,000 clients", head, (row(*case) for case in cases))


def workloads() -> None:
    """With the privacy of a Gaussian mechanism of multiplier 1 and every client once, so that a cohort is clients / rounds.

    Models under momentum b are scaled by 1 - b here, so that they move as far as without momentum.
    """

    def row(rounds: int, momentum: float) -> list[object]:
        def of(measure: Callable[..., float], made: Correlation) -> float:
            return (1 - momentum) * measure(made, rounds, rounds, 1, momentum)

        bands = [square_root(band, momentum) for band in (1, max(1, rounds // 10), rounds // 2, rounds)]
        finals = [of(correlation.final_noise, made) for made in (*bands, square_root(rounds))]
        every = [of(correlation.noise, made) for made in (bands[0], bands[-1])]
        return [rounds, CLIENTS // rounds, f"{momentum:g}", *finals, *every]

    head = ("rounds", "cohort", "momentum", "final: independent", "band of a tenth", "of a half", "of all")
    rest = ("of all, for no momentum", "root mean square of all models: independent", "band of all")
    cases = [(rounds, momentum) for momentum in (0.0, 0.7, 0.9) for rounds in (10, 20, 50, 100, 250)]
    table("Noise at multiplier 1, each of 5,000 clients once", (*head, *rest), (row(*case) for case in cases))


def examples() -> None:
    """A client's examples, in 20 rounds of one local epoch each.

    within: noise correlated over the steps of one round only, because the next round starts from another model.
    """
    rounds = 20

    def row(size: int, batch: int, epsilon: float) -> list[object]:
        steps = -(-size // batch)
        poisson = sampled(batch / size, rounds * steps, epsilon) * math.sqrt(rounds * steps)
        independent, banded, band = in_order(rounds * steps, steps, rounds, epsilon)
        within = plain(epsilon, rounds) * math.sqrt(rounds) * last(best(steps, steps, 1), steps)
        return [size, batch, steps, f"{epsilon:g}", poisson, independent, f"{banded:.3g} (band {band})", within]

    head = (
        "examples",
        "batch",
        "steps a round",
        "epsilon",
        "Poisson",
        "order, independent",
        "order, banded",
        "banded within",
    )
    cases = [(size, batch, epsilon) for size in (100, 1000) for batch in (10, 16) for epsilon in EPSILONS]
    table(
        "Noise of the sum of all steps of 20 local epochs, an example protected", head, (row(*case) for case in cases)
    )


PARTS = {part.__name__: part for part in (sums, amplified, workloads, examples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART")
    given = parser.parse_args()
    print(machine("numpy", "scipy", "dp-accounting"))
    for name in given.parts or PARTS:
        started = time.perf_counter()
        PARTS[name]()
        print(f"\n({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
