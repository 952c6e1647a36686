"""Exceptions, and the exit status of each.

    SecureFedError            1   the run failed
    ├── TrainingError         1   a run could not go on (non-finite updates, no finite client left)
    ├── RequestError          1   a client refuses a request that no honest server sends
    ├── StorageError          1   a file of the run could not be written (a full disk, a limit on file sizes)
    └── UsageError            2   an input is wrong, and nothing was written
        ├── ConfigError           a key, a value, or a combination of settings
        ├── DataError             a file, a column, a label, a split
        ├── ModelError            a model or tokenizer that cannot be loaded or adapted
        ├── MethodError           a method that cannot do what the configuration requests
        ├── OwnLoopError          a training loop of the user's own that breaks a condition of its guarantee
        └── RunDirectoryError     a run directory that is missing, taken, foreign, damaged or unwritable from the start

Narrower exceptions stand beside the code that raises them; two of them have exit statuses of their own, 6 and 7
(flower/supernode.py). Errors of `privacy` (privacy/errors.py) have exit status 1 or 2 likewise, and 3 when a budget is
exhausted. Every message is one sentence that names the value, the limit and the setting to change; a `ConfigError` about a
setting has these three as attributes too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from privacy.errors import PrivacyError
    from protocols.errors import ProtocolError


class SecureFedError(Exception):
    """Any failure this package reports; `exit_code` is the exit status of the command line.

    setting: the setting to change, as `section.key`; "" where the failure is not about one. value: its value, or the input in
    its place. limit: the condition that the value breaks, such as `at least 1`, or the setting that it contradicts.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, setting: str = "", value: Any = None, limit: str = "") -> None:
        super().__init__(message)
        self.setting, self.value, self.limit = setting, value, limit

    def about(self, setting: str, value: Any, limit: str) -> Self:
        """The same error, about this setting."""
        self.setting, self.value, self.limit = setting, value, limit
        return self


class TrainingError(SecureFedError):
    """Training cannot go on."""


class RequestError(SecureFedError):
    """A client refuses a request that no honest server sends."""


class StorageError(SecureFedError):
    """A file of the run cannot be written."""


class UsageError(SecureFedError):
    """The request cannot be fulfilled as given."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is wrong."""


class DataError(UsageError):
    """The data cannot be used as given."""


class ModelError(UsageError):
    """The model cannot be loaded or adapted as configured."""


class MethodError(UsageError):
    """The method cannot do what the configuration requests."""


class OwnLoopError(UsageError):
    """A training loop of the user's own breaks a condition of its guarantee; nothing of that step is released."""


class RunDirectoryError(UsageError):
    """The run directory cannot be used."""


@contextmanager
def plainly(kind: type[SecureFedError], problem: str, remedy: str) -> Iterator[None]:
    """Report the system's refusal of a path (too long a name, a foreign folder, a full disk) in one sentence."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in a name; the "~" of an unknown user
        raise kind(f"{problem}: {getattr(error, 'strerror', None) or error}; {remedy}") from error


def reported(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit status; a failure is printed as one sentence."""
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt as stopped:
        print("; ".join(["secure-fed: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return 130
    except expected() as error:
        print(f"secure-fed: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # most likely of standard output
        _drop_refused_output()
        if not isinstance(error, BrokenPipeError):  # `| head` closed the pipe, which is no failure
            print(f"secure-fed: {error}", file=sys.stderr)
        return 1
    return status or 0


def expected() -> tuple[type[SecureFedError | PrivacyError | ProtocolError], ...]:
    """The exceptions whose message is one sentence. Imported when an error occurs, since `protocols` is slow to import."""
    from privacy.errors import PrivacyError
    from protocols.errors import ProtocolError

    return SecureFedError, PrivacyError, ProtocolError


def _drop_refused_output() -> None:
    """Send the rest of the buffer to the null device: at exit Python would fail to write it again, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
