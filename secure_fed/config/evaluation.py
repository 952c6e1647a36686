"""The section [evaluation]: what is measured of a run, published beside it, and kept for an audit."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config.setting import key

LOCAL_DIAGNOSTICS = ("discrepancy", "drift", "aggregation_error")  # these read each client's trained tensors
DIAGNOSTICS = ("variation", *LOCAL_DIAGNOSTICS)


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = key(1, "evaluate after every so many rounds, and after the last", at_least=1)
    batch_size: int = key(64, "evaluation batch size", at_least=1)
    patience: int | None = key(
        None, "evaluations in a row without an improvement after which the run ends (never)", at_least=1, optional=5
    )
    keep_best: bool = key(
        False,
        "also keep the model of the best evaluation (by F1 of entities and answers, else by accuracy or loss), for predict and "
        "export with --best",
    )
    per_client: bool = key(
        False, "also measure accuracy (F1 of entities and answers) on each client's own examples: mean and worst decile"
    )
    tensorboard: bool = key(False, "also write TensorBoard events into the run directory")
    wandb: bool = key(
        False,
        "also give each round's public figures to Weights & Biases (WANDB_PROJECT, WANDB_MODE); with privacy all at the end, "
        "as an offline run in private/wandb",
    )
    mlflow: bool = key(
        False,
        "also give each round's public figures to MLflow (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME); with privacy all at "
        "the end, in private/mlflow.db",
    )
    diagnostics: tuple[str, ...] = key(
        (),
        "further measurements in every round: variation of the global weights; discrepancy and drift of clients from them, and "
        "aggregation_error of products of factors, which need every client's tensors",
    )
    target_accuracy: float | None = key(
        None,
        "report after how many rounds this accuracy was reached (F1 of entities and answers)",
        above=0.0,
        at_most=1.0,
        optional=0.8,
    )
    phantoms: int | None = key(
        None,
        "units that are nobody's data; a coin decides whether each pulls the model along a random direction, to measure "
        "how much the model reveals of membership (with privacy as many as cost hardly any accuracy, else none)",
        at_least=0,
        at_most=100_000,
        optional=20,
    )
    audit_fraction: float | None = key(
        None,
        "share of the units of the data (examples; groups or clients where privacy protects these) on which membership is "
        "measured; a coin decides whether each of them is held out, so about half of them do not train. 0: all train "
        "(0.1; 0 with privacy or phantoms, unless canaries are set)",
        at_least=0.0,
        at_most=1.0,
        optional=0.1,
    )
    audit_unit: str = key(
        "auto",
        "unit of audit_fraction and phantoms in a run without privacy: single examples, or clients with all their examples; "
        "auto: the unit that privacy protects, or else examples",
        choices=("auto", "example", "client"),
    )
    non_members: str | tuple[str, ...] = key(
        "",
        "file, folder or list of files with rows of the same kind as the training rows, which no client trains on: the final "
        "model's losses on them and on training rows are compared, for the owner of the data alone (with privacy and too few "
        "phantoms: test rows that were held out of the data)",
    )
    canaries: str = key(
        "none",
        "make the units of audit_fraction conspicuous, to sharpen the audit: wrong labels, a rare token, or a random change",
        choices=("none", "mislabelled", "rare_token", "direction"),
    )
    record: str = key(
        "nothing",
        "keep for an audit: the model after every round, or also every client's update (behind masks, every sum), unprotected",
        choices=("nothing", "models", "updates"),
    )
    bandwidth: float | None = key(
        None, "a client's bandwidth in megabytes a second: report how long the run would take", above=0.0, optional=1.0
    )
    generate: int = key(
        0, "test rows to which an evaluation writes answers, compared by data.metric; 0: none", at_least=0
    )
    max_new_tokens: int = key(64, "the most tokens of such an answer", at_least=1)
