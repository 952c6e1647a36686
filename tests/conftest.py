"""The environment of every test: no model hub, no shared cache, no writing to the home folder, one thread per process."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest

from tests import accounts, golden

# In continuous integration hypothesis tries the same cases every time, because the result must depend on the change alone; a
# developer's machine tries new ones. Neither has a deadline: the time to draw a case depends on the machine's load.
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, **_UNTIMED)
hypothesis.settings.register_profile("local", **_UNTIMED)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# Set before anything imports torch or huggingface_hub, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "huggingface")
_STATE = tempfile.TemporaryDirectory(prefix="secure-fed-state-")  # removed when the tests end
os.environ["XDG_STATE_HOME"] = _STATE.name  # ledgers' heads are noted there, never in the user's home folder
os.environ["XDG_CACHE_HOME"] = _STATE.name  # and the pass sizes that were found
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; threads would only compete


# The half a million objects of imported modules stay. To search them for garbage would cost every worker seconds.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Turn garbage collection on for the objects that tests make from here on."""
    gc.freeze()
    gc.enable()


# What these files test needs Unix sockets, owners of files, pseudo-terminals or process groups.
if sys.platform == "win32":
    collect_ignore_glob = [
        *("secure_fed/deployment/*", "secure_fed/flower/*", "privacy/test_ledger_kills.py"),
        *("secure_fed/test_silence.py", "secure_fed/test_report_in_browser.py"),
    ]


# Each of these files keeps one worker busy for long; started last, it would leave the other workers idle.
_FIRST = ("test_planted.py", "test_examples.py", "contracts/test_methods.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", metavar="I/N", help="every N-th of the tests, from the I-th on")
    parser.addoption("--rewrite-golden", action="store_true", help="write the kept texts anew: tests/golden.py")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the workers too that the kept texts are to be rewritten."""
    if config.getoption("--rewrite-golden"):
        os.environ[golden.REWRITE] = "1"


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part, the longest files first."""
    part, parts = map(int, config.getoption("--part").split("/"))
    config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % parts != part % parts])
    items[:] = sorted(items[part % parts :: parts], key=lambda item: not item.path.as_posix().endswith(_FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test and its fixtures with the accountant on a coarse grid; without a federation, tests compute few epsilons."""
    exact = any(name in item.path.as_posix() for name in accounts.EXACT)
    with nullcontext() if exact or "secure_fed.federation" not in sys.modules else accounts.coarse():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where torch sees no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session", autouse=True)
def durable_pragmas() -> Iterator[tuple[str, ...]]:
    """The pragmas of every SQLite file outside tests. In tests nothing waits for the disk, which only costs time: the system
    keeps a killed process's writes.
    """
    from privacy import ledger_file

    pragmas = ledger_file.PRAGMAS
    hasty = tuple("synchronous=OFF" if pragma.startswith("synchronous") else pragma for pragma in pragmas)
    with patch.object(os, "fsync", lambda descriptor: None), patch.object(ledger_file, "PRAGMAS", hasty):
        yield pragmas


@pytest.fixture(scope="session", autouse=True)
def one_parser() -> Iterator[None]:
    """The command line's parser is made once, for all commands of the tests."""
    from secure_fed.commands import cli

    with patch.object(cli, "parser", cache(cli.parser)):
        yield


@pytest.fixture(scope="session")
def small_tokenizer() -> Any:
    """A tokenizer with one token for each word of a small vocabulary, and BERT's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "calm", "wild", *(f"word{number}" for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, whose tokenizer has a template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.secure_fed.tasks.test_chat_template import CHATML, tokenizer

    folder, own = tmp_path_factory.mktemp("chatty"), tokenizer("byte-level BPE", CHATML)
    own.pad_token = "</s>"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(own), max_position_embeddings=256, **shape)).save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A folder with a BERT of one layer and 16 hidden units, without a classifier, as after pre-training."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("small-model")
    config = BertConfig(
        vocab_size=len(small_tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (48 rows, columns text, label, site) and test.jsonl (16 rows). One word gives the label."""
    folder = tmp_path_factory.mktemp("small-data")
    for name, count in (("train", 48), ("test", 16)):
        rows = [
            {
                "text": " ".join([f"word{(7 * row) % 40}", mood, f"word{(3 * row) % 40}"]),
                "label": mood,
                "site": f"site-{row % 6}",
            }
            for row, mood in ((row, ("calm", "wild")[row // 2 % 2]) for row in range(count))
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
