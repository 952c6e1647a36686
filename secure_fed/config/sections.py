"""The settings of a run: a class for each [section] of the TOML file, all of them together, and the commented file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from secure_fed.config.federation import FederationConfig
from secure_fed.config.method import MethodConfig
from secure_fed.config.protection import PrivacyConfig, SecureAggregationConfig
from secure_fed.config.setting import Setting, key, limits_in_words

LOCAL_DIAGNOSTICS = ("discrepancy", "drift", "aggregation_error")  # these read each client's trained tensors
DIAGNOSTICS = ("variation", *LOCAL_DIAGNOSTICS)

_NOTES = 10_000_000  # record numbers are distinct up to here


@dataclass(frozen=True)
class ModelConfig:
    name: str = key("builtin/tiny", "builtin/tiny, a folder, or a Hugging Face Hub id")
    device: str = key(
        "cpu",
        "torch device: cpu, cuda, mps ...; auto: the GPU if there is one; of several devices, as in 'cuda:0, cuda:1', each "
        "trains a share of a round's clients",
    )
    dtype: str = key(
        "float32", "type of the model's computations; adapters stay float32", choices=("float32", "bfloat16")
    )
    max_length: int = key(128, "texts are cut after this many tokens", at_least=2)
    pooling: str = key(
        "model",
        "input of the head: model, as in the architecture, often the first token; mean, the mean over tokens, for which "
        "sentence encoders are made (classification, multi_label, regression)",
        choices=("model", "mean"),
    )


@dataclass(frozen=True)
class DataConfig:
    name: str = key("builtin/notes", "builtin/notes, a Hub id or a data set folder")
    train: str | tuple[str, ...] = key(
        "", "a JSON Lines, CSV or Parquet file (.gz too), a folder, or a list with one file per client"
    )
    test: str | tuple[str, ...] = key(
        "", "test file, folder or list of files; empty: test_fraction of the training rows is held out"
    )
    task: str = key(
        "classification",
        "learning task",
        choices=(
            "classification",
            "multi_label",
            "regression",
            "tokens",
            "question_answering",
            "causal_lm",
            "multiple_choice",
        ),
    )
    text: str = key(
        "", "column of the text; empty: text (tokens: tokens, a list of words; question_answering: question)"
    )
    text_b: str = key(
        "",
        "column of the second text of a pair, or of a prompt's continuation (causal_lm); empty: none "
        "(question_answering: context; multiple_choice: choices)",
    )
    label: str = key(
        "",
        "column of the label: integers or names, lists of them, or a number; empty: label (tokens: tags; question_answering: "
        "answers)",
    )
    class_priors: tuple[str, ...] | tuple[float, ...] = key(
        (),
        "public shares of the classes, in their order or as 'name=share': the loss of a class is divided by its share "
        "(classification)",
    )
    label_centre: float = key(0.0, "number that the model learns as 0; never taken from the data (regression)")
    label_scale: float = key(
        1.0,
        "difference from label_centre that the model learns as 1; never taken from the data (regression)",
        above=0.0,
    )
    stride: int = key(32, "tokens that neighbouring windows of a long context share (question_answering)", at_least=0)
    unanswerable: bool = key(
        False, "some questions have no answer in their context, as in SQuAD 2 (question_answering)"
    )
    learn_prompt: bool = key(False, "learn the prompt too, not only its continuation (causal_lm with text_b)")
    likelihood: str = key(
        "mean", "log-likelihood of a choice: mean or sum over its tokens (multiple_choice)", choices=("mean", "sum")
    )
    client: str = key("", "column that names the client of each row (patient, author, site)")
    examples: int = key(20_000, "training examples to generate (builtin/notes)", at_least=1, at_most=_NOTES)
    test_examples: int = key(2_000, "test examples to generate (builtin/notes)", at_least=1, at_most=_NOTES)
    test_fraction: float = key(0.2, "share of the data that is held out if there is no test set", above=0.0, below=1.0)
    partition: str = key(
        "auto",
        "division of the examples over clients; auto: natural if the data name each row's client, else dirichlet",
        choices=("auto", "iid", "dirichlet", "label_dirichlet", "language", "pathological", "matrix", "natural"),
    )
    alpha: float = key(
        10.0,
        "Dirichlet concentration, times the class share (dirichlet) or as it is (label_dirichlet, language); 1 is strong "
        "skew, 1000 is IID",
        above=0.0,
    )
    language: str = key("", "column that names each row's language: each client gets one language (language)")
    labels_per_client: int = key(2, "number of labels among a client's examples (pathological)", at_least=1)
    matrix: str = key("", "each label's shares for the clients, such as '0.9 0.1; 0.1 0.9' (matrix)")


@dataclass(frozen=True)
class TrainingConfig:
    lr: float | None = key(
        None,
        "local learning rate (the method's rate for a model of this width, which `secure-fed methods --model` lists; "
        "four times that with privacy)",
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


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = key(1, "evaluate after every so many rounds, and after the last", at_least=1)
    batch_size: int = key(64, "evaluation batch size", at_least=1)
    patience: int | None = key(
        None, "evaluations in a row without an improvement after which the run ends (never)", at_least=1, optional=5
    )
    keep_best: bool = key(False, "also keep the model of the best evaluation, for predict and export with --best")
    per_client: bool = key(False, "also measure the accuracy on each client's own examples: mean and worst decile")
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
        None, "report after how many rounds this accuracy was reached", above=0.0, at_most=1.0, optional=0.8
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


@dataclass(frozen=True)
class Sections:
    """All settings of a run, section by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def audit_fraction(self) -> float:
        """The share of the data's units for the audit, with the default for this run if it is not set."""
        chosen, settings = self.evaluation.audit_fraction, self.evaluation
        if chosen is not None:
            return chosen
        phantoms = self.privacy.unit != "none" or bool(settings.phantoms)
        return 0.0 if phantoms and settings.canaries == "none" else 0.1


def sections() -> dict[str, type]:
    """The class of every section, in their order."""
    return {section.name: section.default_factory for section in dataclasses.fields(Sections)}  # type: ignore[misc]


def commented_toml() -> str:
    """A TOML file of every key. Read back, it is the default configuration; keys without a default are commented out."""
    lines = ["# A secure-fed run. Every key stands at its default; `secure-fed train THIS_FILE` runs it."]
    for name, section in sections().items():
        lines += ["", f"[{name}]"]
        for setting in dataclasses.fields(section):
            lines += [f"# {setting.metadata['doc']}{limits_in_words(setting)}", _line(setting)]
    return "\n".join(lines) + "\n"


def _line(setting: Setting) -> str:
    if setting.default is None:
        return f"# {setting.name} = {json.dumps(setting.metadata['optional'])}"
    return f"{setting.name} = {json.dumps(setting.default)}"
