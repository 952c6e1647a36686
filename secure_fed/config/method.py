"""The section [method]: the settings of all methods. Each method reads some of them, which its card lists."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from secure_fed.config.setting import key

_WIDEST = 65_536  # wider than any layer of a model that can be fine-tuned here


@dataclass(frozen=True)
class MethodConfig:
    name: str = key("fra_lora", "see `secure-fed methods`")
    rank: int = key(8, "rank of the adapter", at_least=1, at_most=_WIDEST)
    alpha: float = key(16.0, "LoRA alpha: the change is scaled by alpha / rank", at_least=1e-6, at_most=1e6)
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead")
    dropout: float = key(0.0, "dropout before the adapter", at_least=0.0, below=1.0)
    target_modules: str | tuple[str, ...] = key("", "as in PEFT: names, a pattern or all-linear; empty: PEFT's default")
    modules_to_save: tuple[str, ...] = key((), "as in PEFT: modules that train in full, beside the task head")
    personal: tuple[str, ...] = key(
        (), "names or patterns of trained tensors that stay on the client, such as classifier.*"
    )
    freeze_init: str = key("orthonormal", "initial values of the frozen A (FFA)", choices=("orthonormal", "gaussian"))
    double_rank: bool = key(False, "twice the rank, since only half the factors train (FFA)")
    switch_round: int | None = key(
        None,
        "rounds of FRA before FFA (fra_then_ffa; 5, or half of the rounds if fewer than 10)",
        at_least=1,
        optional=5,
    )
    denoise: str = key(
        "tangent",
        "how FRA removes noise from a private mean",
        choices=("tangent", "shrink", "truncate", "none"),
    )
    denoise_over: str = key(
        "auto",
        "matrix that FRA shrinks: each private mean, or the sum of all so far; auto: sum, or mean with sketches",
        choices=("auto", "mean", "sum"),
    )
    transport_form: str = key(
        "dense", "FRA's mean of whole matrices, or of sketches in two passes", choices=("dense", "sketch")
    )
    sketch: int | None = key(None, "columns of the sketch (4 x rank)", at_least=1, at_most=_WIDEST, optional=32)
    rule: str = key(
        "fedlora",
        "how FeDeRA's factors train and are averaged",
        choices=("fedlora", "ffa_lora", "rolora", "fra_lora"),
    )
    oversampling: int = key(8, "columns of a sketch beyond the rank (FedASK, FedPower)", at_least=0, at_most=_WIDEST)
    power_iterations: int = key(2, "noised subspace iterations of a round (FedPower)", at_least=1, at_most=_WIDEST)
    bottleneck: int | None = key(
        None,
        "width of a bottleneck adapter (Houlsby, Pfeiffer and FedTT 64, Compacter, AdaMix and C2A 16)",
        at_least=1,
        at_most=_WIDEST,
        optional=64,
    )
    kronecker: int = key(4, "Compacter's n: its matrices are sums of n Kronecker products", at_least=1, at_most=_WIDEST)
    experts: int = key(
        4, "adapters per place, of which each forward pass takes one (AdaMix)", at_least=2, at_most=_WIDEST
    )
    prompt_length: int = key(20, "virtual tokens (prompt, prefix and P-tuning)", at_least=1, at_most=_WIDEST)
    context_dim: int = key(8, "size of a client's embedding (C2A's t)", at_least=1, at_most=_WIDEST)
    hyper_dim: int = key(64, "rank of the hypernetwork's factors (C2A's s)", at_least=1, at_most=_WIDEST)
    context: str = key(
        "text",
        "context from which C2A makes adapters in training: each text's own, as in evaluation, or its batch's, as in the "
        "paper",
        choices=("text", "batch"),
    )
    class_shares: str = key(
        "uniform",
        "class shares from which C2A makes adapters in training: uniform shares, as in evaluation, or each client's own, as "
        "in the paper",
        choices=("uniform", "client"),
    )
    final_rank: int | None = key(
        None, "final mean rank of an adapted matrix (FedARA; a quarter of rank)", at_least=1, optional=2
    )
    warmup_rounds: int | None = key(
        None, "rounds at the full rank (FedARA's t_w; 2, or a quarter of fewer than 8 rounds)", at_least=0, optional=2
    )
    final_rounds: int | None = key(
        None, "rounds at the final rank (FedARA's t_f; 5, or a third of fewer than 8 rounds)", at_least=0, optional=5
    )
    vote_threshold: float = key(
        0.5, "share of clients that must vote for a rank to stay (FedARA's T_h)", at_least=0.0, below=1.0
    )
    masks: str = key(
        "auto",
        "who chooses the ranks that stay (FedARA): clients by votes, or the server by the mean (global); auto: votes, or "
        "global with privacy.unit = client, where votes would need noise of their own",
        choices=("auto", "votes", "global"),
    )
    ranks: tuple[str, ...] = key(
        (),
        "ranks that clients of unlike machines train, NAME=RANK for every client, each at most method.rank (fedlora, ffa_lora, "
        "fra_lora); empty: all train method.rank",
    )

    @property
    def ranks_by_name(self) -> dict[str, int]:
        """`ranks` by client; empty if it is not set. ValueError for an entry of another form than NAME=RANK."""
        found = {}
        for entry in self.ranks:
            read = re.fullmatch("(.+)=([0-9]{1,6})", entry, re.DOTALL | re.ASCII)
            if read is None or read[1] in found:
                raise ValueError(entry)
            found[read[1]] = int(read[2])
        return found

    def left_alone(self, option: str) -> bool:
        """Whether the setting `option` has its default."""
        usual = next(field.default for field in fields(self) if field.name == option)
        return bool(getattr(self, option) == usual)
