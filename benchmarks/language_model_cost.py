"""The cost of fine-tuning a language model with its real weights, beside plain PEFT and Opacus.

    python benchmarks/language_model_cost.py MODEL DATA [--only equal speed private memory] [--repeats 3]

MODEL: the folder of a causal language model, such as SmolLM2-135M-Instruct. DATA: a file of prompts (`text`) and their targets
(`answer`), such as gsm8k's train.jsonl.gz. The first texts of at most 256 tokens are used, or of another number named below, so
that no text is cut. LoRA of rank 8 on all linear layers, float32, AdamW, one thread.

Every figure is of a process of its own. The ways take turns; a figure is the median over the turns, and a ratio the median of
the turns' ratios. A first run finds an empty home folder. A second run finds the folder as the first has left it, and so every
comparison of passes that was kept there.

    equal      20 steps on 4 texts of at most 112 tokens, by one client and by plain PEFT, from the same tensors, over the same
               batches in the same order. Printed: the norm of the difference over the norm of the change, and the largest
               relative difference of the losses of 8 other texts; and the same for plain PEFT with the texts of each batch in
               reverse, which differs by rounding alone. Plain PEFT's cross-entropy is float64 here: torch's own is wrong by
               2e-5 in the gradients of 49,152 scores
    speed      CPU milliseconds a token (without padding) in the second round of three, which evaluates nothing: one client
               makes two steps on 4 texts, and four clients make one step each. Plain PEFT makes the same steps, one client
               after the other, on batches of like lengths. Then whole runs of 4 clients, 2 rounds and 2 steps on 4 texts: CPU
               seconds of the process from start to end, imports included on both sides. Only ours tokenises, and evaluates a
               text at the end
    private    CPU seconds of the same whole run private by example, over the run without privacy; and of 2 clients that make
               one step on 4 texts of at most 192 tokens by FFA-LoRA
    memory     one step on 4 texts of 192 to 256 tokens: the resident memory of the process at its peak (ru_maxrss), less its
               resident memory after the imports. So the model is counted, and everything that comes before the step
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from timing import Limit, at_most, machine, ratio, show

# torch is imported by child processes alone: the peak of a child's memory is at least its parent's at the start.

BATCH, LR = 4, 1e-4
MOST, TESTS = 2000, 8  # rows of the file that are read; texts that are not trained on
SECTIONS = ("equal", "speed", "private", "memory")
ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A training in a process of its own.

    way: ours, plain (PEFT), opacus or ghost (PEFT and Opacus), or equal (ours and plain beside it). steps: of a client in a
    round. shortest, longest: tokens of a text.
    """

    way: str
    clients: int = 1
    rounds: int = 1
    steps: int = 1
    method: str = "fedlora"
    private: bool = False
    checkpointing: bool = False
    shortest: int = 0
    longest: int = 256

    @property
    def settings(self) -> Row:
        """The settings of ours, without model and data."""
        tables: Row = {
            "federation": {"rounds": self.rounds, "cohort": self.clients, "sampling": "fixed"},
            "method": {"name": self.method, "rank": 8, "alpha": 16.0, "target_modules": "all-linear"},
            "training": {"lr": LR, "lr_schedule": "constant", "batch_size": BATCH, "steps": self.steps},
            "evaluation": {"every": self.rounds, "audit_fraction": 0.0},
        }
        if self.private:
            tables["privacy"] = {"unit": "example", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
            tables["evaluation"] = {"every": self.rounds, "dummies": 0}
        if self.checkpointing:
            tables["training"]["checkpointing"] = True
        return tables


# In the child process


def child(arm: Arm, model: str, work: Path) -> Row:
    """The figures of a training. `ticks`: the process's CPU seconds at the end of every round."""
    import torch
    from peft import LoraConfig  # noqa: F401
    from transformers import AutoModelForCausalLM, logging  # noqa: F401

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in (work / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"equal": equal, "ours": ours}.get(arm.way, plain)(arm, model, work, rows)


def ours(arm: Arm, model: str, work: Path, rows: list[Row]) -> Row:
    from secure_fed import Federation, RunConfig

    ticks: list[float] = []

    class Rounds:
        def on_round_end(self, record: Any, state: Any) -> None:
            ticks.append(time.process_time())

    imported = resident()
    files = {"train": str(work / "train.jsonl"), "test": str(work / "test.jsonl")}
    data = {"task": "causal_lm", "text_b": "answer", "client": "client"} | files
    tables = arm.settings | {"model": {"name": model, "max_length": arm.longest}, "data": data}
    federation = Federation(RunConfig.from_dict(tables), callbacks=[Rounds()])
    read = sum(len(item["input_ids"]) for own in federation.assembly.problem.train for item in own)
    if read != tokens(rows):
        raise SystemExit(f"ours reads {read} tokens, and plain PEFT {tokens(rows)}")
    trains = federation.run().summary["trainable"]
    return {"ticks": ticks, "trains": trains, "imported": imported}


def plain(arm: Arm, model: str, work: Path, rows: list[Row]) -> Row:
    """One adapter, which all clients train one after the other, each with an optimiser of its own."""
    import torch

    if arm.way != "plain":
        import opacus  # noqa: F401

    imported, ticks = resident(), list[float]()
    adapted = peft_model(model).train()
    if arm.checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
    moving = [one for one in adapted.parameters() if one.requires_grad]
    by_client = sorted(rows, key=lambda row: (row["client"], len(row["input_ids"])))
    for _ in range(arm.rounds):
        for _, own in itertools.groupby(by_client, lambda row: row["client"]):
            optimizer = torch.optim.AdamW(moving, LR, weight_decay=0.0)
            step = {"opacus": per_sample, "ghost": ghost}.get(arm.way, usual)(adapted, optimizer)
            for batch in batches(list(own)):
                step(padded(batch))
        ticks.append(time.process_time())
    return {"ticks": ticks, "trains": sum(one.numel() for one in moving), "imported": imported}


def peft_model(model: str) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora)


