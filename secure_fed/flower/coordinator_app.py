"""The ServerApp: a coordinator, whose folder the run-config names, over Flower's Grid.

    coordinator    folder of `secure-fed coordinator init`, on the machine of the SuperLink
    deadline       seconds that a stage of a round may take
    wait           seconds to wait for members before a round begins
    too-few        "wait" or "lose": the action if they are too few after that

The run's messages are printed line by line; `flwr run --stream` shows them. A run that fails ends with one sentence, which the
coordinator's folder keeps with its exit status (ended.json), since Flower keeps neither.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privacy.errors import PrivacyError
from protocols.errors import ProtocolError
from secure_fed.deployment.coordinator import Settings, conduct
from secure_fed.deployment.home import ENDED
from secure_fed.errors import ConfigError, SecureFedError
from secure_fed.flower.carrier import GridCarrier
from secure_fed.runs.durable import atomic_write

app = ServerApp()


class RunFailed(Exception):  # noqa: N818 - a state, not an error type of Flower
    """A run that ended with an error, described in one sentence."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation of the coordinator's folder, or resume it. RunFailed, logged without a stack trace."""
    try:
        folder, settings = of_run_config(context.run_config)
        try:
            _, missed = conduct(folder, GridCarrier(grid), settings, partial(print, flush=True))
        except (SecureFedError, PrivacyError, ProtocolError, OSError) as error:
            note_end(folder, getattr(error, "exit_code", 1), str(error))
            raise
        note_end(folder, 0, missed)
    except (SecureFedError, PrivacyError, ProtocolError, OSError) as error:
        logging.getLogger("flwr").addFilter(in_one_sentence)
        raise RunFailed(str(error)) from error


def note_end(folder: Path, status: int, sentence: str) -> None:
    """Keep how the run ended, for the process that started it (`project.run`)."""
    # a full disk, a folder that is not there: the run is resumed, and ends again
    with suppress(SecureFedError, OSError):
        atomic_write(folder / ENDED, json.dumps({"status": status, "sentence": sentence}), private=True)


def of_run_config(given: Mapping[str, Any]) -> tuple[Path, Settings]:
    """The coordinator's folder, and its settings. ConfigError names the key that is missing or wrong."""
    if unknown := sorted(set(given) - {"coordinator", "deadline", "wait", "too-few"}):
        raise ConfigError(f"run-config has {unknown[0]}, which is no key of a run: leave it out")
    folder = given.get("coordinator")
    if not isinstance(folder, str) or not Path(folder).is_absolute():
        raise ConfigError(
            f"coordinator in run-config is {folder!r:.200}: name the coordinator's folder by its absolute path"
        )
    default = Settings()
    deadline = _seconds(given, "deadline", default.deadline)
    if deadline == 0:
        raise ConfigError("deadline in run-config is 0: set a number of seconds that a stage may take, such as 600")
    too_few = given.get("too-few", default.too_few)
    if too_few not in ("wait", "lose"):
        raise ConfigError(f'too-few in run-config is {too_few!r:.40}: set "wait" or "lose"')
    return Path(folder), Settings(deadline, _seconds(given, "wait", default.wait), too_few)


def in_one_sentence(record: logging.LogRecord) -> bool:
    """A filter of log records: Flower's record of a failed run becomes the run's one sentence, without the stack trace."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RunFailed):
        record.msg, record.args, record.exc_info = "secure-fed: %s", (str(error),), None
    return True


def _seconds(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_SECONDS:
        raise ConfigError(f"{key} in run-config is {value!r:.40}: set a number of seconds up to {_MOST_SECONDS:,}")
    return float(value)


_MOST_SECONDS = 30 * 86_400
