"""Every setting of a run: frozen, typed, checked on entry, read from TOML and `section.key=value`.

setting    the description of one setting: its default, its type, its limits, and their words
data       the settings of [model] and [data]; `federation`, `method`, `training`, `evaluation`: those of one section each;
           `protection`: those of [privacy] and [secure_aggregation]
sections   all sections together, and the TOML file with every key that `secure-fed config init` writes
effects    when a setting has an effect
checks     which settings exclude or require each other; `privacy_checks`: those that would void a guarantee
refusals   errors about a setting
run        the whole configuration: read, changed, and compared

An unknown key is an error that offers the nearest one; a setting without effect beside the others is an error too.
"""

from secure_fed.config.run_config import RunConfig, with_absolute_paths
from secure_fed.config.settings import (
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    MethodConfig,
    ModelConfig,
    PrivacyConfig,
    SecureAggregationConfig,
    TrainingConfig,
    commented_toml,
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
