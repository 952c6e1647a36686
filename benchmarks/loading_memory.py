"""Host memory of loading and training a language model, in each type and number of bits, beside plain transformers and PEFT.

    python benchmarks/loading_memory.py MODEL [--rows 4] [--only float32]

MODEL: the folder of a causal language model. Each way loads it in a process of its own, after the imports and after a small
model has been loaded. Printed, in MiB: the bytes of the weights (with their scales, where they are quantised); the anonymous
memory that loading adds at its peak, read every few milliseconds, without the tokenizer's (RssAnon: without pages of the
file, which the system drops when it needs them); and what stays. Then one forward and backward pass over `--rows` texts of
128 tokens by LoRA of rank 8, ours or PEFT's: the same peak (0 rows: no pass, which takes minutes in bfloat16 on a processor
without units for it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timing import Limit, at_most, machine, show

ROOT = Path(__file__).resolve().parents[1]
WAYS = [("float32", "none"), ("bfloat16", "none"), ("float32", "8bit"), ("float32", "4bit"), ("bfloat16", "4bit")]


def anonymous() -> float:
    """MiB of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system does not tell anonymous memory")


@contextmanager
def watched(found: list[float]) -> Iterator[None]:
    """Appends the peak of anonymous memory within the block."""
    peak, over = [anonymous()], threading.Event()

    def watch() -> None:
        while not over.wait(0.003):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        found.append(max(peak[0], anonymous()))


def child(model: str, whose: str, dtype: str, bits: str, rows: int) -> dict[str, float]:
    import peft
    import torch
    import transformers

    from secure_fed.config import DataConfig, ModelConfig
    from secure_fed.learning import tasks
    from secure_fed.learning.models import loading, quantised
    from secure_fed.learning.models.adapters.lora import LoraAdapter

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = ModelConfig(name=model, dtype=dtype, quantization=bits, max_length=128)
    task = tasks.build(DataConfig(task="causal_lm", train="x"))
    small = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    transformers.LlamaForCausalLM(small)(input_ids=torch.zeros(1, 4, dtype=torch.long))
    if bits != "none":
        import bitsandbytes  # noqa: F401
    held = [transformers.AutoTokenizer.from_pretrained(model)]  # with the modules that the first one imports
    bare = anonymous()
    held.append(transformers.AutoTokenizer.from_pretrained(model))
    of_tokenizer = anonymous() - bare if whose == "ours" else 0.0  # which loads another one beside the model
    before, peaks = anonymous() + of_tokenizer, list[float]()
    with watched(peaks):
        if whose == "ours":
            loaded: Any = loading.load(config, task, (), 0).model
        else:
            chosen = quantised.settings(config, torch.device("cpu"), [])
            loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **chosen)
    stays = anonymous()
    tensors = [*loaded.parameters(), *quantised.scales(loaded).values()]
    weights = sum(one.numel() * one.element_size() for one in tensors) / 2**20
    held.clear()
    if whose == "ours":
        LoraAdapter(target_modules="all-linear").inject(loaded, (), 0)
    else:
        loaded = peft.get_peft_model(loaded, peft.LoraConfig(r=8, target_modules="all-linear"))
    with watched(peaks):
        if rows:
            ids = torch.randint(0, 1000, (rows, 128))
            loaded.train()(input_ids=ids, labels=ids).loss.backward()
    return {"weights": weights, "loading": peaks[0] - before, "stays": stays - before, "step": peaks[1] - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--only", choices=("float32", "bfloat16"), help="the ways of this type alone")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(str(given.model), *given.child, given.rows)))
        return
    print(machine("torch", "transformers", "peft", "bitsandbytes") + "; one thread", flush=True)
    print(f"{'MiB':24}{'weights':>10}{'loading':>10}{'stays':>10}{'step':>10}")
    limits: list[Limit] = []
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for dtype, bits in [way for way in WAYS if given.only in (None, way[0])]:
        for whose in ("ours", "plain"):
            command = [
                sys.executable,
                __file__,
                str(given.model),
                "--rows",
                str(given.rows),
                "--child",
                whose,
                dtype,
                bits,
            ]
            done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
            made = json.loads(done.stdout.splitlines()[-1])
            about = f"{dtype}{'' if bits == 'none' else ', ' + bits}, {whose}"
            print(
                f"{about:24}" + "".join(f"{made[name]:10.0f}" for name in ("weights", "loading", "stays", "step")),
                flush=True,
            )
            if whose == "ours" and bits == "none":
                limits.append(
                    at_most(f"memory of loading over the weights, {dtype}", made["loading"] / made["weights"], 1.1)
                )
    show(limits)


if __name__ == "__main__":
    main()
