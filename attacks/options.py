"""The options that each kind of `secure-fed audit` reads. An option without effect is an error and is never ignored."""

from __future__ import annotations

import argparse

from secure_fed.errors import UsageError

_MODEL = "model adapter device"
_TEXTS = "members non_members task text text_b label labels max_length"
_OF_TASKS = "stride unanswerable label_centre label_scale chat_template"
_PREPARED = f"{_MODEL} prepared max_length fail_above"
READ = {
    "--lying": "lying trials attack fail_above",
    "--attribute": f"attribute {_MODEL} {_TEXTS} fail_above",
    "--share": "share fail_above",
    "--extract": f"extract {_MODEL} reference task text text_b prefix suffix answers max_length chat_template show_texts "
    "fail_above",
    "--exposure": f"exposure {_PREPARED} secrets_tried chat_template",
    "--prepared": f"{_PREPARED} {_OF_TASKS} reference labels delta",
    "a plain --model": f"{_MODEL} {_TEXTS} {_OF_TASKS} reference shadows config recall neighbours neighbour_model date "
    "scores out show_texts attack fail_above",
    "RUN_DIR": "attack beside show_texts references",
}
# --exposure reads --max-length because a model with fewer positions than the default cannot be loaded without it.
_EVERYWHERE = ("run_dir", "json")


def kind(chosen: argparse.Namespace) -> str:
    """The requested kind of audit: the first of `READ` whose own option is given."""
    own = ("lying", "attribute", "share", "extract", "exposure", "prepared", "model")
    return next(
        (kind for kind, name in zip(READ, own, strict=False) if getattr(chosen, name) not in (None, False)), "RUN_DIR"
    )


def require_read(chosen: argparse.Namespace, usual: argparse.Namespace) -> None:
    """UsageError for an option that this kind of audit does not read. usual: the default options."""
    asked = kind(chosen)
    for name, value in vars(chosen).items():
        readers = [kind for kind, names in READ.items() if name in names.split()]
        if not readers or name in _EVERYWHERE or asked in readers or value == getattr(usual, name, value):
            continue
        raise UsageError(
            f"--{name.replace('_', '-')} goes with {' or '.join(readers)}, and not with {asked}: leave it out"
        )
