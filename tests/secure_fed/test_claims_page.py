"""docs/claims.md: withdrawn verdicts stay withdrawn, whatever further runs show."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cells import every

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The claim, the comparison, and the difference from the paper that its row names.
WITHDRAWN = (
    ("c2a", "c2a-beta-5 over lora-beta-5", "predicts single texts"),
    ("c2a", "c2a-beta-0.1 over lora-beta-0.1", "predicts single texts"),
    ("c2a", "c2a_ours-beta-5 over c2a-beta-5", "predicts single texts"),
    ("languages", "c2a-beta-0.5 over lora-beta-0.5", "predicts single texts"),
    ("fedtt", "fedtt_plus-silos-50 over lora-silos-50", "not all silos take part"),
    ("fedtt", "fedtt_plus-silos-3 over lora-silos-3", "not i.i.d."),
    ("fedara", "fedara over fedlora", "LoRA's rate"),
    ("federa", "federa-alpha-0.1 over fedlr-alpha-0.1", "scale"),
    ("fra", "error_fra below error_fedavg", "true of any numbers"),
)


@pytest.fixture(scope="module")
def made() -> str:
    """The page's tables of benchmarks/claims_report.py, of runs beyond doubt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        script = runpy.run_path(str(BENCHMARKS / "claims_report.py"))
        sizes = sys.modules.pop("claims_made").SIZES
    tables: str = script["tables"](beyond_doubt(script), sizes)
    return tables


def beyond_doubt(script: dict[str, Any]) -> list[dict[str, Any]]:
    """Five runs of each configuration: those of a claim get worse one by one, by three points."""
    return [
        {"claim": claim.name, "arm": arm, "size": "longer", "seed": seed}
        | {"accuracy": 0.9 - 0.03 * place, "early": 0.9 - 0.03 * place, "commonest": 0.1}
        | {"bytes_up": 1, "bytes_down": 1, "error_fra": 0.001, "error_fedavg": 1.0}
        for claim in script["CLAIMS"]
        for place, arm in enumerate(claim.arms)
        for seed in range(5)
    ]


@every(("claim", "compared", "difference"), WITHDRAWN)
def test_a_comparison_on_other_terms_gets_no_verdict_however_clear_its_runs_are(
    made: str, claim: str, compared: str, difference: str
) -> None:
    (row,) = (line for line in made.splitlines() if line.startswith(f"| {claim} | {compared} |"))
    assert "not decided on the paper's terms: " in row
    assert difference in row
    assert row.partition(" | ")[2].rpartition(" | ")[0] in made.replace(row, "")  # its claim's own table says the same


def test_a_comparison_on_the_papers_terms_keeps_its_verdict(made: str) -> None:
    rows = {line.split(" | ")[1]: line for line in made.splitlines() if line.endswith(" | longer |")}
    assert "| **holds** |" in rows["fra over fedlora"]
    assert "| **above zero** |" in rows["c2a_ours-beta-0.1 over lora-beta-0.1"]
