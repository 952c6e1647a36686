"""Canaries for language models: a sentence with a random secret (Carlini et al. 2019, The Secret Sharer, section 4).

A template is a text with the placeholder `{secret}`, and optionally `{name}`, so that no two canaries are equal texts. A secret
consists of decimal digits, all values equally likely. For chats a canary is a question and its answer: a line each of the
template, or the text before the secret and the text from it on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privacy.entropy import Stream
from secure_fed.errors import ConfigError

USUAL = "The access code of {name} is {secret}."
USUAL_CHAT = "What is the access code of {name}?\nThe access code of {name} is {secret}."
DIGITS = 6
_SECRET, _NAME = "{secret}", "{name}"
_LETTERS, _LENGTH = "abcdefghijklmnopqrstuvwxyz", 6
_MOST_DIGITS = 15  # of a secret: a float64 counts these exactly


@dataclass(frozen=True)
class Planted:
    """One canary: its name, which appears in the auditor's candidates, and its secret."""

    name: str
    secret: str


@dataclass(frozen=True)
class Template:
    """The sentence, and the number of digits of its secret."""

    text: str = USUAL
    digits: int = DIGITS

    def __post_init__(self) -> None:
        lines = self.text.splitlines()
        if self.text.count(_SECRET) != 1 or any(line.count(_NAME) > 1 for line in lines):
            raise ConfigError(
                f"the template is {self.text!r:.80}: it needs {{secret}} once, and {{name}} at most once in a line"
            )
        if not 1 <= self.digits <= _MOST_DIGITS:
            raise ConfigError(f"--digits is {self.digits}: a secret has from 1 to {_MOST_DIGITS} digits")

    @property
    def named(self) -> bool:
        return _NAME in self.text

    @property
    def space(self) -> int:
        """The number of secrets."""
        return int(10**self.digits)

    def split(self, one: Planted, secret: int | None = None) -> tuple[str, str]:
        """The text before the secret, and the text from the secret on. secret: replaces the canary's own."""
        own = one.secret if secret is None else f"{secret:0{self.digits}d}"
        before, _, after = self.text.partition(_SECRET)
        return before.replace(_NAME, one.name), own + after.replace(_NAME, one.name)

    def pair(self, one: Planted, secret: int | None = None) -> tuple[str, str]:
        """The same as a prompt and its target, which a training joins by a space."""
        before, after = self.split(one, secret)
        return before.rstrip(), after

    def turns(self, one: Planted, secret: int | None = None) -> tuple[str, str]:
        """The same as a question and its answer: the first line, and the rest; of a single line, prompt and target."""
        question, _, answer = self.written(one, secret).partition("\n")
        return (question, answer) if answer else self.pair(one, secret)

    def written(self, one: Planted, secret: int | None = None) -> str:
        return "".join(self.split(one, secret))

    def drawn(self, count: int, stream: Stream) -> list[Planted]:
        """`count` different canaries. ConfigError if the template allows fewer."""
        if not self.named and count > self.space // 10:
            raise ConfigError(
                f"{count} canaries need a template with {{name}}, or more --digits than {self.digits}: without a name only a "
                "tenth of the secrets is planted"
            )
        found: dict[str, Planted] = {}
        while len(found) < count:
            name = "".join(_LETTERS[index] for index in uniform(stream, len(_LETTERS), _LENGTH))
            secret = int(uniform(stream, self.space, 1)[0])
            one = Planted(name if self.named else "", f"{secret:0{self.digits}d}")
            found.setdefault(one.name or one.secret, one)
        return list(found.values())


def uniform(stream: Stream, values: int, count: int) -> list[int]:
    """(count,) independent integers, uniform over 0 .. values - 1: words in the last, incomplete range are drawn again."""
    whole = 2**64 // values * values
    found: list[int] = []
    while len(found) < count:
        found += [int(word) % values for word in stream.words(count - len(found)) if int(word) < whole]
    return found


def order(stream: Stream, count: int) -> list[int]:
    """A random order of 0 .. count - 1, all orders equally likely except for ties of 64-bit numbers."""
    return [int(index) for index in np.argsort(stream.words(count), kind="stable")]
