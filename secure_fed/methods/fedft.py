"""FedFT: the whole model trains and is sent. Federated averaging as McMahan et al. (2017) have it, the baseline of FeDeRA
(Yan et al., arXiv 2404.18848, section 5.1) without parameter-efficient tuning.

    w' = w + mean(w_i - w)   over every parameter w of the model.

Guarantee: the mean is exact. With privacy every parameter is noised, so it takes very many clients (or examples) until a change
exceeds the noise; a method that trains fewer parameters is the better choice there.
"""

from __future__ import annotations

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.full import Everything
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="fedft",
    paper="McMahan et al., arXiv 1602.05629; FedFT in Yan et al., arXiv 2404.18848",
    travels="the whole model",
    mean_exact=True,
    lr=1.5e-4,
)


def build(run: RunConfig) -> Averaged:
    if run.model.quantization != "none":
        raise ConfigError(
            f"method.name is 'fedft', which trains every weight, and model.quantization = {run.model.quantization!r} stores "
            "weights that cannot train: leave it out, or choose a method on LoRA"
        ).about("model.quantization", run.model.quantization, "none with fedft")
    if run.model.device_map:
        raise ConfigError(
            f"method.name is 'fedft', which trains every weight, and model.device_map = {run.model.device_map!r} keeps weights "
            "where they cannot train: leave it out, or choose a method on LoRA"
        ).about("model.device_map", run.model.device_map, "left out with fedft")
    return Averaged(Everything(), CARD)
