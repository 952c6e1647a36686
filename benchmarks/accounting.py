"""The epsilons and running times of accountants on the same releases: ours, Opacus and dp_accounting.

    python benchmarks/accounting.py [--naive]

1,000 releases of a Gaussian of noise multiplier 0.8 over Poisson samples of rate 0.01, delta = 1e-5. `epsilon` takes
`seconds`; `for 3` is the noise multiplier found for epsilon 3, `reached` the epsilon that dp_accounting's PLD computes for it,
and `to find` the seconds of the search. dp_accounting's own search on PLD takes longest, and is left out unless --naive is
given. Then: the excess of our numbers over the exact ones for plain Gaussians, and a comparison for samples of a fixed size.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable

from dp_accounting import calibrate_dp_mechanism
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from opacus.accountants import RDPAccountant as OpacusRdp
from opacus.accountants.utils import get_noise_multiplier
from timing import Limit, at_most, machine, show

from privacy import accounting

RATE, Z, COUNT, DELTA, TARGET = 0.01, 0.8, 1000, 1e-5, 3.0
FINDING = 5.0  # seconds

Measured = Callable[[], float]


def event(z: float) -> SelfComposedDpEvent:
    return SelfComposedDpEvent(PoissonSampledDpEvent(RATE, GaussianDpEvent(z)), COUNT)


def of_opacus(accountant: PRVAccountant | OpacusRdp) -> float:
    accountant.history = [(Z, RATE, COUNT)]
    return float(accountant.get_epsilon(DELTA))


def found_by_opacus(name: str) -> float:
    return float(
        get_noise_multiplier(target_epsilon=TARGET, target_delta=DELTA, sample_rate=RATE, steps=COUNT, accountant=name)
    )


def found_by_dp_accounting(accountant: type[PLDAccountant] | type[RdpAccountant]) -> float:
    return float(calibrate_dp_mechanism(accountant, event, TARGET, DELTA))


def ours() -> float:
    return accounting.epsilon(accounting.poisson_sampled(RATE, Z), COUNT, DELTA)


def found_by_us() -> float:
    return accounting.calibrate(lambda z: accounting.poisson_sampled(RATE, z), COUNT, TARGET, DELTA)


def measured(action: Measured) -> tuple[float, float]:
    """The action's result, and the seconds that it took."""
    started = time.perf_counter()
    return action(), time.perf_counter() - started


def compare(naive: bool) -> list[Limit]:
    rows: list[tuple[str, Measured, Measured | None]] = [
        ("ours (PLD)", ours, found_by_us),
        ("Opacus RDP", lambda: of_opacus(OpacusRdp()), lambda: found_by_opacus("rdp")),
        ("Opacus PRV", lambda: of_opacus(PRVAccountant()), lambda: found_by_opacus("prv")),
        (
            "dp_accounting RDP",
            lambda: float(RdpAccountant().compose(event(Z)).get_epsilon(DELTA)),
            lambda: found_by_dp_accounting(RdpAccountant),
        ),
        (
            "dp_accounting PLD",
            lambda: float(PLDAccountant().compose(event(Z)).get_epsilon(DELTA)),
            (lambda: found_by_dp_accounting(PLDAccountant)) if naive else None,
        ),
    ]
    limits: list[Limit] = []
    print(f"{'accountant':19}{'epsilon':>9}{'seconds':>9}{'for 3':>9}{'to find':>9}{'reached':>9}")
    for name, measure, find in rows:
        said, seconds = measured(measure)
        print(f"{name:19}{said:9.4f}{seconds:9.3f}", end="", flush=True)
        if find is None:
            print(f"{'(--naive)':>18}")
            continue
        z, took = measured(find)
        if find is found_by_us:
            limits.append(at_most("seconds to find the noise for epsilon 3", took, FINDING))
        reached = float(PLDAccountant().compose(event(z)).get_epsilon(DELTA))
        print(f"{z:9.5f}{took:9.2f}{reached:9.4f}")
    return limits


def against_exact() -> None:
    """dp_accounting's PLD of many Gaussians, composed one by one as for sampled ones, against the exact epsilon."""
    print("\ncount releases of a Gaussian of multiplier 2 sqrt(count): PLD over exact, less one")
    print(f"{'count':>9}" + "".join(f"{f'delta {delta:g}':>13}" for delta in (1e-5, 1e-7, 1e-9, 1e-10, 1e-11)))
    for count in (100, 10_000, 100_000):
        z = 2 * math.sqrt(count)
        release = accounting.poisson_sampled(1 - 1e-12, z)
        step = accounting.pld_step(release, count, accounting.FINE) or accounting.FINE
        composed = accounting.distribution(release, count, step)
        exact = {delta: get_epsilon_gaussian(2.0, delta) for delta in (1e-5, 1e-7, 1e-9, 1e-10, 1e-11)}
        print(f"{count:9,}" + "".join(f"{composed.get_epsilon(delta) / exact[delta] - 1:13.1e}" for delta in exact))


def of_one_size() -> None:
    """Samples of exactly 10 of 1,000, noise multiplier 1, COUNT times; a member replaced."""
    print(f"\n10 of 1,000 every time, z = 1, {COUNT:,} times, one member replaced")
    fixed = accounting.epsilon(accounting.sampled_without_replacement(1000, 10, 1.0), COUNT, DELTA)
    reached = accounting.epsilon(accounting.poisson_sampled(0.01, 0.5), COUNT, DELTA)
    wrong = accounting.Release(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), "replace-one")
    print(f"accounted {fixed:.2f}, reached by some data {reached:.2f}, ", end="")
    print(f"as if by Poisson sampling {accounting.epsilon(wrong, COUNT, DELTA):.2f}, ", end="")
    print(f"without amplification {accounting.epsilon(accounting.replaced(1.0), COUNT, DELTA):.0f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--naive", action="store_true", help="also dp_accounting's own search on PLD")
    warnings.simplefilter("ignore")
    naive = arguments.parse_args().naive
    print(machine("opacus", "dp-accounting"))
    limits = compare(naive)
    against_exact()
    of_one_size()
    show(limits)


if __name__ == "__main__":
    main()
