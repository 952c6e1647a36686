"""The README of an exported folder: front matter that model hubs read, the facts of the run, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from secure_fed.config import DataConfig, RunConfig
from secure_fed.export.peft_folder import POOLED
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import pad_id
from secure_fed.learning.models.architecture import is_pooled
from secure_fed.learning.tasks.headline import first_metrics, has_accuracy, leads, spoken
from secure_fed.methods.method import Card
from secure_fed.runs import guarantee

LABELS = "labels.json"
_NAMES = ("id2label", "label2id")

# The kind of folder: an adapter for PEFT, an adapter for `secure_fed.load_adapter`, or a whole model.
Kind = Literal["peft", "own", "merged"]


@dataclass(frozen=True)
class ModelCard:
    """The contents of the README.

    base_model: the base model's `model.name`, or empty for a module that exists only in a user's program. facts: rows of a
    table, in order, from `run_facts`; the row on privacy becomes a separate section. pad_token_id: the padding token where the
    base model has none and needs one (decoders). auto: the Auto class of transformers that loads the model; settings: the
    arguments of its configuration, by default the names of labels. conversion: a sentence on how to compute an answer from the
    model's scores, if they are not the answer. pooled: whether the head reads the mean over tokens, by secure-fed's own class.
    deployed: whether the clients were separate nodes. revision: of the base model, if it was chosen.
    """

    title: str
    base_model: str
    label_names: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    pad_token_id: int | None = None
    auto: str = "AutoModelForSequenceClassification"
    settings: Mapping[str, Any] | None = None
    conversion: str = ""
    pooled: bool = False
    deployed: bool = False
    revision: str = ""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: Any,
        tokenizer: Any,
        labels: tuple[str, ...],
        facts: Mapping[str, str],
        base_model: str = "",
        *,
        deployed: bool = False,
    ) -> ModelCard:
        """The card of a run's model. tokenizer: None where the program has its own. base_model: in place of `model.name`."""
        task, configured = tasks.build(config.data), tokenizer is not None
        return cls(
            config.method.name,
            base_model or (config.model.name if configured else ""),
            labels,
            facts,
            pad_id(tokenizer) if configured else None,
            task.auto,
            task.model_settings(labels) if configured else None,
            task.conversion,
            is_pooled(getattr(model, "config", None)),
            deployed,
            config.model.revision,
        )

    @property
    def labels(self) -> dict[str, dict[Any, Any]]:
        """The names of a model's outputs in the form of its configuration; empty if they have no names."""
        if self.settings is not None:
            return {name: self.settings[name] for name in _NAMES if name in self.settings}
        names = dict(enumerate(self.label_names))
        return dict(zip(_NAMES, (names, {name: index for index, name in names.items()}), strict=True)) if names else {}

    def text(self, kind: Kind) -> str:
        """Markdown that ends with a newline."""
        use = self._use_peft() if kind == "peft" else self._use_own() if kind == "own" else self._use_merged()
        lines = [
            *self._front_matter(kind),
            f"# {self.title}",
            "",
            f"Fine-tuned by secure-fed in {_DEPLOYED if self.deployed else _SIMULATED} {_HELD[kind]}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in self._rows(kind).items()),
            "",
            *self._privacy(),
            "## Use",
            "",
            "```python",
            *use,
            "```",
            *(["", self.conversion] if self.conversion else []),
        ]
        return "\n".join(lines) + "\n"

    def _front_matter(self, kind: Kind) -> list[str]:
        known = self.label_names or self.settings is not None
        task = [f"pipeline_tag: {_PIPELINES[self.auto]}"] if known and self.auto in _PIPELINES else []
        library = {"peft": "peft", "own": "secure-fed", "merged": "transformers"}[kind]
        tags = (*_TAGS, "lora") if kind == "peft" else _TAGS
        on_hub = not (self.base_model.startswith("builtin/") or Path(self.base_model).is_absolute())
        named = self.base_model and (kind != "merged" or on_hub)  # model hubs refuse unknown names
        quoted = self.base_model.replace("'", "''")  # YAML's single quotes leave Windows paths and colons unchanged
        base = [f"base_model: '{quoted}'"] if named else []
        return ["---", *base, f"library_name: {library}", *task, "tags:", *(f"- {tag}" for tag in tags), "---", ""]

    def _rows(self, kind: Kind) -> dict[str, str]:
        labels = {"labels": ", ".join(self.label_names)} if self.label_names else {}
        nowhere_else = kind == "merged" and Path(self.base_model).is_absolute()  # a path is of no use to others
        base = Path(self.base_model).name if nowhere_else else self.base_model
        read = {"the head reads": "the mean over tokens"} if self.pooled else {}
        rows = {"base model": base or "a module of one's own", **read, **self.facts, **labels}
        return {name: value for name, value in rows.items() if name != _PRIVACY}

    def _privacy(self) -> list[str]:
        """The section on privacy. If the statement begins with NOT PRIVATE, these words are in bold."""
        statement = " ".join(self.facts.get(_PRIVACY, "").split())
        if statement.startswith(_VOID):
            verdict, _, rest = statement.partition(". ")
            statement = f"**{verdict}.** It would have been: {rest}"
        return ["## Privacy", "", statement, ""] if statement else []

    def _use_own(self) -> list[str]:
        given = "" if self.base_model else ", base"
        whose = "" if self.base_model else "  # base: the module as it was before"
        return ["import secure_fed", "", f'model = secure_fed.load_adapter("path/to/this/folder"{given}){whose}']

    def _use_merged(self) -> list[str]:
        own = ", trust_remote_code=True" if self.pooled else ""
        load = f'model = {self.auto}.from_pretrained("path/to/this/folder"{own}).eval()'
        why = ["# mean_pooled.py in this folder is the head that reads the mean over tokens"] if self.pooled else []
        return [f"from transformers import {self.auto}", "", *why, load]

    def _use_peft(self) -> list[str]:
        load = 'model = PeftModel.from_pretrained(base, "path/to/this/folder").eval()'
        if not self.base_model:
            return ["from peft import PeftModel", "", f"{load}  # base: the module as it was before"]
        known = self.labels if self.settings is None else self.settings
        settings = [f"{name}={value!r}" for name, value in known.items()]
        settings += [f"pad_token_id={self.pad_token_id}"] if self.pad_token_id is not None else []
        settings += [f"revision={self.revision!r}"] if self.revision else []
        built_in = self.base_model.startswith("builtin/")
        place = f"locate({self.base_model!r})" if built_in else repr(self.base_model)
        ours = [*([POOLED] if self.pooled else []), *(["locate"] if built_in else [])]
        return [
            "from peft import PeftModel",
            *([f"from secure_fed import {', '.join(ours)}"] if ours else []),
            *([] if self.pooled else [f"from transformers import {self.auto}"]),
            "",
            f"base = {POOLED if self.pooled else self.auto}.from_pretrained(",
            f"    {', '.join([place, *settings])}",
            ")",
            load,
            *([f"# or: {line}"] if (line := self.labelled("path/to/this/folder")) else []),
        ]

    def labelled(self, folder: str) -> str:
        """The line that loads an adapter by PEFT's Auto class with the names of its labels, which PEFT reads from no folder.

        Empty where no line of PEFT and transformers alone does.
        """
        if not self.labels or self.pooled or self.auto != "AutoModelForSequenceClassification":
            return ""
        both = "id2label=dict(enumerate(names)), label2id={name: index for index, name in enumerate(names)}"
        loaded = f"AutoPeftModelForSequenceClassification.from_pretrained({folder!r}, {both})"
        return f"names = json.load(open({f'{folder}/{LABELS}'!r})); model = {loaded}"


