"""secure-fed: federated fine-tuning of one language model by many parties whose data stay where they are.

    from secure_fed import Federation, RunConfig
    result = Federation(RunConfig.load("run.toml")).run("runs/first")

Importing this package imports nothing heavy; the first use of a name that needs torch (such as `Federation`) imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secure_fed.activity import heartbeat
    from secure_fed.config import RunConfig
    from secure_fed.errors import SecureFedError
    from secure_fed.export.adapter_folder import load_adapter
    from secure_fed.export.trained import load_run
    from secure_fed.federation import Federation
    from secure_fed.learning.models.locate import locate
    from secure_fed.learning.models.mean_pooled import MeanPooledForSequenceClassification
    from secure_fed.report.result import Result
    from secure_fed.report.trackers import MLflowCallback, WandbCallback

__all__ = [
    "Federation",
    "MLflowCallback",
    "MeanPooledForSequenceClassification",
    "Result",
    "RunConfig",
    "SecureFedError",
    "WandbCallback",
    "__version__",
    "heartbeat",
    "load_adapter",
    "load_run",
    "locate",
]

_HOMES = {
    "Federation": "federation",
    "MLflowCallback": "report.trackers",
    "MeanPooledForSequenceClassification": "learning.models.mean_pooled",
    "Result": "report.result",
    "RunConfig": "config",
    "SecureFedError": "errors",
    "WandbCallback": "report.trackers",
    "heartbeat": "activity",
    "load_adapter": "export.adapter_folder",
    "load_run": "export.trained",
    "locate": "learning.models.locate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("secure-fed")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"secure_fed.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'secure_fed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
