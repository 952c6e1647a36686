"""Signals of membership, from a text's loss or its tokens' log-likelihoods. Higher means more likely a member.

Each is a function of numbers, so it works with any model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from attacks.adversary.null import Floats
from attacks.any_model.likelihood import Tokens
from attacks.shadow_scores import lira, rmia
from secure_fed.learning.tasks.confidence import of_likelihood

PAPERS = {
    "loss": "Yeom et al. 2018",
    "loss beside references": "Watson et al. 2022",
    "loss by zlib": "Carlini et al. 2021",
    "Min-K %": "Shi et al. 2024",
    "Min-K %++": "Zhang et al. 2025",
    "ReCaLL": "Xie et al. 2024",
    "neighbourhood": "Mattern et al. 2023",
    "LiRA": "Carlini et al. 2022",
    "RMIA": "Zarifzadeh et al. 2024",
    "LiRA offline": "Carlini et al. 2022",
    "RMIA offline": "Zarifzadeh et al. 2024",
}
SHARE = 0.2  # of a text's tokens, the least likely ones: the middle of the values in the papers on Min-K %


def loss(losses: Floats) -> Floats:
    """-loss(x) (Yeom et al. 2018, section III-B)."""
    return -losses


def calibrated(losses: Floats, references: Sequence[Floats]) -> Floats:
    """The mean loss under the references minus the model's: calibrates for a text's difficulty (Watson et al. 2022, section 3).

    With an adapter's base model as the reference, it is the log-likelihood ratio of Mireshghallah et al. 2022.
    """
    difficulty: Floats = np.mean(np.stack(references), axis=0)
    return difficulty - losses


def offline(phi: Floats, reference_phi: Floats) -> dict[str, Floats]:
    """(texts,) scores of LiRA (Carlini et al. 2022, equation 4) and RMIA (Zarifzadeh et al. 2024, section 3) without shadows.

    phi: (texts,) the model's confidences. reference_phi: (references, texts) the confidences of two or more models that saw no
    text. RMIA's population is all texts of the audit.
    """
    nobody = np.zeros(reference_phi.shape, dtype=bool)
    given = phi, reference_phi, nobody
    return {
        "LiRA offline": lira.offline(*given),
        "RMIA offline": rmia.scores(*given, phi, reference_phi, a=rmia.UNTUNED_A, marginal=rmia.offline_marginal),
    }


def confident(losses: Floats, *, likely: bool) -> Floats:
    """(texts,) confidences from losses: the logit of exp(-loss) if that is a probability (`likely`), else -loss."""
    found: Floats = of_likelihood(torch.from_numpy(-losses)).numpy() if likely else -losses
    return found


def per_zlib(tokens: Sequence[Tokens], texts: Sequence[str]) -> Floats:
    """The log-likelihood divided by the text's size in bytes after zlib (Carlini et al. 2021, section 5.2)."""
    sizes = [len(zlib.compress(text.encode())) for text in texts]
    return np.array([one.said.sum() / size for one, size in zip(tokens, sizes, strict=True)])


def min_k(tokens: Sequence[Tokens], share: float = SHARE) -> Floats:
    """The mean log-likelihood of the least likely tokens, Min-K % (Shi et al. 2024, section 3)."""
    return np.array([_least(one.said, share) for one in tokens])


def min_k_plus(tokens: Sequence[Tokens], share: float = SHARE) -> Floats:
    """The same for log-likelihoods in standard deviations from their mean, Min-K %++ (Zhang et al. 2025, section 4)."""
    return np.array([_least((one.said - one.mean) / np.maximum(one.deviation, 1e-6), share) for one in tokens])


def recall(tokens: Sequence[Tokens], conditional: Floats) -> Floats:
    """LL(x | P) / LL(x), ReCaLL (Xie et al. 2024, section 3). conditional: (texts,) LL(x | P), for a prefix P of non-members.

    A text without predicted tokens has 0.
    """
    alone = np.array([one.said.sum() for one in tokens])
    ratio: Floats = np.divide(conditional, alone, out=np.zeros(len(alone)), where=alone < 0)
    return ratio


def neighbourhood(losses: Floats, neighbours: Sequence[Floats]) -> Floats:
    """The mean loss of a text's neighbours minus its own (Mattern et al. 2023). neighbours: (texts,) each, one of each text."""
    around: Floats = np.mean(np.stack(neighbours), axis=0)
    return around - losses


def _least(values: Floats, share: float) -> float:
    """The mean of the smallest `share` of the values, at least one of them; 0 without values."""
    if not len(values):
        return 0.0
    count = max(1, int(len(values) * share))
    return float(np.sort(values)[:count].mean())
