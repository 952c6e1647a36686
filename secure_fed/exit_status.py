"""The exit status of a command, and the one sentence that it prints when something went wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from privacy.errors import PrivacyError
from secure_fed.errors import SecureFedError

if TYPE_CHECKING:
    from protocols.errors import ProtocolError

_INTERRUPTED = 130


def reported(command: Callable[[], int | None]) -> int:
    """The exit status of a command, whatever went wrong said in one sentence."""
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt as stopped:
        print("; ".join(["secure-fed: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return _INTERRUPTED
    except _expected() as error:
        print(f"secure-fed: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # most likely of standard output
        _drop_refused_output()
        if not isinstance(error, BrokenPipeError):  # `| head` has read enough, and is told nothing
            print(f"secure-fed: {error}", file=sys.stderr)
        return 1
    return status or 0


def _expected() -> tuple[type[SecureFedError] | type[PrivacyError] | type[ProtocolError], ...]:
    """Errors that say what was wrong in a sentence. Looked up when there is one: the protocol takes a moment to load."""
    from protocols.errors import ProtocolError

    return SecureFedError, PrivacyError, ProtocolError


def _drop_refused_output() -> None:
    """What is left in the buffer would be refused again, with a traceback, when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