def run_facts(
    config: RunConfig,
    method: Card,
    rounds: int,
    measured: Mapping[str, float] | None,
    client: str | None,
    statement: str = "",
    noise_alone: Mapping[str, Any] | None = None,
    membership: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The facts of a run, its last measurements, and its protection: `statement`, if there is one.

    measured: None if the measurements are withheld, because the test rows were held out of the protected data. noise_alone: the
    figures of the run's probe, if it made one. membership: the public membership figure, if the run has ended.
    """
    facts = {
        "method": f"{method.name} ({method.paper})",
        "rounds": f"{rounds}{_averaged(config, rounds)}",
        **(_NOT_TOLD if measured is None else _measured(config.data, measured)),
        **_membership(membership or {}),
    }
    if noise_alone:
        hopeless = "; HOPELESS: the noise takes the model to chance" if noise_alone["hopeless"] else ""
        facts["noise alone"] = f"{guarantee.noise_in_short(noise_alone)}{hopeless}"
    if config.method.personal:
        facts["personal tensors"] = f"{', '.join(config.method.personal)}: here those of client {client!r} alone"
        if config.privacy.unit == "client":  # noise is added to sent tensors only
            facts["personal tensors"] += ", WITHOUT NOISE: no guarantee covers them"
    if config.model.dtype == "bfloat16":
        facts["precision"] = _BFLOAT16
    return facts | {_PRIVACY: statement or guarantee.unprotected(config)}


def _averaged(config: RunConfig, rounds: int) -> str:
    last = config.federation.averaged
    averaged = last > 1 and rounds == config.federation.rounds
    return f"; this is the mean of the models of the last {last}" if averaged else ""


def _measured(data: DataConfig, found: Mapping[str, float]) -> dict[str, str]:
    """The first metrics of a task on the test set; if the task has an accuracy, its row is there even without a value."""
    rows: dict[str, str] = {}
    task, names = data.task, ("accuracy", *first_metrics(data.task, data.metric))
    for name in reversed(names) if leads(task) else names:
        if isinstance(value := found.get(name), int | float):
            rows[f"{spoken(name)} on the test set"] = f"{value:.4f}"
        elif name == "accuracy" and (has_accuracy(task) or not found):
            rows["accuracy on the test set"] = "not measured"
    return rows


def _membership(found: Mapping[str, Any]) -> dict[str, str]:
    """The membership figure beside the accuracy, or the reason why there is none; nothing for a run that has not ended."""
    if not found:
        return {}
    if found.get("auc") is None:
        return {"membership inference": f"no figure: {found.get('why')}"}
    low, high = found["auc_interval"]
    units = f"{found['unit']}s"
    if found["of"] == "dummies":
        units = f"dummy {'clients' if found['unit'] == 'client' else 'examples'}, which hold nobody's data"
    return {"membership inference": f"AUC {found['auc']:.3f} ({low:.3f} to {high:.3f}), of {units}; 0.5 is chance"}


_NOT_TOLD = {"measured on test rows": "withheld: these rows were held out of the clients' own data, without noise"}
_PRIVACY = "privacy"
_VOID = "NOT PRIVATE"
_BFLOAT16 = (
    "trained beside a base model in bfloat16; beside one in float32 its scores differ from the third digit on "
    "(dtype=torch.bfloat16 loads what it was trained with)"
)
_SIMULATED = "a simulated federation: one process held every client's data."
_DEPLOYED = "a federation of separate nodes, each with its own client's data."
_HELD: dict[Kind, str] = {
    "peft": "The base model is not in this folder.",
    "own": "The base model is not in this folder. The adapter's layers are secure-fed's, which loads them; PEFT does not.",
    "merged": "The adapter is merged into the base model.",
}
_PIPELINES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForCausalLM": "text-generation",
}
_TAGS = ("federated-learning", "secure-fed")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
