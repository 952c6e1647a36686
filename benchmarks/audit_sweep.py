"""Accuracy, the attacks' findings, and the lower bound beside the accounted epsilon, over several epsilons.

    python benchmarks/audit_sweep.py [--epsilons 1,2,4,8] [--share 0.25] [--out DIR]

The demo's clients, rounds and steps, once for each epsilon and once without privacy, summed without masks (which would change
sums only by rounding). The same share of clients is audited in every run, with the same coins, as canaries of random direction,
the worst case of a client's contribution. Writes the runs, and an audit.html that shows them side by side.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path

from attacks.adversary.case import Settings, opened
from attacks.audit import audited
from attacks.command import written
from attacks.record import Audit, RunBeside
from secure_fed import Federation, RunConfig
from secure_fed.commands import demo


def configured(epsilon: float | None, share: float) -> RunConfig:
    """The demo's run at this epsilon, without masks."""
    tables = (demo.unprotected(Federation(demo.config()).config) if epsilon is None else demo.config()).to_dict()
    if epsilon is not None:
        del tables["secure_aggregation"]
        tables["privacy"] |= {"epsilon": epsilon, "noise": "central"}
    tables["evaluation"] |= {"audit_fraction": share, "every": tables["federation"]["rounds"]}
    return RunConfig.from_dict(tables)


def ran(config: RunConfig, folder: Path) -> Audit:
    """The audit of one run, with every attack that needs no reference adapters."""
    Federation(config).run(folder)
    found = audited(opened(folder), (), Settings(references=0)).record
    return written(found, folder, ())[0]


def line(row: RunBeside) -> str:
    """A run as a line of the table."""
    low, high = row.auc_interval or (0.0, 1.0)
    caught = f"{row.tpr_at_1.tpr:.1%}" if row.tpr_at_1 else "refused"
    epsilon = "none" if row.epsilon is None else f"{row.epsilon:.2f}"
    bound = "none" if row.epsilon_lower is None else f"{row.epsilon_lower:.2f}, at delta {row.delta:g}"
    area = f"{row.auc:.3f} ({low:.3f} to {high:.3f})"
    return (
        f"| {epsilon} | {row.accuracy:.1%} | `{row.attack}`, {row.vantage} | {area} | {caught} "
        f"| {bound} | `{row.epsilon_lower_attack}`, {row.epsilon_lower_vantage} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilons", default="1,2,4,8", help="comma-separated")
    parser.add_argument("--share", type=float, default=0.25, help="of the clients that are audited (default 0.25)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs (default: a temporary one)")
    chosen = parser.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp())
    audits: dict[Path, Audit] = {}
    for epsilon in (None, *map(float, chosen.epsilons.split(","))):
        folder = out / ("unprotected" if epsilon is None else f"epsilon-{epsilon:g}")
        audits[folder] = ran(configured(epsilon, chosen.share), folder)
    first, *others = audits
    together, page = written(audits[first], first, others)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    print("| epsilon | accuracy | strongest attack | AUC (interval) | members caught at 1 % | epsilon at least | by |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(map(line, together.sweep)))
    print(f"\n{page}")


if __name__ == "__main__":
    main()
