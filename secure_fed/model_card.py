"""The README of an exported folder: front matter that model hubs read, the facts of the run, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelCard:
    """What the README says.

    base_model: where the base model loads from, a Hub id or a folder; PEFT's configuration repeats it.
    facts: rows of a table, in order: method, rounds, accuracy, what is and is not protected, ...
    pad_token_id: given where the base model has none of its own and needs one (decoders).
    """

    title: str
    base_model: str
    label_names: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    pad_token_id: int | None = None

    def text(self, *, merged: bool) -> str:
        """Markdown that ends with a newline."""
        held = "The adapter is merged into the base model." if merged else "The base model is not in this folder."
        lines = [
            *self._front_matter(merged),
            f"# {self.title}",
            "",
            f"Fine-tuned by secure-fed in a federation whose clients kept their data to themselves. {held}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in self._rows().items()),
            "",
            "## Use",
            "",
            "```python",
            *(_USE_MERGED if merged else self._use_adapter()),
            "```",
        ]
        return "\n".join(lines) + "\n"

    def _front_matter(self, merged: bool) -> list[str]:
        task = ["pipeline_tag: text-classification"] if self.label_names else []
        library, tags = ("transformers", _TAGS) if merged else ("peft", (*_TAGS, "lora"))
        return [
            "---",
            f"base_model: {_quoted(self.base_model)}",
            f"library_name: {library}",
            *task,
            "tags:",
            *(f"- {tag}" for tag in tags),
            "---",
            "",
        ]

    def _rows(self) -> dict[str, str]:
        labels = {"labels": ", ".join(self.label_names)} if self.label_names else {}
        return {"base model": self.base_model, **self.facts, **labels}

    def _use_adapter(self) -> list[str]:
        settings = [f"id2label={dict(enumerate(self.label_names))!r}"] if self.label_names else []
        settings += [f"pad_token_id={self.pad_token_id}"] if self.pad_token_id is not None else []
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForSequenceClassification",
            "",
            "base = AutoModelForSequenceClassification.from_pretrained(",
            f"    {', '.join([repr(self.base_model), *settings])}",
            ")",
            'model = PeftModel.from_pretrained(base, "path/to/this/folder").eval()',
        ]


_TAGS = ("federated-learning", "secure-fed")
_USE_MERGED = (
    "from transformers import AutoModelForSequenceClassification",
    "",
    'model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder").eval()',
)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _quoted(text: str) -> str:
    """A YAML string: single quotes keep Windows paths and colons as they are."""
    return "'" + text.replace("'", "''") + "'"
