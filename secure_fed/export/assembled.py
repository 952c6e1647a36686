"""The export of a federation that is still in memory, with a model that may be the user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from secure_fed.export.export import Adapted, write_adapter
from secure_fed.export.model_card import ModelCard, run_facts
from secure_fed.export.peft_folder import is_pooled
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import pad_id
from secure_fed.methods.method import State
from secure_fed.rounds.personal import completed
from secure_fed.rounds.registered import existing
from secure_fed.runs.assembly import Assembly


def write(assembly: Assembly, state: State, out: Path, *, base_model: str, client: str | None, statement: str) -> None:
    """Write the adapter and the head of this state; refuses a folder that is not empty.

    base_model: as others load a model of the user's own, if they can. client: whose, where tensors are personal.
    statement: the guarantee of this state in words, empty if there is none.
    """
    config, problem = assembly.config, assembly.problem
    kept = {one.index: one.kept for one in existing(assembly.clients) if one.kept is not None}
    tensors = completed(state.tensors, config.method.personal, client, problem.names, kept)
    assembly.objective.load(tensors)
    task, configured = tasks.build(config.data), problem.tokenizer is not None
    labels = tuple(problem.facts["label_names"]) or _named(problem.model)
    card = ModelCard(
        config.method.name,
        base_model or (config.model.name if configured else ""),
        labels,
        run_facts(config, assembly.method.card, state.round, {}, client, statement),
        pad_token_id=pad_id(problem.tokenizer) if configured else None,
        auto=task.auto,
        settings=task.model_settings(labels) if configured else None,
        conversion=task.conversion,
        pooled=is_pooled(problem.model),
    )
    adapted = Adapted(
        config=config,
        method=assembly.method,
        model=problem.model,
        head=problem.head,
        initial=assembly.initial.tensors,
        state=replace(state, tensors=tensors),
        card=card,
        tokenizer=problem.tokenizer,
    )
    write_adapter(out, adapted)


def _named(model: nn.Module) -> tuple[str, ...]:
    """The names of classes in a classifier of transformers that the user made; none in another module."""
    names: dict[int, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return tuple(str(names[index]) for index in sorted(names)) if classifies else ()