def usual(model: Any, optimizer: Any) -> Any:
    def step(batch: Row) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return step


def per_sample(model: Any, optimizer: Any) -> Any:
    """Opacus's gradients of every example, clipped, and noise."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model, strict=False, loss_reduction="mean")
    private = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH)

    def step(batch: Row) -> None:
        private.zero_grad()
        losses(wrapped, batch).mean().backward()
        private.step()

    return step


def ghost(model: Any, optimizer: Any) -> Any:
    """Opacus's ghost clipping: norms from activations, then a second backward pass of the scaled losses."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, strict=False, max_grad_norm=1.0, loss_reduction="mean")
    private = DPOptimizerFastGradientClipping(
        optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )

    def step(batch: Row) -> None:
        private.zero_grad()
        DPTensorFastGradientClipping(wrapped, private, losses(wrapped, batch)).backward()
        private.step()

    return step


def losses(model: Any, batch: Row, *, exact: bool = False) -> Any:
    """(B,) means over an example's labelled tokens. exact: from scores in float64."""
    from torch.nn.functional import cross_entropy

    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    rows = (scores.double() if exact else scores).flatten(0, 1)
    each = cross_entropy(rows, targets.flatten(), reduction="none").view_as(targets)
    return each.sum(1) / (targets != -100).sum(1)


def padded(rows: Sequence[Row]) -> Row:
    """input_ids, attention_mask and labels, each (B, longest)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def column(name: str, fill: int) -> Any:
        return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=fill)

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {"input_ids": column("input_ids", 0), "attention_mask": mask, "labels": column("labels", -100)}


def equal(arm: Arm, model: str, work: Path, rows: list[Row]) -> Row:
    """One client of ours, and plain PEFT over the batches that ours has read."""
    import torch
    from transformers import AutoModelForCausalLM

    from secure_fed import Federation, RunConfig
    from secure_fed.config import DataConfig
    from secure_fed.learning import tasks

    order: dict[int, None] = {}  # the training texts in the order of their first use: each is used in one step

    def collate(items: list[Row]) -> Row:
        order.update(dict.fromkeys(item["number"] for item in items if item["number"] < arm.steps * BATCH))
        return padded(items)

    task = tasks.build(DataConfig(task="causal_lm"))
    items = [
        {"number": number, **{name: row[name] for name in ("input_ids", "labels")}} for number, row in enumerate(rows)
    ]
    train, test = items[: arm.steps * BATCH], items[arm.steps * BATCH :]
    federation = Federation(
        RunConfig.from_dict(arm.settings),
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        train=[train],
        test=test,
        collate=collate,
        loss=task.loss(()),
        metrics=task.metrics(()),
    )
    start = federation.assembly.initial.tensors.parts()
    order.clear()
    result = federation.run()
    used = batches([items[number] for number in order])

    def alone(used: Sequence[Sequence[Row]]) -> tuple[dict[str, Any], Any]:
        """Plain PEFT's tensors after a step on each batch, and the losses of the test texts."""
        adapted = peft_model(model).train()
        moving = {name: adapted.get_parameter(f"base_model.model.{name}") for name in start}
        if len(moving) != sum(one.requires_grad for one in adapted.parameters()):
            raise SystemExit(f"ours trains {len(moving)} tensors, and plain PEFT others")
        for name, parameter in moving.items():
            parameter.data.copy_(start[name])
        optimizer = torch.optim.AdamW(moving.values(), LR, weight_decay=0.0)
        for batch in used:
            optimizer.zero_grad()
            losses(adapted, padded(batch), exact=True).mean().backward()
            optimizer.step()
        return moving, tested(adapted)

    @torch.no_grad()
    def tested(adapted: Any) -> Any:
        return losses(adapted.eval(), padded(test), exact=True)

    def norm(one: Any, other: Any) -> float:
        return math.sqrt(sum(float((one[name] - other[name]).detach().double().square().sum()) for name in start))

    reference, wanted = alone(used)
    made: Row = {}
    for name, (moved, found) in {
        "ours": (result.state.tensors.parts(), tested(federation.load(result.state))),
        "plain, batches in reverse": alone([batch[::-1] for batch in used]),
    }.items():
        of_losses = ((found - wanted) / wanted).abs().max()
        made[name] = [norm(moved, reference) / norm(reference, start), float(of_losses)]
    return {"steps": len(used), "differences": made}


