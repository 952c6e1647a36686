"""Every method's private run reports a membership figure by itself, which finds the phantoms where there is no noise."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from privacy.mechanisms import Gaussian
from secure_fed.methods import METHODS
from secure_fed.runs.membership import kept_scores
from tests.attacks.canaried import _clean
from tests.cells import chosen
from tests.contracts import runs

CELLS = [(name, unit) for name in METHODS for unit in ("client", "example") if runs.supported(name, unit)]
# One method of each way of sending: changes, products, and several sums. At night: one method of every class.
QUICK = [("bitfit", "client"), ("fra_lora", "client"), ("fedask", "client")]
AT_NIGHT = [cell for cell in CELLS if cell[0] in runs.OF_A_CLASS]


@pytest.mark.parametrize(("name", "unit"), chosen(CELLS, QUICK, nightly=AT_NIGHT))
def test_every_method_gives_a_figure_of_phantoms(name: str, unit: str) -> None:
    built = runs.federation(runs.settings(name, unit, **{"evaluation.phantoms": 20, "evaluation.every": 9}))
    with patch.object(Gaussian, "noised", _clean):
        result = built.run()
    assert result.summary["membership"]["why"] == ""
    assert np.isfinite(kept_scores(result.state, built.assembly.audit_pool)).all()
    assert result.summary["membership"]["auc"] > (0.99 if unit == "client" else 0.5)
