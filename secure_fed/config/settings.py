"""The settings of a run: one frozen dataclass for each section of the TOML file, and `Sections`, which holds them all.

Every field is made by `setting.key`, which has its explanation and its limits. A property beside the fields is a setting with
the default of this run where the setting is not set. Rules between settings are in `checks`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field, fields

from secure_fed.config.setting import key
from secure_fed.errors import ConfigError

_MEMORY = re.compile(r"(\d+|cpu|mps)=(\d+(?:\.\d+)?[KMG]i?B)")
WRITE = ("causal_lm", "chat")  # tasks whose models write texts
_NOTES = 10_000_000  # record numbers are distinct up to here


@dataclass(frozen=True)
class ModelConfig:
    """[model]: the model that is trained."""

    name: str = key("builtin/tiny", "builtin/tiny, a folder, or a Hugging Face Hub id")
    device: str = key(
        "cpu",
        "torch device: cpu, cuda, mps ...; auto: the GPU if there is one; of several devices, as in 'cuda:0, cuda:1', each "
        "trains a share of a round's clients",
    )
    dtype: str = key(
        "float32", "type of the model's computations; adapters stay float32", choices=("float32", "bfloat16")
    )
    revision: str = key("", "commit, tag or branch of a Hub model; empty: its main branch")
    trust_remote_code: bool = key(
        False,
        "run the Python code that a Hub model or a folder brings along; read it first, since it can do anything here",
    )
    quantization: str = key(
        "none",
        "how the frozen linear layers are stored, by bitsandbytes: none, 8bit (LLM.int8) or 4bit (normal floats)",
        choices=("none", "8bit", "4bit"),
    )
    max_length: int = key(128, "texts are cut after this many tokens", at_least=2)
    pooling: str = key(
        "auto",
        "input of the head: model, as in the architecture, often the first token; mean, the mean over tokens, for which "
        "sentence encoders are made; auto: mean for those (classification, multi_label, regression)",
        choices=("auto", "model", "mean"),
    )
    descriptions: tuple[str, ...] = key(
        (),
        "public descriptions, one 'class=description' for each class: the head starts from the model's reading of them, "
        "instead of random numbers (classification with model.pooling = 'mean')",
    )
    train_head: bool = key(
        True, "train the head; false: it stays as model.descriptions make it, and only a LoRA adapter trains"
    )
    device_map: str = key(
        "",
        "division of a model that is larger than model.device, by accelerate: auto, balanced or sequential over all GPUs, then "
        "host memory, then the disk; empty: all of it on model.device",
        choices=("", "auto", "balanced", "sequential"),
    )
    max_memory: tuple[str, ...] = key(
        (), "the most that model.device_map puts on each device, such as '0=20GiB' and 'cpu=60GiB'; empty: what is free"
    )

    @property
    def memory(self) -> dict[int | str, str]:
        """`max_memory` by device; ConfigError for an entry of another form."""
        found: dict[int | str, str] = {}
        for entry in self.max_memory:
            if not (read := _MEMORY.fullmatch(entry)):
                raise ConfigError(
                    f"model.max_memory has {entry!r:.80}: write the number of a GPU, or cpu, and a size, as in '0=20GiB' or "
                    "'cpu=60GiB'"
                ).about("model.max_memory", entry, "as in '0=20GiB' or 'cpu=60GiB'")
            found[int(read[1]) if read[1].isdigit() else read[1]] = read[2]
        return found


@dataclass(frozen=True)
class DataConfig:
    """[data]: the data, and their division over clients."""

    name: str = key(
        "builtin/notes", "builtin/notes, a Hub id (id:configuration if it has several) or a data set folder"
    )
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
            "chat",
        ),
    )
    text: str = key(
        "",
        "column of the text; empty: text (tokens: tokens, a list of words; question_answering: question; chat: messages, or "
        "conversations, or instruction, input and output)",
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
    revision: str = key("", "commit, tag or branch of a Hub data set; empty: its main branch")
    split: str = key("train", "split of the data set that clients train on")
    test_split: str = key(
        "", "its test split; empty: test, validation, valid or dev, the first that it has with labels"
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
    learn: str = key(
        "all",
        "the assistant's turns that are learned: all of them, or a conversation's last (chat)",
        choices=("all", "last"),
    )
    chat_template: str = key(
        "", "a file with a Jinja template in place of the tokenizer's own; a model without one gets ChatML (chat)"
    )
    metric: str = key(
        "",
        "how written answers are compared with targets: exact_match, f1 of words, or rouge_l (with evaluation.generate)",
        choices=("", "exact_match", "f1", "rouge_l"),
    )
    answer_pattern: str = key(
        "",
        "regular expression whose first group, or else whole match, exact_match compares, such as '#### (.*)'; empty: all of "
        "both texts",
    )


MOMENTUM = 0.5  # the server's, where `auto` chooses momentum


@dataclass(frozen=True)
class FederationConfig:
    """[federation]: clients, rounds, and the server's aggregation and optimiser."""

    clients: int | None = key(
        None,
        "number of clients (one per 100 examples up to 200; natural: as many as the data name)",
        at_least=1,
        optional=200,
    )
    cohort: int | None = key(None, "expected clients a round (10, or all if there are fewer)", at_least=1, optional=10)
    rounds: int = key(20, "communication rounds", at_least=1, at_most=1_000_000)
    seed: int = key(0, "seed of the partition, the cohorts and the training", at_least=0, at_most=2**32 - 1)
    sampling: str = key(
        "auto",
        "fixed: cohorts of exactly that size; poisson: each client at random by itself; schedule: clients in turn by a public "
        "order; auto: schedule where clients are protected",
        choices=("auto", "fixed", "poisson", "schedule"),
    )
    weighting: str = key(
        "uniform", "a client's weight in the mean: one, or its example count", choices=("uniform", "examples")
    )
    nonfinite: str = key(
        "skip", "a client sends NaN or infinity: leave it out, or fail the run", choices=("skip", "fail")
    )
    aggregate: str = key(
        "mean",
        "how the server combines a round's changes; trimmed_mean and median, coordinate by coordinate, withstand some clients "
        "that send arbitrary values",
        choices=("mean", "trimmed_mean", "median"),
    )
    trim: float = key(0.2, "share of the changes that trimmed_mean leaves out at either end", above=0.0, below=0.5)
    server_optimizer: str = key(
        "auto",
        "how the mean change is applied (FedOpt); auto: momentum where clients are protected and no setting excludes it, "
        "else mean",
        choices=("auto", "mean", "momentum", "adam"),
    )
    server_lr: float | None = key(
        None,
        "server learning rate (1; 0.01 with adam; fitted to the noise where clients are protected and train by adamw)",
        above=0.0,
        optional=1.0,
    )
    server_momentum: float | None = key(
        None,
        "server momentum, Adam's beta 1 (0.9; 0.5 where auto chooses momentum)",
        at_least=0.0,
        below=1.0,
        optional=0.9,
    )
    average_last: int | None = key(
        None,
        "last rounds whose models are averaged into the final model (1; a quarter of the rounds where clients are "
        "protected and train by adamw, unless the run may end early)",
        at_least=1,
        optional=1,
    )
    largest_value: float = key(
        1000.0,
        "largest magnitude of tensors that a client starts from; larger ones mean a diverged model or a lying server",
        above=0.0,
    )
    vanishing: float = key(
        0.0,
        "simulated dropout: share of a cohort (of all clients where privacy hides cohorts) that vanishes in the middle of "
        "every round",
        at_least=0.0,
        below=1.0,
    )

    @property
    def optimizer(self) -> str:
        """The server's optimiser, with its default if it is not set."""
        return "mean" if self.server_optimizer == "auto" else self.server_optimizer

    @property
    def server_rate(self) -> float:
        """The server's learning rate, with its default if it is not set. An Adam step moves each weight by about this much."""
        usual = 0.01 if self.server_optimizer == "adam" else 1.0
        return usual if self.server_lr is None else self.server_lr

    @property
    def server_beta(self) -> float:
        """The server's momentum, with its default if it is not set."""
        return 0.9 if self.server_momentum is None else self.server_momentum

    @property
    def averaged(self) -> int:
        """The number of last models that the final model averages, with its default if it is not set."""
        return 1 if self.average_last is None else self.average_last

    @property
    def momentum(self) -> float:
        """The momentum with which the server accumulates round means; 0 if it applies means directly, and with Adam."""
        return self.server_beta if self.server_optimizer == "momentum" else 0.0


