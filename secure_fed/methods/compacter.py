"""Compacter (Mahabadi et al., 2021, arXiv 2106.04647): bottlenecks whose matrices are sums of Kronecker products with rank-one
second factors, behind the attention and the feed-forward of every layer.

    W = sum_i A_i (x) s_i t_i^T,    and every one of A_i, s_i, t_i and the biases is averaged, the A_i shared by all layers.

The mean parameters do not give the mean matrices, whose entries are products of three parameters: the gap is the covariance of
the factors over clients, as with LoRA's A and B, and noise on the factors is multiplied too.

Deviation: the s_i of the upper layers start at zero instead of near it, so that the adapted model starts equal to the original.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.learning.models.adapters.kronecker import Compacters
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

BOTTLENECK = 16

CARD = Card(
    name="compacter",
    paper="Mahabadi et al., arXiv 2106.04647",
    travels="Kronecker factors, biases, head",
    mean_exact=False,
    options=("bottleneck", "kronecker"),
)


def build(run: RunConfig) -> Averaged:
    return Averaged(Compacters(run.method.bottleneck or BOTTLENECK, run.method.kronecker), CARD)
