"""Error messages of an audit of a model: they name options of the command instead of settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from secure_fed.errors import ConfigError, DataError, ModelError

_OF_MODEL = r"model\.(?:name|device)"
_OF_TEXTS = r"data\.(?:chat_template|text_b|text|label_centre|label_scale|label|stride|unanswerable)|model\.max_length"
_VALUE = r"( = (?:true\b)?)?"


@contextmanager
def in_options(model: str = "--model", *, texts: bool = True) -> Iterator[None]:
    """Errors of the block, with options in the place of settings.

    model: the option that names the model of this block. texts: whether options define how texts are read; otherwise it is a
    configuration, and its settings keep their names.
    """
    try:
        yield
    except (ConfigError, DataError, ModelError) as error:
        names = f"{_OF_MODEL}|{_OF_TEXTS}" if texts else _OF_MODEL
        said = re.sub(rf"\b({names})\b{_VALUE}", lambda found: _option(found, model), str(error))
        raise type(error)(said) from error


def _option(found: re.Match[str], model: str) -> str:
    """The option of a setting. A value behind it stays, except for `true`: such options take no value."""
    setting, value = found[1], found[2]
    option = model if setting == "model.name" else f"--{setting.partition('.')[2].replace('_', '-')}"
    return f"{option} " if value == " = " else option
