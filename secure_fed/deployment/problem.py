"""The learning problem of a federation on many machines, from one party's side: the model, and only its own examples.

A node has its member's training examples, the coordinator a test set. Everything else follows from the charter and is the same
for all parties: the names of the members, each one's declared number of units, the classes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.deployment.charter import Charter
from secure_fed.errors import DataError
from secure_fed.learning import tasks
from secure_fed.learning.data import fingerprint, sources
from secure_fed.learning.data.rows import Rows, Vocabulary, places_of
from secure_fed.learning.evaluation import asked, confidence
from secure_fed.learning.models.loading import head_of, last_layer, load
from secure_fed.learning.problem import Problem, encoded, warnings, with_room
from secure_fed.learning.tasks.headline import Commonest

_log = logging.getLogger(__name__)
_UNKNOWN = 1  # units of a member that declares none; not counted where units are clients


def of_node(
    charter: Charter, config: RunConfig, number: int, train: Sequence[Path], non_members: Sequence[Path] = ()
) -> Problem:
    """The problem with the examples of one member. config: the charter's, with this machine's model folder and device.

    non_members: files of rows that this member does not train on, for its own membership figure.
    """
    person = config.privacy.person_column
    task = tasks.build(config.data)
    rows = sources.of_known_classes(task, train, _classes(charter), "data.train", person)
    problem = _without_examples(charter, config)
    whole = encoded(task, problem.tokenizer, rows, config.model.max_length)
    for warning in warnings(config, {"training": whole}, problem.tokenizer, problem.model):
        _log.warning("%s", warning)  # for the owner of the rows
    room = with_room(whole)
    rows, own = rows.take(room), whole.take(room)
    _require_declared(charter, config, number, rows)
    _require_weight(charter, config, number, rows)
    others: Sequence[Any] = ()
    if non_members:
        apart = sources.of_known_classes(task, non_members, _classes(charter), "non_members")
        sources.require_apart(apart, rows, "non_members")
        named = encoded(task, problem.tokenizer, apart, config.model.max_length)
        others = named.take(with_room(named))
    everybody: list[Sequence[Any]] = [() for _ in charter.members]
    everybody[number] = own
    persons = None
    if rows.person is not None:
        persons = [list[str]() for _ in charter.members]
        persons[number] = list(rows.person)
    return replace(
        problem,
        train=everybody,
        persons=persons,
        non_members=others,
        facts={**problem.facts, "member": charter.members[number].name},
        data_digest=fingerprint.of_rows(rows),
        unit_digest=fingerprint.of_units(rows, _units(config.privacy.unit, rows)),
    )


def of_coordinator(charter: Charter, config: RunConfig, test: Sequence[Path]) -> Problem:
    """The problem with the coordinator's test set, and nobody's training examples."""
    task = tasks.build(config.data)
    rows = sources.of_known_classes(task, test, _classes(charter), "data.test")
    asked(config, task, rows)  # refused before a model is loaded
    problem = _without_examples(charter, config)
    whole = encoded(task, problem.tokenizer, rows, config.model.max_length)
    room = with_room(whole)
    examples = whole.take(room)
    tested = {"from": sources.FILES, "rows": len(examples)}
    common = Commonest.among(task.counted(rows))
    facts = {**problem.facts, "test": tested}
    questions = asked(config, task, rows.take(map(int, room)))
    warning = "; and ".join(warnings(config, {"test": whole}, problem.tokenizer, problem.model))
    return replace(problem, test=examples, facts=facts, commonest=common, asked=questions, warning=warning)


def _without_examples(charter: Charter, config: RunConfig) -> Problem:
    task, labels = tasks.build(config.data), charter.label_names
    loaded = load(config.model, task, labels, config.federation.seed)
    loss = task.loss(labels)
    whose: dict[str, Any] = {"kind": "natural", "jensen_shannon": None, "sizes": []}
    members = hashlib.sha256(charter.digest).hexdigest()
    return Problem(
        model=loaded.model,
        head=head_of(loaded.model, loaded.head, config.method.modules_to_save),
        fixed=loaded.fixed,
        last=last_layer(loaded.model),
        train=[() for _ in charter.members],
        names=[member.name for member in charter.members],
        test=[],
        collate=task.collate(loaded.tokenizer),
        loss=loss,
        metrics=task.metrics(labels),
        confidence=confidence(config.data.task, loss),
        tokenizer=loaded.tokenizer,
        facts={
            "task": task.title,
            "label_names": list(labels),
            "clients": [member.name for member in charter.members],
            "partition": whose,
            "test": {"from": sources.FILES, "rows": None},
            "charter": charter.digest.hex(),
        },
        data_digest=members,
        unit_digest=members,
        sizes=[member.examples or _UNKNOWN for member in charter.members],
    )


def _classes(charter: Charter) -> Vocabulary:
    return Vocabulary(charter.labels, charter.label_names)


def _units(unit: str, rows: Rows) -> list[list[int]]:
    """The rows of each protected unit of one member, as a simulation divides them (`division.units`)."""
    if unit == "example":
        return [[index] for index in range(len(rows))]
    persons = rows.person if unit == "person" else None
    return list(places_of(persons or ("",) * len(rows)).values())


def _require_declared(charter: Charter, config: RunConfig, number: int, rows: Rows) -> None:
    """Refuse a number of units that differs from the declared one, where the guarantee counts units."""
    unit, declared = config.privacy.unit, charter.members[number].examples
    if unit not in ("example", "person"):
        return
    found = len(rows) if unit == "example" else len(set(rows.person or ()))
    if found != declared:
        raise DataError(
            f"this node's card declares {declared} units ({unit}s) and its data has {found} with room: the guarantee is "
            "computed for the declared number, so write a new card with the right one, or correct data.train"
        )


def _require_weight(charter: Charter, config: RunConfig, number: int, rows: Rows) -> None:
    """Refuse more examples than are declared, where the coordinator leaves out a member that counts as more."""
    declared = charter.members[number].examples
    open_ = config.federation.weighting == "examples" and not config.secure_aggregation.enabled
    if open_ and declared is not None and len(rows) > declared:
        raise DataError(
            f"this node's card declares {declared} units and its data has {len(rows)} examples: federation.weighting = "
            "'examples' lets it count as no more than it declares, so write a new card with that number, or correct data.train"
        )
