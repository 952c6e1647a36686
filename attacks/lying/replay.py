"""Replay: a client's local training is repeated with a text and without it, and the nearer of the two is the answer.

The distinguishing game behind differential privacy, played by a server that knows everything but one text (Nasr et al. 2021,
Adversary instantiation: a malicious data set and a white-box federated server). Where a run is not private, order and dropout
come from its seed, and a replay is the client's answer to the bit. Honest tensors suffice; those of `membership.alarm` make the
two trainings differ most.
"""

from __future__ import annotations

import torch

from secure_fed.tensors.tensors import Layout, Tensors


def has_text(answer: Tensors, with_text: Tensors, without: Tensors) -> bool:
    """Whether the answer lies on the side of the training with the text: the likelihood ratio under Gaussian noise.

    answer: of the client, or a sum less what others are known to have added. A tie is "without".
    """
    layout = Layout.of(without)
    seen, yes, no = (layout.flatten(one.dense(), torch.float64) for one in (answer, with_text, without))
    return bool((seen - no).norm() > (seen - yes).norm())
