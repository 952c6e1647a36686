"""One training run of `learns.py`: the data, a method of ours with all data at one client, or its peer.

Both sides have the same encoder, the same texts, AdamW, and as many steps of as many texts. The rate is constant over 80 steps.
Over 200 steps, the peer's rate falls linearly to zero, as in Hugging Face's Trainer; ours falls in the last fifth of the steps,
with the method's default rate for the head's last layer (three times the rest's; `head`, `c2a`: once). Ours restarts AdamW in
every round, as clients do.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claims import configured, encoder
from peers import environments
from peers.fine_tuning import BATCH, classes_of, fine_tuned, rows_of

from secure_fed import Federation
from secure_fed.methods import METHODS, card

TEST, LENGTH, ROUNDS = 1000, 32, 10
TEXTS = {80: 2000, 200: 3200, 1000: 16_000}  # training texts, by the number of steps
MEAN = ", mean"  # suffix of a data set's name: the head reads the mean over tokens
SEARCHED, LATER = (
    ("sst2", "ag_news"),
    ("newsgroups20", "trec", "subj", f"sst2{MEAN}"),
)  # data sets for choosing the default rates, and others


def defaults(method: str, steps: int) -> tuple[str, float]:
    """The default schedule of the rate, and the default ratio of the rate of the head's last layer to the others'."""
    if steps == 80:
        return "constant", 1.0
    return ("stable_decay", card(method).head_factor) if method in METHODS else ("linear", 1.0)


# Names of earlier schedules: the rate fell over the last third of the rounds and was constant within a round; or it fell step
# by step over the last third.
FORMER, THIRD = "stable_decay, by rounds", "stable_decay, last third"


# The peer of each method. Methods that PEFT lacks (whole biases, bottleneck adapters) are compared with full training.
LORA, ADALORA, FULL = "PEFT LoRA", "PEFT AdaLoRA", "full training"
PEERS = {
    **dict.fromkeys(
        ("fedlora", "ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "fedsvd", "fedask", "fedpower"), LORA
    ),
    "federa": "PEFT PiSSA",
    **dict.fromkeys(("svd_adaptation", "fedara"), ADALORA),
    "ia3": "PEFT IA3",
    "prompt_tuning": "PEFT prompt tuning",
    "prefix_tuning": "PEFT prefix tuning",
    "p_tuning": "PEFT P-tuning",
    **dict.fromkeys(("fedft", "head", "bitfit", "adapter_houlsby", "adapter_pfeiffer", "compacter", "adamix"), FULL),
    **dict.fromkeys(("fedtt", "fedtt_plus", "c2a"), FULL),
}
HUB, BIASES = "AdapterHub's ", "plain BitFit"
SAME = {  # the same method elsewhere, for methods that PEFT lacks
    "bitfit": BIASES,
    "adapter_houlsby": f"{HUB}Houlsby",
    "adapter_pfeiffer": f"{HUB}Pfeiffer",
    "compacter": f"{HUB}Compacter",
}


def cut(data: Path, name: str, split: str, out: Path, texts: int) -> Path:
    """The first rows of a permutation by a fixed seed, as `text` and `label`; a post's subject comes before its body.

    texts: the number of training texts; there are TEST test texts.
    """
    count = texts if split == "train" else TEST
    name = name.removesuffix(MEAN)
    place = out / f"{name}-{split}-{count}.jsonl"
    if not place.exists():
        with gzip.open(data / name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        full = [" ".join([row.get("subject", ""), row["text"]]).strip() for row in rows]
        order = [int(i) for i in np.random.default_rng(0).permutation(len(rows)) if full[int(i)]]
        kept = [{"text": full[i], "label": rows[i]["label"]} for i in order[:count]]
        out.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return place


def commonest(place: Path) -> float:
    """The accuracy of always predicting the commonest label."""
    labels = [row["label"] for row in rows_of(place)]
    return max(map(labels.count, set(labels))) / len(labels)


def ours(
    method: str,
    files: dict[str, Path],
    pooling: str,
    rate: float,
    seed: int,
    steps: int,
    falls: str,
    head: float,
    sizes: str = "",
) -> float:
    """The test accuracy of a method after `steps` steps, with all data at one client. sizes: settings, separated by spaces."""
    settings: dict[str, Any] = {
        "model.name": str(encoder()),
        "model.device": "auto",
        "model.pooling": pooling,
        "model.max_length": LENGTH,
        **{f"data.{split}": str(place) for split, place in files.items()},
        "federation.clients": 1,
        "federation.cohort": 1,
        "federation.rounds": ROUNDS,
        "federation.seed": seed,
        "method.name": method,
        "training.steps": steps // ROUNDS,
        "training.batch_size": BATCH,
        "training.lr": rate,
        "training.lr_schedule": falls,
        "training.head_factor": head,
        "training.together": 1,
        "evaluation.every": ROUNDS,
        "evaluation.audit_fraction": 0.0,
    }
    for name, value in (each.split("=", 1) for each in sizes.split()):
        settings[name] = tomllib.loads(f"value = {value}")["value"]
    return float(Federation(configured(settings)).run().summary["accuracy"])


def peer(kind: str, files: dict[str, Path], pooling: str, rate: float, seed: int, steps: int, falls: str) -> float:
    """The test accuracy of PEFT's own training, of AdapterHub's, or of training every weight or every bias."""
    settings = {"length": LENGTH, "rate": rate, "seed": seed, "steps": steps, "falls": falls}
    if kind.startswith(HUB):
        return _adapter_hub(kind.removeprefix(HUB), files, pooling, settings)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    from secure_fed import MeanPooledForSequenceClassification

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    made: Any = MeanPooledForSequenceClassification if pooling == "mean" else AutoModelForSequenceClassification
    model: Any = made.from_pretrained(encoder(), num_labels=classes_of(files))
    return fine_tuned(_adapted(kind, model, steps), AutoTokenizer.from_pretrained(encoder()), files, **settings)


def _adapter_hub(kind: str, files: dict[str, Path], pooling: str, settings: dict[str, Any]) -> float:
    """The test accuracy in AdapterHub's own environment, which is created if it does not exist."""
    script = Path(__file__).parent / "peers" / "adapter_hub.py"
    said = {**settings, "files": {split: str(place) for split, place in files.items()}, "pooling": pooling}
    command = [str(environments.python("adapters")), str(script), kind, json.dumps(said | {"model": str(encoder())})]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _adapted(kind: str, model: Any, steps: int) -> Any:
    """The model with PEFT's adapter, with our default settings."""
    if kind == FULL:
        return model
    if kind == BIASES:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("bias") or name.startswith("classifier.")
        return model
    import peft

    given: dict[str, Any] = {"task_type": "SEQ_CLS"}
    adapted = given | {"target_modules": ["query", "value"]}  # PEFT's choice for BERT
    low_rank = adapted | {"r": 8, "lora_alpha": 16}
    config = {
        LORA: lambda: peft.LoraConfig(**low_rank),
        "PEFT PiSSA": lambda: peft.LoraConfig(**low_rank | {"lora_alpha": 8}, init_lora_weights="pissa"),
        ADALORA: lambda: peft.AdaLoraConfig(
            **adapted, init_r=8, target_r=8, lora_alpha=16, total_step=steps, orth_reg_weight=0.0
        ),
        "PEFT IA3": lambda: peft.IA3Config(
            **given, target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
        ),
        "PEFT prompt tuning": lambda: peft.PromptTuningConfig(**given, num_virtual_tokens=20),
        "PEFT prefix tuning": lambda: peft.PrefixTuningConfig(**given, num_virtual_tokens=20),
        "PEFT P-tuning": lambda: peft.PromptEncoderConfig(**given, num_virtual_tokens=20, encoder_hidden_size=384),
    }[kind]()
    return peft.get_peft_model(model, config)
