"""Shadow models of an audit: trained by a configuration, on random halves of members and others together.

Each shadow is trained by the project's own engine, as many at once as memory holds (`adversary.shadows`). Each text is in the
training of half of the shadows, drawn for each text independently (Carlini et al. 2022, section IV-C). The coins do not depend
on membership. So under a model that never saw the members, scores of members and of others have the same law, however different
the shadows are: an unsuitable configuration weakens the attacks and never produces a false leak. `require_fits` refuses one
that trains another kind of model: other starting weights, another architecture, or another kind of adapter.

Two limits: a shadow lacks the audited model's other training texts beside the members, and all shadows start from the same head
instead of a random start each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from attacks import lira, rmia
from attacks.adversary.null import Bools, Floats
from attacks.adversary.shadows import coins, lots, trained
from attacks.any_model.outputs import config_of, in_options
from attacks.any_model.subject import Subject
from attacks.options import Asked
from secure_fed.config import DataConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.export.peft_folder import on_mean_pooled
from secure_fed.federation import Federation
from secure_fed.learning import tasks
from secure_fed.learning.audit_pool.pool import everything
from secure_fed.learning.data import sources
from secure_fed.learning.data.chats import as_messages
from secure_fed.learning.data.encode import without_aside
from secure_fed.learning.data.fingerprint import content
from secure_fed.learning.evaluation import confidence
from secure_fed.learning.models.architecture import is_pooled, of_text
from secure_fed.learning.models.locate import locate
from secure_fed.learning.problem import tokenised
from secure_fed.learning.tasks.chat import Chats
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.membership import confidences

Progress = Callable[[int, int], None]
Kept = Sequence[Sequence[int]]
FEWEST = 4
_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
_OF_FACTORS = ("fedlora", "ffa_lora", "fra_lora", "rolora")
_BATCH = 16
_TURNS = "turns"
_COINS = 2


@dataclass(frozen=True)
class Shadows:
    """inside: (shadows, texts) whether a shadow trained on a text. phi: (shadows, texts) the shadow's confidence in it."""

    inside: Bools
    phi: Floats


def scored(phi: Floats, made: Shadows) -> dict[str, Floats]:
    """(texts,) scores of LiRA (Carlini et al. 2022, section IV-C) and of RMIA (Zarifzadeh et al. 2024, section 3).

    phi: (texts,) the audited model's confidence in each.
    RMIA's population is all texts of the audit. Each of them is in the training of half of the shadows, so P(z) is the online
    one.
    """
    return {
        "LiRA": lira.online(phi, made.phi, made.inside),
        "RMIA": rmia.scores(phi, made.phi, made.inside, phi, made.phi, a=rmia.UNTUNED_A, population_inside=made.inside),
    }


def target(subject: Subject) -> Floats:
    """(texts,) the audited model's confidence in each."""
    texts, task, device = subject.texts, subject.task, next(subject.model.parameters()).device
    phi = confidence(subject.asked.data.task, task.loss(texts.rows.label_names))
    return confidences(subject.model, texts.examples, task.collate(subject.tokenizer), phi, _BATCH, device)


def made(
    asked: Asked, config: RunConfig, count: int, progress: Progress | None = None, kept: Kept | None = None
) -> Shadows:
    """`count` shadows of the texts of an audit. ConfigError if the configuration is for another model.

    kept: the rows of each file that are audited; None for all.
    """
    require_fits(config, asked, count)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "texts.jsonl"
        file.write_text(
            "".join(json.dumps(row, default=str) + "\n" for row in _rows(asked, config, kept)), encoding="utf-8"
        )
        config = _of_texts(config, file)
        assembly = Federation(config).assembly
        task = tasks.build(config.data)
        rows = sources.load(config.data, task, seed=config.federation.seed).train
        examples = tokenised(config, task, assembly.problem.tokenizer, rows)  # in the order of the file
        return _trained(assembly, examples, count, progress)


def _rows(asked: Asked, config: RunConfig, kept: Kept | None) -> list[dict[str, Any]]:
    """The kept texts with the columns that the configuration reads, members first; all conversations in one form."""
    task, others = tasks.build(config.data), (config.data.client, config.data.language, config.privacy.person_column)
    rows = []
    for number, (path, option) in enumerate(((asked.members, "--members"), (asked.others, "--non-members"))):
        tables = sources.of_one_party(task, [path] if path else [], option, *others)
        whole = [
            {name: column[row] for name, column in one.columns.items()} for one in tables for row in range(len(one))
        ]
        if isinstance(task, Chats):
            chats, _ = task.texts(tables)
            whole = [
                {name: row[name] for name in others if name} | {_TURNS: as_messages(chat)}
                for row, chat in zip(whole, chats, strict=True)
            ]
        rows += whole if kept is None else [whole[row] for row in kept[number]]
    return rows


