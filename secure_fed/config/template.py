"""A configuration to start from: every key at its default, each under its explanation."""

from __future__ import annotations

import dataclasses
import json

from secure_fed.config.sections import sections
from secure_fed.config.setting import Setting, limits_in_words


def commented_toml() -> str:
    """A TOML file of every key. Read back, it is the default configuration; keys without a default are commented out."""
    lines = ["# A secure-fed run. Every key stands at its default; `secure-fed train THIS_FILE` runs it."]
    for name, section in sections().items():
        lines += ["", f"[{name}]"]
        for setting in dataclasses.fields(section):
            lines += [f"# {setting.metadata['doc']}{limits_in_words(setting)}", _line(setting)]
    return "\n".join(lines) + "\n"


def _line(setting: Setting) -> str:
    if setting.default is None:
        return f"# {setting.name} = {json.dumps(setting.metadata['optional'])}"
    return f"{setting.name} = {json.dumps(setting.default)}"
