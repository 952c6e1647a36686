"""Every setting of a run: frozen, typed, checked on entry, read from TOML and `section.key=value`.

setting      one setting: its default, its type, its limits, and their words
settings     the settings, section by section
checks       when a setting has an effect, and which settings exclude or require each other
run_config   the whole configuration: read, changed, compared, and the commented file of `secure-fed config init --all`
"""

from secure_fed.config.run_config import RunConfig, commented_toml, with_absolute_paths
from secure_fed.config.settings import (
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    MethodConfig,
    ModelConfig,
    PrivacyConfig,
    SecureAggregationConfig,
    TrainingConfig,
)

__all__ = [
    "DataConfig",
    "EvaluationConfig",
    "FederationConfig",
    "MethodConfig",
    "ModelConfig",
    "PrivacyConfig",
    "RunConfig",
    "SecureAggregationConfig",
    "TrainingConfig",
    "commented_toml",
    "with_absolute_paths",
]
