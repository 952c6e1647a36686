"""The sections [model] and [data]: the model that is trained, the data, and their division over clients."""

from __future__ import annotations

import re
from dataclasses import dataclass

from secure_fed.config.setting import key
from secure_fed.errors import ConfigError

_MEMORY = re.compile(r"(\d+|cpu|mps)=(\d+(?:\.\d+)?[KMG]i?B)")
WRITE = ("causal_lm", "chat")  # tasks whose models write texts
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
        "model",
        "input of the head: model, as in the architecture, often the first token; mean, the mean over tokens, for which "
        "sentence encoders are made (classification, multi_label, regression)",
        choices=("model", "mean"),
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
