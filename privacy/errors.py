"""The errors of `privacy`, and their exit status.

PrivacyError             1
├── PlanError            2   parameters from which no guarantee can be made
├── LedgerError          2   a ledger that is damaged, tampered with, foreign or unreadable
└── BudgetExhausted      3   what was asked for does not fit what is left
"""

from __future__ import annotations


class PrivacyError(Exception):
    """Any failure this package reports; `exit_code` is what a command line ends with."""

    exit_code = 1


class PlanError(PrivacyError):
    """No guarantee can be made of these parameters."""

    exit_code = 2


class LedgerError(PrivacyError):
    """The ledger cannot be trusted or read."""

    exit_code = 2


class BudgetExhausted(PrivacyError):  # noqa: N818 - a state of affairs, and how everybody calls it
    """The budget does not hold what was asked for."""

    exit_code = 3
