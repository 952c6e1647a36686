"""The errors of `privacy`, and their exit status.

PrivacyError             1
├── PlanError            2   parameters that allow no guarantee
├── LedgerError          2   a ledger that is damaged, tampered with, foreign or unreadable
├── BudgetExhausted      3   the request does not fit the remaining budget
├── TurnPassed           1   a round of a public order that cannot be made
├── NotYourTurn          1   a client's refusal of a round outside its turns (`participation`)
└── ForkError            1   a secret stream in another process than the one that made it (`entropy`)
"""

from __future__ import annotations


class PrivacyError(Exception):
    """Any failure that this package reports; `exit_code` is the exit status of a command line."""

    exit_code = 1


class PlanError(PrivacyError):
    """These parameters allow no guarantee."""

    exit_code = 2


class LedgerError(PrivacyError):
    """The ledger cannot be trusted or read."""

    exit_code = 2


class BudgetExhausted(PrivacyError):  # noqa: N818 - a state rather than an error, and its usual name
    """The request does not fit the budget."""

    exit_code = 3


class TurnPassed(PrivacyError):  # noqa: N818 - the way a round ended
    """The round cannot be made: it was begun before and interrupted, and no client in it has another turn; or, on many
    machines, too few of its members can be reached.
    """
