"""The hand-made run of `conftest` with secure aggregation, for every kind of privacy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.secure_fed.conftest import make_private

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "central": {},
    "central fixed": {},
    "distributed": {"noise": "distributed"},
    "hidden": {"noise": "distributed", "hidden_cohort": True},
    "local": {"noise": "local"},
    "example": {"unit": "example", "noise": "auto"},
    "coins": {},
}
_BARE = ("nothing", "coins")  # without privacy
_PLACES = {"distributed": "shares", "hidden": "shares", "local": "contribution", "example": "gradients"}
_FACTS = {
    "clients": 4,
    "coins": False,
    "neighbours": 3,
    "threshold": 2,
    "least": 3,
    "shares": None,
    "corrupt": 1,
    "active": False,
    "bits": 32,
    "failure": 0.0,
    "abort": 0.0,
    "rounds_lost": 0,
    "caught": {},
}
_ROUND = {"client_seconds": 0.4, "server_seconds": 0.0095, "survivors": 3}


def masked(case: str, **facts: Any) -> Callable[[dict[str, Any]], None]:
    """An `edit` for `run_folder`; `facts` override the entries on secure aggregation in its result."""

    def edit(run: dict[str, Any]) -> None:
        if case not in _BARE:
            make_private(run)
            run["config"]["privacy"] |= CASES[case]
            coins = case in ("central", "hidden")
            run["config"]["federation"]["sampling"] = "poisson" if coins else "fixed"
        if case == "coins":
            run["config"]["federation"]["sampling"] = "poisson"
        run["config"]["secure_aggregation"] = {"enabled": True, "corrupt": 0.3, "active": facts.get("active", False)}
        for row in run["rows"]:
            sizes = {name: row[name] for name in ("bytes_up", "bytes_down")}
            row["masked"] = sizes | (_ROUND if case in _BARE else {})
        if run["result"] is not None:
            _finish(run["result"], run["rows"], case, facts)

    return edit


def _finish(result: dict[str, Any], rows: list[dict[str, Any]], case: str, facts: dict[str, Any]) -> None:
    names = ("bytes_up", "bytes_down", "client_seconds", "server_seconds")
    private = case not in _BARE
    spent = {
        name: None if private and "seconds" in name else sum(row["masked"][name] for row in rows) for name in names
    }
    result["secure_aggregation"] = (
        _FACTS
        | {"coins": case in ("central", "coins"), "shares": 1 if _PLACES.get(case) == "shares" else None}
        | facts
        | {"survivors": rows[-1]["masked"].get("survivors")}
        | spent
    )
    if case not in _BARE:
        place = _PLACES.get(case, "sum")
        result["privacy"] |= {"place": place, "hidden_cohort": case == "hidden"}
        result["unit"] = "example" if case == "example" else "client"
        if place not in ("sum", "shares"):
            result["privacy"]["participations"] = 5
