"""All sections of a run's settings together, and the TOML file that explains each setting."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from secure_fed.config.data import DataConfig, ModelConfig
from secure_fed.config.evaluation import EvaluationConfig
from secure_fed.config.federation import FederationConfig
from secure_fed.config.method import MethodConfig
from secure_fed.config.protection import PrivacyConfig, SecureAggregationConfig
from secure_fed.config.setting import Setting, limits_in_words
from secure_fed.config.training import TrainingConfig


@dataclass(frozen=True)
class Sections:
    """All settings of a run, section by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def audit_fraction(self) -> float:
        """The share of the data's units for the audit, with the default for this run if it is not set."""
        chosen, settings = self.evaluation.audit_fraction, self.evaluation
        if chosen is not None:
            return chosen
        phantoms = self.privacy.unit != "none" or bool(settings.phantoms)
        return 0.0 if phantoms and settings.canaries == "none" else 0.1


def sections() -> dict[str, type]:
    """The class of every section, in their order."""
    return {section.name: section.default_factory for section in dataclasses.fields(Sections)}  # type: ignore[misc]


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