_WIDEST = 65_536  # wider than any layer of a model that can be fine-tuned here


@dataclass(frozen=True)
class MethodConfig:
    """[method]: the settings of all methods. Each method reads some of them, which its card lists."""

    name: str = key(
        "auto",
        "see `secure-fed methods`; or a .py file; auto: as docs/choosing.md says, by unit, masks, task and model",
    )
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
        "tangent", "how FRA removes noise from a private mean", choices=("tangent", "shrink", "truncate", "none")
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
        "fedlora", "how FeDeRA's factors train and are averaged", choices=("fedlora", "ffa_lora", "rolora", "fra_lora")
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
    ranks_column: str = key(
        "",
        "in place of ranks, a column of data.train with the rank of the row's client; it becomes public with the run",
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


@dataclass(frozen=True)
class TrainingConfig:
    """[training]: the local training of a client in a round."""

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


@dataclass(frozen=True)
class PrivacyConfig:
    """[privacy]: the guarantee, its noise, and the ledger that it is charged to."""

    unit: str = key(
        "none",
        "unit that differential privacy protects: a client with all its examples, one example, or all examples of one person",
        choices=("none", "client", "example", "person"),
        same={"group": "person"},
    )
    epsilon: float | None = key(
        None, "the guarantee: the noise is calibrated to it; with noise_multiplier, a limit", above=0.0, optional=8.0
    )
    delta: float = key(1e-5, "the guarantee may fail with this probability; well below 1 / units", above=0.0, below=1.0)
    noise_multiplier: float | None = key(
        None,
        "standard deviation of the noise on a sum, in clip norms; set it or epsilon",
        at_least=1e-3,
        at_most=1e6,
        optional=1.0,
    )
    clip_norm: float | None = key(
        None,
        "largest norm of a contribution (client) or gradient (example, person) (1; of contributions trained by adamw the "
        "length of one step, lr times the square root of the number of trained parameters)",
        at_least=1e-9,
        at_most=1e9,
        optional=1.0,
    )
    clip_quantile: float | None = key(
        None,
        "clip norm that adapts until this share of contributions is shorter (client)",
        above=0.0,
        below=1.0,
        optional=0.5,
    )
    mechanism: str = key(
        "",
        "file of your own with another mechanism, such as laplace.py (client; docs/adding_a_mechanism.md); empty: Gaussian",
    )
    noise: str = key(
        "auto",
        "who adds the noise: the server to the sum (central), each client a share of it inside the secure sum (distributed), "
        "or each client to its contribution (local); auto: as `secure-fed budget plan` recommends among what the "
        "other settings allow (distributed: with secure_aggregation.enabled), or central with noise_multiplier",
        choices=("auto", "central", "distributed", "local"),
    )
    correlation: str = key(
        "auto",
        "banded: the noise of a round cancels a part of the noise of earlier rounds (federation.sampling = schedule, "
        "central noise); auto: banded where `secure-fed budget plan` recommends it",
        choices=("auto", "none", "banded"),
    )
    band: int | None = key(
        None,
        "rounds that correlated noise spans; not set: the band with the least noise on the final model",
        at_least=1,
        optional=20,
    )
    hidden_cohort: bool = key(
        False, "every client takes part in every round, and decides by a secret coin whether it trains (distributed)"
    )
    person_column: str = key("", "column that says whose an example is (patient), for unit = person")
    person_examples: int = key(8, "most examples used of one person", at_least=1)
    participations: int | None = key(
        None, "most rounds that a client takes part in (example, person, local noise)", at_least=1, optional=5
    )
    ledger: str = key(
        "",
        "budget file that runs share, from `secure-fed budget create`; empty: a file in the run directory, for this run",
    )
    data_set: str = key("", "name of the ledger's data set; empty: a digest identifies it")
    unit_name: str = key(
        "", "name of the unit in the ledger, the same in all its runs; empty: person_column, data.client, or the unit"
    )
    ledger_heads: str = key(
        "", "file with ledgers' newest heads, to detect an older copy; empty: a file in the user's state folder"
    )
    on_exhausted: str = key(
        "refuse",
        "if the rounds do not fit the budget: refuse the run, or stop when it is spent",
        choices=("refuse", "stop"),
    )
    even_if_hopeless: bool = key(
        False,
        "go on where the noise alone takes the model to chance, although a shared ledger, or the nodes of a deployment, pay",
    )

    @property
    def clip(self) -> float:
        """The clip norm, with its default if it is not set."""
        return 1.0 if self.clip_norm is None else self.clip_norm


@dataclass(frozen=True)
class SecureAggregationConfig:
    """[secure_aggregation]: the masks, and the faults that they withstand."""

    enabled: bool = key(False, "pairwise masks: the server learns sums of contributions, and no single contribution")
    corrupt: float = key(0.1, "share of a round's clients assumed to collude with the server", at_least=0.0, below=0.5)
    dropout: float = key(
        0.1, "share of a round's clients that may vanish; if more vanish, there is no sum", at_least=0.0, below=0.5
    )
    active: bool = key(False, "also protect against a lying server: signed keys, and one more message")
    neighbours: int | None = key(
        None, "clients that each client shares masks with (chosen; all, where there are few)", at_least=2, optional=64
    )
    threshold: int | None = key(None, "shares that open a client's masks (chosen)", at_least=2, optional=33)
    bits: int = key(32, "bits of a coordinate in the masked sum", choices=(32, 64))
    range: float = key(
        8.0, "largest coordinate of a contribution, where no clip norm bounds it", at_least=1e-6, at_most=1e6
    )
    most_examples: int = key(
        1000, "most examples that a client counts as (federation.weighting = examples)", at_least=1
    )


LOCAL_DIAGNOSTICS = ("discrepancy", "drift", "aggregation_error")  # these read each client's trained tensors
DIAGNOSTICS = ("variation", *LOCAL_DIAGNOSTICS)


@dataclass(frozen=True)
class EvaluationConfig:
    """[evaluation]: what is measured of a run, published beside it, and kept for an audit."""

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
    dummies: int | None = key(
        None,
        "dummy clients (or dummy examples, where privacy protects examples or persons), which hold nobody's data and exist for "
        "the audit alone: about half of them, chosen at random, pull the model along random directions, to measure how much it "
        "reveals of membership (with privacy as many as cost hardly any accuracy, else none)",
        at_least=0,
        at_most=100_000,
        optional=20,
    )
    audit_fraction: float | None = key(
        None,
        "share of the units of the data (examples; persons or clients where privacy protects these) on which membership is "
        "measured; about half of them, chosen at random, are held out and do not train. 0: all train "
        "(0.1; 0 with privacy or evaluation.dummies, unless canaries are set)",
        at_least=0.0,
        at_most=1.0,
        optional=0.1,
    )
    audit_unit: str = key(
        "auto",
        "unit of audit_fraction and evaluation.dummies without privacy: single examples, or clients with all their examples; "
        "auto: the unit that privacy protects, or else examples",
        choices=("auto", "example", "client"),
    )
    non_members: str | tuple[str, ...] = key(
        "",
        "file, folder or list of files with rows of the same kind as the training rows, which no client trains on: the final "
        "model's losses on them and on training rows are compared, for the owner of the data alone (with privacy and too few "
        "dummy units: test rows that were held out of the data)",
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


@dataclass(frozen=True)
class RecordConfig:
    """[record]: what a record of the processing states beside the settings. It changes nothing in a run, and is kept with it.

    All but `site` are on the public report: they are what the people whose data were used have a right to be told. The run's
    `config.json`, which is public too, has all of them, as the user wrote them.
    """

    operator: str = key("", "for the record: who is responsible for the run, with an address; empty: not stated")
    site: str = key("", "for the record: where the machine stands; in config.json, and not on the public report")
    purpose: str = key("", "for the record: what the model is trained for")
    legal_basis: str = key("", "for the record: the legal basis, such as an article, a consent or an ethics vote")
    recipients: str = key("", "for the record: who receives the model and the report")
    retention: str = key("", "for the record: how long the run's folder is kept")
    reason: str = key("", "for the record: why this epsilon, or why none")


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
    record: RecordConfig = field(default_factory=RecordConfig)

    @property
    def audit_fraction(self) -> float:
        """The share of the data's units for the audit, with the default for this run if it is not set."""
        chosen, settings = self.evaluation.audit_fraction, self.evaluation
        if chosen is not None:
            return chosen
        dummies = self.privacy.unit != "none" or bool(settings.dummies)
        return 0.0 if dummies and settings.canaries == "none" else 0.1


def sections() -> dict[str, type]:
    """The class of every section, in their order."""
    return {section.name: section.default_factory for section in dataclasses.fields(Sections)}  # type: ignore[misc]
