"""The export of a federation that is still in memory, with a model that may be the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from secure_fed.export.export import Adapted, write_adapter
from secure_fed.export.model_card import ModelCard, run_facts
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import pad_id
from secure_fed.learning.models.architecture import class_names, is_pooled
from secure_fed.methods.method import State
from secure_fed.rounds.personal import completed
from secure_fed.rounds.registered import existing
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership import reported


def write_federation(
    assembly: Assembly,
    state: State,
    out: Path,
    *,
    base_model: str,
    client: str | None,
    statement: str,
    noise_alone: Mapping[str, Any] | None,
) -> None:
    """Write the adapter and the head of this state; refuses a folder that is not empty.

    base_model: the name from which others load a user's own base model, if they can. client: the client whose personal tensors
    are written, if there are any. statement: the guarantee of this state in words, empty if there is none. noise_alone: the
    figures of the run's probe, if it made one.
    """
    config, problem = assembly.config, assembly.problem
    kept = {one.index: one.kept for one in existing(assembly.clients) if one.kept is not None}
    tensors = completed(state.tensors, config.method.personal, client, problem.names, kept)
    assembly.objective.load(tensors)
    task, configured = tasks.build(config.data), problem.tokenizer is not None
    classifies = type(problem.model).__name__.endswith("ForSequenceClassification")
    labels = tuple(problem.facts["label_names"]) or (class_names(problem.model) if classifies else ())
    card = ModelCard(
        config.method.name,
        base_model or (config.model.name if configured else ""),
        labels,
        run_facts(
            config, assembly.method.card, state.round, {}, client, statement, noise_alone, _membership(assembly, state)
        ),
        pad_token_id=pad_id(problem.tokenizer) if configured else None,
        auto=task.auto,
        settings=task.model_settings(labels) if configured else None,
        conversion=task.conversion,
        pooled=is_pooled(getattr(problem.model, "config", None)),
        revision=config.model.revision,
    )
    adapted = Adapted(
        config=config,
        method=assembly.method,
        model=problem.model,
        head=(*problem.head, *problem.fixed),
        initial=assembly.initial.tensors,
        state=replace(state, tensors=tensors),
        card=card,
        tokenizer=problem.tokenizer,
    )
    write_adapter(out, adapted)


def _membership(assembly: Assembly, state: State) -> dict[str, Any] | None:
    """A private run's figure, which is a function of releases; others measure it on their data when they end."""
    return None if assembly.protection.plan is None else reported.public_figure(assembly, state)
