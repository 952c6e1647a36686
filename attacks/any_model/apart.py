"""Checks that an audit compares different things: references and the model, and members and others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from secure_fed.errors import ModelError, UsageError
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.data.texts import normal
from secure_fed.learning.models.locate import locate


def require_different(model: str, references: Sequence[str]) -> None:
    """Refuse a model as its own reference, and a repeated reference: the spread over references would be meaningless."""
    seen = {_place(model, "--model"): "is the --model itself"}
    for name in references:
        place = _place(name, "--reference")
        if (why := seen.get(place)) is not None:
            raise UsageError(
                f"--reference {name} {why}: leave it out, or name another model that never saw the members"
            )
        seen[place] = "is given twice"


def require_apart(members: Rows, others: Rows) -> None:
    """Refuse a text that is on both sides, under any label: it was in the training, so listing it among the others would hide a
    leak, and with another label it would pose as one.
    """
    first, both = _plain(members), set(_plain(members)) & set(_plain(others))
    if both:
        raise UsageError(
            f"{len(both)} texts are both in --members and in --non-members, such as row "
            f"{min(map(first.index, both)) + 1} of --members (labels, white space and capitals do not count): what was in the "
            "training is a member, so take them out of --non-members"
        )


def _place(name: str, option: str) -> str:
    """The whole path of a folder, or a Hub id unchanged. ModelError, naming the option, for anything else."""
    try:
        found = locate(name)
    except ModelError as error:
        raise ModelError(str(error).replace("model.name", option, 1)) from error
    return str(Path(found).resolve()) if Path(found).exists() else found


def _plain(rows: Rows) -> list[tuple[str, str]]:
    """Each row's texts, as `normal` writes them."""
    seconds = rows.text_b or ("",) * len(rows)
    return [(normal(one), normal(two)) for one, two in zip(rows.text, seconds, strict=True)]
