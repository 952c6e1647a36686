"""Replay: the server repeats a client's local training with and without a text, and answers with the closer of the two.

The distinguishing game behind differential privacy, played by a server that knows everything except whether the client has the
text (Nasr et al. 2021, Adversary instantiation: a malicious data set and a white-box federated server). In a run
without privacy, order and dropout come from its seed, and a replay equals the client's contribution bit for bit. Honest tensors
suffice; the tensors of `membership.alarm` make the two trainings differ most.
"""

from __future__ import annotations

import torch

from secure_fed.tensors.layout import Layout
from secure_fed.tensors.tensors import Tensors


def has_text(answer: Tensors, with_text: Tensors, without: Tensors) -> bool:
    """Whether the client's contribution is closer to the training with the text: the likelihood ratio under Gaussian noise.

    answer: the client's contribution, or a sum minus the expected contributions of the others. A tie counts as "without".
    """
    layout = Layout.of(without)
    seen, yes, no = (layout.flatten(one.dense(), torch.float64) for one in (answer, with_text, without))
    return bool((seen - no).norm() > (seen - yes).norm())
