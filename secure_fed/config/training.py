"""The section [training]: the local training of a client in a round."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config.setting import key


@dataclass(frozen=True)
class TrainingConfig:
    lr: float | None = key(
        None,
        "local learning rate (the method's rate for a model of this width, which `secure-fed methods --model` lists; "
        "fedara and svd_adaptation: up to four times that in runs of few steps; four times that with privacy)",
        above=0.0,
        optional=5e-3,
    )
    head_factor: float | None = key(
        None,
        "learning rate of the head's last layer, divided by lr (in models wider than 256: 3, or the method's value in "
        "`secure-fed methods`; 1 in other models, with sgd, and with privacy)",
        above=0.0,
        optional=3.0,
    )
    epochs: int = key(1, "local epochs a round", at_least=1)
    steps: int | None = key(None, "local steps a round, instead of epochs", at_least=1, optional=10)
    batch_size: int | None = key(None, "local batch size (16; 256 with privacy)", at_least=1, optional=16)
    microbatch: int | None = key(
        None,
        "examples in one pass through the model, to bound memory; gradients are accumulated over the batch (as many as "
        "memory holds)",
        at_least=1,
        optional=16,
    )
    checkpointing: bool | str = key(
        "auto",
        "compute layers again in the backward pass, a third slower, with a fraction of the memory; "
        "auto: as a given model is set, and where the activations of a pass would fill more than half of the device's memory",
        choices=("auto", True, False),
    )
    together: int | None = key(
        None,
        "most clients that this machine trains in common passes; 1: one client after the other (as many as memory holds)",
        at_least=1,
        optional=64,
    )
    optimizer: str = key("adamw", "local optimiser", choices=("adamw", "sgd"))
    momentum: float = key(0.0, "momentum of sgd", at_least=0.0, below=1.0)
    weight_decay: float = key(0.0, "weight decay of either optimiser", at_least=0.0)
    max_grad_norm: float | None = key(
        None,
        "largest gradient norm of a local step; longer gradients are clipped to it (no clipping)",
        above=0.0,
        optional=1.0,
    )
    lr_schedule: str = key(
        "auto",
        "schedule of lr over the rounds, step by step within a round; stable_decay: constant, then down to zero over the last "
        "fifth; auto: stable_decay, or constant with privacy",
        choices=("auto", "constant", "linear", "cosine", "stable_decay"),
    )
    lr_warmup: int = key(0, "rounds in which lr rises to its value, before lr_schedule begins", at_least=0)
    proximal: float = key(0.0, "FedProx: mu/2 |w - w_global|^2 is added to the local loss", at_least=0.0)

    @property
    def rate(self) -> float:
        """The learning rate, with its default if it is not set."""
        return 5e-3 if self.lr is None else self.lr

    @property
    def head_times(self) -> float:
        """The learning rate of the head's last layer divided by the rest's, with its default if it is not set."""
        return 1.0 if self.head_factor is None else self.head_factor

    @property
    def batch(self) -> int:
        """The local batch size, with its default if it is not set."""
        return 16 if self.batch_size is None else self.batch_size
