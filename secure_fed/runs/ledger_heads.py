"""The second place of ledgers' newest heads: one file per user, outside every ledger."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

from privacy.errors import LedgerError
from privacy.ledger_file import Heads

STATE = "XDG_STATE_HOME"


def heads_at(chosen: str | Path) -> Heads:
    """The chosen file; if none was chosen, secure-fed/ledgers.sqlite in the user's folder for state.

    That folder is $XDG_STATE_HOME, or ~/.local/state; a relative path there is ignored, as its specification has it.
    """
    if str(chosen):
        return Heads(_expanded(Path(chosen)))
    state = Path(os.environ.get(STATE, ""))
    folder = state if state.is_absolute() else _expanded(Path("~/.local/state"))
    return Heads(folder / "secure-fed" / "ledgers.sqlite")


def require_made(ledger: str) -> None:
    """Refuse a ledger that does not exist; if that cannot be determined, opening it reports the reason."""
    with suppress(OSError):
        if not Path(ledger).exists():
            made = shlex.join(["secure-fed", "budget", "create", ledger])
            raise LedgerError(
                f"there is no ledger {ledger}: make it with `{made} --data-set NAME --epsilon E --delta D`, or correct "
                "privacy.ledger"
            )


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise LedgerError(
            f"{path} names no place on this machine ({error}): set privacy.ledger_heads to a file that keeps the newest heads "
            "of ledgers"
        ) from error
