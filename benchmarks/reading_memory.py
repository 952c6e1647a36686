"""Host memory of a large data set: reading, dividing and tokenising it, as a run does before it trains.

    python benchmarks/reading_memory.py [--rows 200000] [--tokenizer FOLDER]

Made texts of 40 words on average are written to a Parquet file, and by `save_to_disk` to a folder, the form in which data sets
of the Hub lie in their cache; a second column of texts is read by nobody. The learning problem is made in a process of its own:
classification of either, with the built-in model, and with `--tokenizer` (the folder of a language model, whose tokenizer alone
is used), language modelling of the file with a model of one narrow layer. Printed: the anonymous memory that this adds at its
peak, read every few milliseconds (RssAnon: without pages of files, which the system drops when it needs them), and what stays;
bytes of token ids; seconds; and a digest of all examples, which must not depend on where they are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from loading_memory import ROOT, anonymous, watched
from timing import machine

WORDS, VOCABULARY = 40, 30_000


def make(folder: Path, rows: int) -> None:
    """`data.parquet` and the folder `saved`, of the same rows."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, int(size))) for size in rng.integers(2, 10, VOCABULARY)])
    chances = 1 / np.arange(10, VOCABULARY + 10)
    drawn = np.searchsorted(np.cumsum(chances / chances.sum()), rng.random(rows * WORDS))
    ends = np.sort(rng.choice(rows * WORDS - 1, rows - 1, replace=False)) + 1
    texts = [" ".join(one) for one in np.split(words[drawn.clip(max=VOCABULARY - 1)], ends)]
    labels = rng.integers(0, 4, rows)
    table = pyarrow.table({"text": texts, "label": labels, "unread": texts[::-1]})
    parquet.write_table(table, folder / "data.parquet")
    datasets.Dataset(table).save_to_disk(folder / "saved")
    print(f"{rows:,} rows, {sum(map(len, texts)) / 2**20:.0f} MiB of text", flush=True)


def narrow(folder: Path, source: str) -> None:
    """A language model of one narrow layer with another's tokenizer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)


def child(folder: str, task: str, source: str) -> dict[str, Any]:
    import torch
    import transformers

    from secure_fed.config import RunConfig
    from secure_fed.learning.problem import configured

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = {"max_length": 128, "name": "builtin/tiny" if task == "classification" else f"{folder}/model"}

    def problem(place: str) -> Any:
        data = {"train": f"{place}/data.parquet"} if source == "file" else {"name": f"{place}/saved"}
        every = {"data": {**data, "task": task, "partition": "iid"}, "model": model, "federation": {"clients": 10}}
        return configured(RunConfig.from_dict(every))

    problem(f"{folder}/few")
    before, peaks, began = anonymous(), list[float](), time.perf_counter()
    with watched(peaks):
        made = problem(folder)
    seconds, stays, digest, count = time.perf_counter() - began, anonymous(), hashlib.sha256(), 0
    for own in (*made.train, made.test):
        for example in own:
            digest.update(example["input_ids"].tobytes() + np.asarray(example["labels"]).tobytes())
            count += len(example["input_ids"])
    digest.update(made.data_digest.encode())
    found = {"peak": peaks[0] - before, "stays": stays - before, "ids": count * 4 / 2**20, "seconds": seconds}
    return found | {"digest": digest.hexdigest()[:12]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--tokenizer")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(*given.child)))
        return
    print(machine("torch", "transformers", "datasets", "pyarrow") + "; one thread", flush=True)
    tasks = ["classification", *(["causal_lm"] if given.tokenizer else [])]
    settings = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "few"), 500)  # read first, so that imports are not counted
        make(Path(folder), given.rows)
        if given.tokenizer:
            narrow(Path(folder, "model"), given.tokenizer)
        print(f"{'MiB':28}{'peak':>8}{'stays':>8}{'ids':>8}{'seconds':>10}  digest")
        for task in tasks:
            for source in ("file", "saved folder") if task == "classification" else ("file",):
                command = [sys.executable, __file__, "--child", folder, task, source]
                done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                one = json.loads(done.stdout.splitlines()[-1])
                numbers = "".join(f"{one[name]:8.0f}" for name in ("peak", "stays", "ids")) + f"{one['seconds']:10.0f}"
                print(f"{task + ', ' + source:28}{numbers}  {one['digest']}", flush=True)


if __name__ == "__main__":
    main()