def _of_texts(config: RunConfig, file: Path) -> RunConfig:
    """The configuration with these texts as its data, none held out, without audits of its own, and charging nothing."""
    usual, replaced = DataConfig(), ("name", "examples", "test_examples", "test_fraction")
    changed = {name: getattr(usual, name) for name in replaced} | {"train": str(file), "test": str(file)}
    if config.data.task == "chat":
        changed["text"] = _TURNS
    dummies = None if config.privacy.unit == "none" else 0
    silent = {"audit_fraction": 0.0, "audit_unit": "auto", "dummies": dummies, "canaries": "none"}
    return config.replace(
        {
            **{("data", name): value for name, value in changed.items()},
            **{("evaluation", name): value for name, value in silent.items()},
            ("privacy", "ledger"): "",
        }
    )


def _trained(assembly: Assembly, examples: Sequence[Any], count: int, progress: Progress | None) -> Shadows:
    if assembly.server.personal:
        raise ConfigError(
            f"--config keeps {assembly.server.personal[0]!r} on its clients, so a shadow is no complete model: leave out "
            "method.personal"
        )
    problem, seed = assembly.problem, assembly.config.federation.seed
    pool = everything(problem)
    inside = coins(count, lots(pool), np.random.default_rng([seed, _COINS]))
    # equal texts share their coins
    unit_of = {content(without_aside(unit.examples[0])): number for number, unit in enumerate(pool.units)}
    units = [unit_of[content(without_aside(examples[row]))] for row in range(len(examples))]
    assembly = replace(assembly, pools={**assembly.pools, "data": pool})
    device, batch = assembly.objective.device, assembly.config.evaluation.batch_size
    phi = [
        confidences(assembly.objective.load(state), examples, problem.collate, problem.confidence, batch, device)
        for state in trained(assembly, inside, seed, progress).states
    ]
    return Shadows(inside[:, units], np.stack(phi))


def require_fits(config: RunConfig, asked: Asked, count: int) -> None:
    """ConfigError if the configuration's shadows would be models of another kind, or if `count` is too small."""
    if count < FEWEST:
        raise ConfigError(f"--shadows is {count}: at least {FEWEST}, and 16 to see a small leak")
    begun, audited = config.model.name, asked.model
    with in_options(texts=False):
        config_of(audited)  # errors below are about the configuration's model
    same = str(locate(begun)) == str(locate(audited))
    if asked.adapter is not None and not same:
        raise _refused(begun, f"and the audited adapter is on {audited}: set model.name to that")
    if asked.adapter is None and same:
        raise _refused(
            begun,
            "which is the audited model itself, and has seen the members: set model.name to the base model of its training",
        )
    for name in _SIZES:
        ours, theirs = (getattr(of_text(config_of(one)), name, None) for one in (begun, audited))
        if ours != theirs:
            raise _refused(
                begun, f"with {name} = {ours}, and {audited} has {theirs}: name the base model of its training"
            )
    _require_head(config, asked)
    if asked.adapter is not None:
        _require_rank(config, asked)


def _require_head(config: RunConfig, asked: Asked) -> None:
    """Require that the shadows' head reads the same input as the audited model's head."""
    ours = config.model.pooling == "mean" or is_pooled(config_of(config.model.name))
    theirs = on_mean_pooled(asked.adapter) if asked.adapter is not None else is_pooled(config_of(asked.model))
    if ours != theirs:
        wanted = "mean" if theirs else "model"
        raise ConfigError(
            f"--config has model.pooling = {config.model.pooling!r}, and the audited model's head reads another pooling: "
            f"set model.pooling = {wanted!r}"
        ).about("model.pooling", config.model.pooling, f"{wanted!r}, as in the audited model")


def _require_rank(config: RunConfig, asked: Asked) -> None:
    """Require the audited adapter's rank. Only PEFT's adapters state one."""
    try:
        noted = json.loads((asked.adapter / "adapter_config.json").read_text(encoding="utf-8")) if asked.adapter else {}
    except (OSError, ValueError):
        return
    rank = noted.get("r")
    if noted.get("peft_type") == "LORA" and config.method.name in _OF_FACTORS and rank != config.method.rank:
        raise ConfigError(
            f"--config trains adapters of rank {config.method.rank}, and {asked.adapter} has rank {rank}: set "
            f"method.rank = {rank}"
        ).about("method.rank", config.method.rank, f"the rank of the adapter, {rank}")


def _refused(begun: str, why: str) -> ConfigError:
    return ConfigError(f"--config trains {begun}, {why}").about("model.name", begun, "the base model of that training")