def batches(rows: Sequence[Row]) -> list[Sequence[Row]]:
    return [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]


def resident() -> int:
    """The kilobytes of this process now in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() // 1024


def tokens(rows: Sequence[Row]) -> int:
    return sum(len(row["input_ids"]) for row in rows)


# In the parent process


@dataclass(frozen=True)
class Bench:
    """Trainings on one model and one file. rows: its texts as token ids, in their order."""

    model: str
    rows: list[Row]

    @classmethod
    def of(cls, model: Path, data: Path) -> Bench:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        end = json.loads((model / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        with gzip.open(data, "rt") if data.suffix == ".gz" else data.open(encoding="utf-8") as file:
            return cls(
                str(model), [encoded(tokenizer, end, row) for row in map(json.loads, itertools.islice(file, MOST))]
            )

    def texts(self, arm: Arm) -> tuple[list[Row], list[Row]]:
        """The clients' texts, in equal parts, and others."""
        count = arm.clients * arm.steps * BATCH
        fit = [row for row in self.rows if arm.shortest <= len(row["input_ids"]) <= arm.longest]
        if len(fit) < count + TESTS:
            raise SystemExit(
                f"{len(fit)} of the first {MOST} texts have {arm.shortest} to {arm.longest} tokens; {count + TESTS} are needed"
            )
        own = [row | {"client": f"client {at * arm.clients // count}"} for at, row in enumerate(fit[:count])]
        return own, fit[count : count + TESTS]

    def run(self, arm: Arm, home: str) -> Row:
        """The figures of a training in a process of its own; {} if it fails, with a message."""
        own, others = self.texts(arm)
        with tempfile.TemporaryDirectory() as work:
            for name, rows in (("train", own + others * (arm.way == "equal")), ("test", others[:1])):
                Path(work, f"{name}.jsonl").write_text(
                    "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
                )
            command = [sys.executable, __file__, self.model, work, "--arm", json.dumps(asdict(arm))]
            folders = dict.fromkeys(("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), home)
            settings = {
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            done = subprocess.run(
                command, env=os.environ | folders | settings, capture_output=True, text=True, check=False
            )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            print(f"    failed: {arm.way}: {why}", flush=True)
            return {}
        return {"tokens": tokens(own), **json.loads(done.stdout.splitlines()[-1])}

    def turns(self, title: str, ways: dict[str, Arm], repeats: int, figure: Any, unit: str) -> dict[str, list[float]]:
        """The figure of each way in each turn, nan if it failed, printed beside the first way's.

        A way that comes again in a turn finds the home folder that it has left.
        """
        found: dict[str, list[float]] = {name: [] for name in ways}
        print(f"{title}, {unit}", flush=True)
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as homes:
                for name, arm in ways.items():
                    home = Path(homes, str(list(ways.values()).index(arm)))
                    home.mkdir(exist_ok=True)
                    made = self.run(arm, str(home))
                    found[name].append(figure(made) if made else math.nan)
                    print(f"{name}: {found[name][-1]:.2f}", file=sys.stderr, flush=True)
        first = next(iter(found.values()))
        for name, each in found.items():
            raw = " ".join(f"{value:.2f}" for value in each)
            print(f"    {name:40}{statistics.median(each):10.2f}{ratio(each, first):8.2f}   {raw}", flush=True)
        return found


def encoded(tokenizer: Any, end: int, row: Row) -> Row:
    """Prompt, a space, the target, the end token; the labels are the target's tokens and the end."""
    text = f"{row['text']} {row['answer']}"
    found = tokenizer.encode(text)
    learned = [stop > len(row["text"]) + 1 for _, stop in found.offsets]
    labels = [one if own else -100 for one, own in zip(found.ids, learned, strict=True)]
    return {name: row[name] for name in ("text", "answer")} | {"input_ids": [*found.ids, end], "labels": [*labels, end]}


def measure_equal(bench: Bench, repeats: int) -> Iterator[Limit]:
    with tempfile.TemporaryDirectory() as home:
        made = bench.run(Arm("equal", steps=20, longest=112), home)
    print(f"equal: {made.get('steps', 0)} steps, difference from plain PEFT: over the change; of losses")
    for name, each in (found := made.get("differences", {"ours": [math.nan] * 2})).items():
        print(f"    {name:40}{each[0]:10.1e}{each[1]:10.1e}")
    for what, each in zip(("over the change", "of the losses"), found["ours"], strict=True):
        yield at_most(f"millionths by which 20 steps differ from plain PEFT's, {what}", 1e6 * each, 100)


def measure_speed(bench: Bench, repeats: int) -> Iterator[Limit]:
    def a_token(made: Row) -> float:
        return float(1000 * (made["ticks"][1] - made["ticks"][0]) / made["tokens"])

    for clients, steps in ((1, 2), (4, 1)):
        ways = {way: Arm(way, clients, 3, steps) for way in ("plain", "ours")}
        who = "one client" if clients == 1 else f"{clients} clients"
        found = bench.turns(
            f"speed: {who}, a round of {clients * steps * BATCH} texts", ways, repeats, a_token, "CPU ms a token"
        )
        yield at_most(f"CPU time a token, {who}, over plain PEFT", ratio(found["ours"], found["plain"]), 0.8)
    ways = {way: Arm(way, 4, 2, 2) for way in ("plain", "ours")}
    found = bench.turns("speed: a whole run, 4 clients x 2 rounds x 2 steps", ways, repeats, cpu, "CPU s")
    yield at_most("CPU time of a whole run over plain PEFT", ratio(found["ours"], found["plain"]), 1.0)


def measure_private(bench: Bench, repeats: int) -> Iterator[Limit]:
    settings = {
        "4 clients x 2 rounds x 2 steps": Arm("ours", 4, 2, 2),
        "2 clients, one step, FFA-LoRA": Arm("ours", 2, 1, 1, method="ffa_lora", longest=192),
    }
    for about, arm in settings.items():
        private = replace(arm, private=True)
        ways = {"without privacy": arm, "by example, first run": private, "by example, second run": private}
        found = bench.turns(f"private: {about}", ways, repeats, cpu, "CPU s")
        for name, most in (("first", 3.0), ("second", 1.5)):
            over = ratio(found[f"by example, {name} run"], found["without privacy"])
            yield at_most(f"private over not private, {name} run: {about}", over, most)


def measure_memory(bench: Bench, repeats: int) -> Iterator[Limit]:
    usual = Arm("plain", shortest=192)
    ours, private = replace(usual, way="ours"), replace(usual, way="ours", private=True)
    ways = {
        "plain PEFT": usual,
        "plain PEFT, checkpointing": replace(usual, checkpointing=True),
        "Opacus, gradients of each example": replace(usual, way="opacus"),
        "Opacus, ghost clipping": replace(usual, way="ghost"),
        "ours": ours,
        "ours, checkpointing": replace(ours, checkpointing=True),
        "ours, by example": private,
        "ours, by example, second run": private,
        "ours, by example, checkpointing": replace(private, checkpointing=True),
    }
    found = bench.turns("memory at the peak, less that after the imports", ways, 1, peak, "GiB")

    def over(one: str, other: str, most: float) -> Limit:
        return at_most(f"peak memory, {one} over {other}", ratio(found[one], found[other]), most)

    yield over("ours, checkpointing", "plain PEFT, checkpointing", 1.15)
    yield over("ours, by example", "ours", 1.25)
    yield over("ours, by example, second run", "ours", 1.25)


def cpu(made: Row) -> float:
    return float(made["cpu"])


def peak(made: Row) -> float:
    return float((made["peak"] - made["imported"]) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=3, help="turns of speed and private")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of a child process, whose DATA is its working folder
    given = parser.parse_args()
    if given.arm:
        made = child(Arm(**json.loads(given.arm)), str(given.model), given.data)
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps(made | {"cpu": time.process_time(), "peak": used.ru_maxrss}))
        return
    print(machine("torch", "transformers", "peft", "opacus") + "; one thread", flush=True)
    bench = Bench.of(given.model, given.data)
    measures = dict(zip(SECTIONS, (measure_equal, measure_speed, measure_private, measure_memory), strict=True))
    show([limit for name in given.only for limit in measures[name](bench, given.repeats)])


if __name__ == "__main__":
    main()
