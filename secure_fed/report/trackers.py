"""Trackers: TensorBoard, Weights & Biases, MLflow.

A tracker sends the public records of a run, as in `metrics.jsonl`, to a service that other people read. TensorBoard writes
files beside the run instead.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.methods.method import State
from secure_fed.rounds.sums import Record
from secure_fed.runs.directory import TENSORBOARD, made_private, private_part, read_text
from secure_fed.runs.durable import atomic_write

PROJECT = "secure-fed"
_log = logging.getLogger(__name__)


def asked_for(config: RunConfig, run_dir: Path, finished: int) -> list[Any]:
    """The callbacks of the trackers that the settings name; `finished` rounds are in the run directory already."""
    asked = config.evaluation
    return [
        *([TensorBoard(private_part(run_dir) / TENSORBOARD, finished)] if asked.tensorboard else []),
        *([WandbCallback()] if asked.wandb else []),
        *([MLflowCallback()] if asked.mlflow else []),
    ]


class TensorBoard:
    """Every number at the top of a round's record as a scalar under its own name; a resumed run overwrites later rounds.

    The folder appears with the first round. It lies in the private part of the run directory, since every event has its time.
    """

    def __init__(self, folder: Path, finished: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "evaluation.tensorboard is true, but TensorBoard is not installed; pip install 'secure-fed[tensorboard]'"
            ) from error
        self._open: Callable[[], Any] = partial(SummaryWriter, str(folder), purge_step=finished + 1)
        self._writer: Any = None

    def on_round_end(self, record: Record, state: State) -> None:
        self._writer = self._writer or self._open()
        for name, value in record.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, state.round)
        self._writer.flush()

    def on_end(self, result: object) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker(ABC):
    """Sends a service the settings of a run and its public records, round by round.

    Without privacy the service gets each round at its end. For a private run all rounds are written when the run ends, to files
    in the private part of the run directory, and nothing leaves the machine: the time of a round reveals how many clients
    trained in it, and the time of the end reveals their sum. A resumed run continues the service's earlier run. A service that
    fails after the start stops no run.
    """

    name = ""  # of the service
    module = ""  # its module, and the name of the extra and of the setting that ask for it
    advice = ""  # the remedy if it cannot be started

    def __init__(self) -> None:
        try:
            self._service: Any = import_module(self.module)
        except ImportError as error:
            needed = f"evaluation.{self.module} and {type(self).__name__} need it"
            raise ConfigError(
                f"{self.name} is not installed, and {needed}; pip install 'secure-fed[{self.module}]'"
            ) from error

    def on_run_begin(self, config: RunConfig, run_dir: Path | None) -> None:
        """Start the service of a run without privacy, so that its problems are reported before any training."""
        self._config, self._run_dir = config, run_dir
        self._id, self._failed = "", False
        if config.privacy.unit == "none":
            try:
                self._begin(None)
            except Exception as error:
                raise ConfigError(f"{self.name} cannot be started: {_short(error)}; {self.advice}") from error
        elif run_dir is None:
            raise ConfigError(
                f"{self.name} receives a private run as files of its run directory: name one with run(out)"
            )

    def on_published(self, record: Record) -> None:
        """Pass a round's public record on."""
        self._try(lambda: self._pass_on(record))

    def on_end(self, result: object) -> None:
        if self._id:
            self._try(self._close)

    def _pass_on(self, record: Record) -> None:
        folder = made_private(self._run_dir) if self._run_dir else None
        if not self._id:
            self._begin(folder)
        if folder and self._noted() != self._id:
            atomic_write(folder / self._note, self._id, private=True)
        self._log(dict(numbers(record)), record["round"])

    def _begin(self, folder: Path | None) -> None:
        title = self._run_dir.absolute().name if self._run_dir else None
        self._id = self._open(title, self._noted(), folder)

    @property
    def _settings(self) -> dict[str, dict[str, Any]]:
        """The settings without those for the record, which say who the operator is, and where."""
        return {section: settings for section, settings in self._config.to_dict().items() if section != "record"}

    @property
    def _note(self) -> str:
        return f"{type(self).__name__}.id"

    def _noted(self) -> str | None:
        """The id of the service's run, if this run was begun before."""
        return read_text(private_part(self._run_dir) / self._note) if self._run_dir else None

    def _try(self, action: Callable[[], None]) -> None:
        if not self._failed:
            try:
                action()
            except Exception as error:
                self._failed = True
                _log.warning("%s failed, and the run goes on without it: %s", self.name, _short(error))

    @abstractmethod
    def _open(self, title: str | None, known: str | None, folder: Path | None) -> str:
        """Begin a run of the service, or resume the `known` one; returns its id. With a `folder` nothing leaves the machine."""

    @abstractmethod
    def _log(self, values: dict[str, float], step: int) -> None:
        """Numbers after a round."""

    @abstractmethod
    def _close(self) -> None:
        """End the run of the service."""


def numbers(record: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a record under its own name, numbers of an inner record after its name: "clients_accuracy/mean"."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{of}{name}/")
        elif isinstance(value, int | float):
            yield f"{of}{name}", float(value)


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class WandbCallback(Tracker):
    """Weights & Biases: the active run, or else a new run in the project WANDB_PROJECT (or "secure-fed").

    For a private run it writes an offline run below `private/wandb`, without console, code, host and system figures. `wandb
    sync` uploads it.
    """

    name, module = "Weights & Biases", "wandb"
    advice = "run `wandb login`, set WANDB_MODE=offline, or leave out evaluation.wandb"

    def _open(self, title: str | None, known: str | None, folder: Path | None) -> str:
        terms = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "name": title, "config": self._settings}
        terms |= {"id": known, "resume": "allow"}
        self._own = bool(folder) or self._service.run is None
        if folder:
            quiet = self._service.Settings(
                **{"console": "off", "disable_git": True, "disable_code": True, "save_code": False},
                **{"x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True},
            )
            terms |= {"mode": "offline", "dir": str(folder), "settings": quiet, "reinit": "create_new"}
        self._run = self._service.init(**terms) if self._own else self._service.run
        return str(self._run.id)

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def _close(self) -> None:
        if self._own:
            self._run.finish()


class MLflowCallback(Tracker):
    """MLflow: the active run, or else a new run in the experiment MLFLOW_EXPERIMENT_NAME (or "secure-fed").

    Runs are stored at MLFLOW_TRACKING_URI. A private run is kept in `private/mlflow.db`, which `mlflow ui --backend-store-uri
    sqlite:///...` shows.
    """

    name, module = "MLflow", "mlflow"
    advice = "set MLFLOW_TRACKING_URI to a server that answers, or leave out evaluation.mlflow"

    def _open(self, title: str | None, known: str | None, folder: Path | None) -> str:
        uri = f"sqlite:///{folder.absolute() / 'mlflow.db'}" if folder else None
        self._client = self._service.MlflowClient(uri)
        active = None if folder else self._service.active_run()
        self._own = active is None
        if active is not None:
            return str(active.info.run_id)
        if known:
            return str(self._client.get_run(known).info.run_id)
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(named)
        experiment = found.experiment_id if found else self._client.create_experiment(named)
        begun = str(self._client.create_run(experiment, run_name=title).info.run_id)
        for section, settings in self._settings.items():
            for setting, value in settings.items():
                self._client.log_param(begun, f"{section}.{setting}", value)
        return begun

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, re.sub(r"[^\w.\-/ ]", "_", name), value, step=step)

    def _close(self) -> None:
        if self._own:
            self._client.set_terminated(self._id)
