"""A finished (or interrupted) run, read back: its model with the trained tensors, ready to predict or to export."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from secure_fed.activity import activity
from secure_fed.config.settings import WRITE
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.export.adapter_folder import base_model
from secure_fed.export.export import Adapted, merge, write_adapter, write_merged
from secure_fed.export.model_card import ModelCard, run_facts
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import batches
from secure_fed.learning.data.holdout import GIVEN
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.evaluation import answers
from secure_fed.learning.generation import prompt_room
from secure_fed.learning.models import loading
from secure_fed.learning.models.devices import device_of
from secure_fed.learning.models.loading import digest_of, head_of
from secure_fed.learning.tasks import classification
from secure_fed.learning.tasks.causal_lm import CausalLM
from secure_fed.learning.tasks.chat import ChatTemplate
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.tasks.task import Answer
from secure_fed.learning.training.objective import Objective, to_device
from secure_fed.methods import build
from secure_fed.methods.method import fits
from secure_fed.rounds.client_models import completed
from secure_fed.runs.directory import METRICS, Published, is_deployed, withholds_test
from secure_fed.runs.store import Checkpoint, read_best, read_checkpoint, read_lines, read_personal


@dataclass(frozen=True)
class Trained(Adapted):
    """A run's model, of one client where tensors are personal. state: the last state, completed by that client's tensors."""

    label_names: tuple[str, ...] = ()

    @torch.no_grad()
    def predict(self, texts: Sequence[Any], pairs: Sequence[Any] | None = None) -> Iterator[Answer]:
        """The task's answer for each text (or pair), in order: for classification {"label", "probability"}."""
        task, settings = tasks.build(self.config.data), self.config.evaluation
        _require_texts("texts", texts, words=self.config.data.task in ("tokens", "chat"))
        if pairs is None and task.columns.text_b:
            raise ConfigError(
                f"this run judges {task.columns.text!r} and {task.columns.text_b!r} together, but only the first was given: "
                "name a FILE with both columns, or give pairs in Python"
            ).about("FILE", task.columns.text, f"{task.columns.text} and {task.columns.text_b}")
        lines = tuple(task.line(text) for text in texts)
        nothing = (task.unlabelled,) * len(lines)
        rows = Rows(lines, nothing, self.label_names, tuple(pairs) if pairs is not None else None)
        encoded = task.encode(self.tokenizer, rows, self.config.model.max_length)
        device = device_of(self.model)
        found: dict[int, Answer] = {}
        self.model.eval()
        there = np.flatnonzero(encoded.lengths)  # others have no room, or nothing to judge
        read = batches(encoded.take(there), settings.batch_size, task.collate(self.tokenizer), None)
        with activity("labelling texts in batches", -(-len(there) // settings.batch_size)) as now:
            for batch in read:
                now.step()
                with rows_together():
                    answers = task.answers(self.model, to_device(batch.inputs, device), self.label_names)
                found.update(zip(there[batch.indices].tolist(), answers, strict=True))
        for index in range(len(lines)):
            yield found.get(index, {})

    def generate(
        self, prompts: Sequence[Any], max_new_tokens: int = 32, *, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """What a language model writes after each prompt, in order: up to `max_new_tokens` tokens, or up to its end token.

        prompts: texts; of a chat model questions, or lists of {role, content}, whose last answer is left out.

        temperature: at 0 the most likely token is taken; above 0 tokens are drawn, by `seed`. Of a long prompt the model reads
        the last `model.max_length` tokens, or fewer if prompt and answer would need more positions than the model has.
        """
        name = self.config.data.task
        _require_texts("prompts", prompts, words=name == "chat")
        if name not in WRITE:
            message = f"this run's data.task is {name!r}, whose models write no texts"
            raise ConfigError(message).about("data.task", name, f"one of {', '.join(WRITE)}")
        if max_new_tokens < 0:
            message = f"max_new_tokens is {max_new_tokens}, but it must be at least 0"
            raise ConfigError(message).about("max_new_tokens", max_new_tokens, "at least 0")
        task, model = tasks.build(self.config.data), self.model
        rows = Rows(tuple(map(task.line, prompts)), (None,) * len(prompts), ())
        room = prompt_room(model, self.config.model.max_length, max_new_tokens, "--max-new-tokens")
        return answers(
            cast(CausalLM, task),
            model,
            self.tokenizer,
            rows,
            room,
            max_new_tokens,
            temperature=temperature,
            seed=seed,
            batch_size=self.config.evaluation.batch_size,
        )

    def export(self, out_dir: str | Path, *, merged: bool = False) -> Path:
        """Write the adapter, or with `merged` the whole model; refuses a folder that is not empty."""
        out_dir = Path(out_dir)
        if merged:
            write_merged(out_dir, self, self._undivided_base())
        else:
            write_adapter(out_dir, self)
        return out_dir

    def merged(self) -> nn.Module:
        """The model that `export` writes with `merged`, in memory."""
        whole = self._undivided_base()
        merge(self, whole)
        return whole.eval()

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens that end an answer of a language model by its chat template, if it has one."""
        return tuple(ChatTemplate.of(self.tokenizer).ends) if self.tokenizer.chat_template else ()

    def _undivided_base(self) -> nn.Module:
        """The base model on one device, since its weights change."""
        whole = replace(self.config.model, device_map="", max_memory=())
        return base_model(whole, self.config.data, self.label_names, self.config.federation.seed)


def _require_texts(name: str, texts: Sequence[Any], *, words: bool = False) -> None:
    """Refuse a single text, which would be read character by character, and what is no text. words: lists of words are some."""
    if isinstance(texts, str | bytes):
        raise ConfigError(f"{name} is a single {type(texts).__name__}; give a list of texts").about(
            name, texts, "a list"
        )
    for index, text in enumerate(texts):
        if not isinstance(text, str | list | tuple if words else str):
            raise ConfigError(
                f"{name}[{index}] is a {type(text).__name__}; give texts (and the second texts of pairs as pairs)"
            ).about(f"{name}[{index}]", text, "a text")


def load_run(run_dir: str | Path, client: str | None = None, *, best: bool = False) -> Trained:
    """The run in this directory after its last finished round, or with `best` after the round of its best evaluation.

    All of it is read from the public part of the directory, except for personal tensors.

    client: the client whose model is loaded; only for a run with personal tensors, whose model was not measured on the test
    set.
    """
    run_dir = Path(run_dir)
    published = Published(run_dir)
    facts, config = published.facts, published.config
    checkpoint = _best(run_dir) if best else _last(published)
    personal, seed = config.method.personal, config.federation.seed
    if personal and is_deployed(facts):
        client = client or facts.get("member")
        if client != facts.get("member") or client is None:
            raise RunDirectoryError(
                f"{run_dir} lacks the tensors that method.personal keeps at each node: take the folder that `secure-fed node "
                "status` prints at the node"
            )
    kept = read_personal(run_dir, checkpoint.state.round) if personal and client is not None else {}
    tensors = completed(checkpoint.state.tensors, personal, client, facts["clients"], kept)
    labels = tuple(facts["label_names"])
    loaded = loading.load(config.model, tasks.build(config.data), labels, seed)
    head = head_of(loaded.model, loaded.head, config.method.modules_to_save)
    base, method = digest_of(loaded.model, (*head, *loaded.fixed)), build(config)
    initial = method.prepare(loaded.model, head, seed)
    state = replace(checkpoint.state, tensors=tensors)
    if not fits(method, initial, state) or base != facts["model_digest"]:
        raise RunDirectoryError(
            f"{run_dir} holds the state of another model than {config.model.name!r} is now; restore the model it was trained on"
        )
    Objective(loaded.model, classification.loss, device_of(loaded.model)).load(tensors)
    measured = {} if personal else _measured(published, checkpoint.state.round)
    run = run_facts(
        config,
        method.card,
        state.round,
        None if withholds_test(config, facts) else measured,
        client,
        stated(published),
        facts.get("noise_alone"),
        None if best else (published.result or {}).get("membership"),
    )
    card = ModelCard.of(config, loaded.model, loaded.tokenizer, labels, run, deployed=is_deployed(facts))
    whole_head = (*head, *loaded.fixed)
    return Trained(config, method, loaded.model, whole_head, initial, state, card, loaded.tokenizer, labels)


def require_trained(run_dir: str | Path, *, best: bool = False) -> None:
    """Refuse a run without a state that `load_run` could read, before a model is loaded."""
    _last(Published(Path(run_dir)))
    if best:
        _best(Path(run_dir))


def stated(published: Published) -> str:
    """The privacy statement of a run: from its result or, before there is a result, from its plan."""
    if (result := published.result) is not None:
        return str(result.get("privacy_statement", ""))
    facts = published.facts
    planned = str(facts.get("privacy", {}).get("text", ""))
    at_node = "member" in facts  # which keeps a final model alone
    return planned if at_node or not planned else f"{_UNFINISHED}: {planned}"


def _best(run_dir: Path) -> Checkpoint:
    """The state of the best evaluation, if the run kept it."""
    if (found := read_best(run_dir)) is None:
        raise RunDirectoryError(
            f"{run_dir} did not keep the model of its best evaluation: run with evaluation.keep_best = true"
        )
    return found


def _last(published: Published) -> Checkpoint:
    """The last checkpoint; refuses a run whose model was passed in Python."""
    run_dir = published.run_dir
    if published.facts.get("task") == GIVEN:
        raise RunDirectoryError(
            f"{run_dir} was trained on a model given in Python, which only that program can make: "
            "there, write it with Federation.export"
        )
    checkpoint = read_checkpoint(run_dir)
    if checkpoint is None:
        raise RunDirectoryError(
            f"{run_dir} has no finished round yet; go on with `secure-fed train --resume --out {shlex.quote(str(run_dir))}`"
        )
    return checkpoint


def _measured(published: Published, rounds: int) -> dict[str, float]:
    """The last evaluation's record, or nothing."""
    records = read_lines(published.path(METRICS), rounds)
    evaluated = [record for record in records if "loss" in record or "accuracy" in record]
    return evaluated[-1] if evaluated else {}


_UNFINISHED = "Of a run that has not ended, as planned (what an interrupted round made again comes on top)"
