"""FeDeRA: A and B start from the largest singular values of the adapted weights.

Yan, Tang, Shi and Yang, "FeDeRA: Efficient Fine-tuning of Language Models in Federated Learning Leveraging Weight
Decomposition" (arXiv 2404.18848). With W = U S V^T of an adapted layer, eq. (16) to (18),

    B0 = U_r sqrt(S_r),   A0 = sqrt(S_r) V_r^T,   W_res = W - B0 A0,

where W_res replaces W and is frozen, and the layer computes W_res x + (beta / r) B A x with beta = r. So the layer's initial
output is unchanged. The start is a function of W alone: every party can compute it, and it costs no privacy.

FeDeRA defines only the start. `method.rule` chooses which tensors train, are sent and are averaged, and so whether the mean is
exact (`fedlora` is the paper's rule; `ffa_lora`, `rolora` and `fra_lora` are as in their files, FFA's frozen A being A0).

Because beta / r = 1, `method.alpha` and `method.rslora` have nothing to scale and are refused. An export contains the change
B A - B0 A0, of twice the rank, so that others can load it on the original weights W.

Settled here: signs of singular vectors are fixed by their largest entries (`low_rank`), the decomposition is in float64.
"""

from __future__ import annotations

from dataclasses import replace

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.methods import ffa_lora, fra_lora, rolora
from secure_fed.methods.averaged import TABLE, AveragedLora
from secure_fed.methods.method import Card

_OF_FRA = ("denoise", "denoise_over", "transport_form", "sketch")

CARD = Card(
    name="federa",
    paper="Yan et al., arXiv 2404.18848",
    travels="as its rule: A, B, head",
    mean_exact=False,
    options=("rank", "dropout", "target_modules", "rule", *_OF_FRA),
    decoders=1 / 3,  # its start is large, and steps of one factor are multiplied by the other
)

_RULES: dict[str, tuple[Card, type[AveragedLora]]] = {
    "fedlora": (TABLE["fedlora"], AveragedLora),
    "ffa_lora": (ffa_lora.CARD, ffa_lora.FfaLora),
    "rolora": (rolora.CARD, rolora.RoLora),
    "fra_lora": (fra_lora.CARD, fra_lora.FraLora),
}


def build(run: RunConfig) -> AveragedLora:
    """The rule's method, with FeDeRA's start and FeDeRA's name on its card."""
    method = run.method
    rule, made = _RULES[method.rule]
    _require_fitting(run, rule)
    adapter = LoraAdapter(
        method.rank, alpha=method.rank, dropout=method.dropout, target_modules=method.target_modules, start="singular"
    )
    card = replace(rule, name=CARD.name, paper=CARD.paper, options=CARD.options, decoders=CARD.decoders)
    if issubclass(made, fra_lora.FraLora):
        return made(adapter, card, method.denoise, fra_lora.sketch_of(method), fra_lora.over_sum(method))
    return made(adapter, card)


def _require_fitting(run: RunConfig, rule: Card) -> None:
    """Refuse settings that the rule does not read or cannot work with."""
    method, optimizer = run.method, run.federation.optimizer
    if optimizer != "mean" and rule.memoryless:
        raise ConfigError(
            f"federation.server_optimizer = {optimizer!r} cannot be used with method.rule = {method.rule!r}: "
            f"{rule.memoryless}; use 'mean'"
        ).about("federation.server_optimizer", optimizer, "mean")
    for option in _OF_FRA:
        if method.rule != "fra_lora" and not method.left_alone(option):
            raise ConfigError(
                f"method.{option} = {getattr(method, option)!r} has no effect with method.rule = {method.rule!r}: "
                "leave it out, or set method.rule = 'fra_lora'"
            ).about(f"method.{option}", getattr(method, option), "unset unless method.rule = 'fra_lora'")
