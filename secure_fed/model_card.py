"""The README of an exported folder: front matter that model hubs read, the facts of the run, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_fed.config import RunConfig
from secure_fed.methods.method import Card
from secure_fed.outcome import unprotected


@dataclass(frozen=True)
class ModelCard:
    """What the README says.

    base_model: the base model as `model.name` calls it, or empty for a module that only a program has.
    facts: rows of a table, in order; `run_facts` makes them. What it says of privacy becomes a section of its own.
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
            f"Fine-tuned by secure-fed in a simulated federation: one process held every client's data. {held}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in self._rows().items()),
            "",
            *self._privacy(),
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
        base = [f"base_model: {_quoted(self.base_model)}"] if self.base_model else []
        return [
            "---",
            *base,
            f"library_name: {library}",
            *task,
            "tags:",
            *(f"- {tag}" for tag in tags),
            "---",
            "",
        ]

    def _rows(self) -> dict[str, str]:
        labels = {"labels": ", ".join(self.label_names)} if self.label_names else {}
        rows = {"base model": self.base_model or "a module of one's own", **self.facts, **labels}
        return {name: value for name, value in rows.items() if name != _PRIVACY}

    def _privacy(self) -> list[str]:
        """What protects the training data; that nothing does, where a statement begins with that, in bold."""
        statement = " ".join(self.facts.get(_PRIVACY, "").split())
        if statement.startswith(_VOID):
            verdict, _, rest = statement.partition(". ")
            statement = f"**{verdict}.** It would have been: {rest}"
        return ["## Privacy", "", statement, ""] if statement else []

    def _use_adapter(self) -> list[str]:
        load = 'model = PeftModel.from_pretrained(base, "path/to/this/folder").eval()'
        if not self.base_model:
            return ["from peft import PeftModel", "", f"{load}  # base: the module as it was before"]
        settings = [f"id2label={dict(enumerate(self.label_names))!r}"] if self.label_names else []
        settings += [f"pad_token_id={self.pad_token_id}"] if self.pad_token_id is not None else []
        built_in = self.base_model.startswith("builtin/")
        place = f"locate({self.base_model!r})" if built_in else repr(self.base_model)
        return [
            "from peft import PeftModel",
            *(["from secure_fed.models.loading import locate"] if built_in else []),
            "from transformers import AutoModelForSequenceClassification",
            "",
            "base = AutoModelForSequenceClassification.from_pretrained(",
            f"    {', '.join([place, *settings])}",
            ")",
            load,
        ]


def run_facts(
    config: RunConfig, method: Card, rounds: int, accuracy: float | None, client: str | None, statement: str = ""
) -> dict[str, str]:
    """What the run was, and what protects it: `statement`, if anything."""
    facts = {
        "method": f"{method.name} ({method.paper})",
        "rounds": str(rounds),
        "accuracy on the test set": "not measured" if accuracy is None else f"{accuracy:.4f}",
    }
    if config.method.personal:
        facts["personal tensors"] = f"{', '.join(config.method.personal)}: here those of client {client!r} alone"
        if config.privacy.unit == "client":  # the noise is on what travels, which these do not
            facts["personal tensors"] += ", WITHOUT NOISE: no guarantee covers them"
    if config.model.dtype == "bfloat16":
        facts["precision"] = _BFLOAT16
    return facts | {_PRIVACY: statement or unprotected(config)}


_PRIVACY = "privacy"
_VOID = "NOT PRIVATE"
_BFLOAT16 = (
    "trained beside a base model in bfloat16; beside one in float32 its scores differ from the third digit on "
    "(dtype=torch.bfloat16 loads what it was trained with)"
)
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
