"""Contents of audit.json, made from scores of known law: protected, leaking, and contradicting the guarantee."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from attacks import record
from attacks.evidence.bounds import lower_bound
from attacks.report import sentences
from secure_fed.runs import roc

VANTAGES = (
    ("outsider", "Whoever gets the final model", "the final adapter"),
    ("fellow_client", "Another client", "the shared model after every round"),
    ("secure_server", "The server behind masks", "the sum of updates in every round"),
    ("server", "The server without masks", "every single update"),
)
ATTACKS = (
    ("loss", "Loss threshold", "Yeom et al. 2018", "outsider"),
    ("lira", "Likelihood ratio, online", "Carlini et al. 2022", "outsider"),
    ("rmia", "Robust membership inference", "Zarifzadeh et al. 2024", "outsider"),
    ("regression", "Steps explained by gradients", "this project", "fellow_client"),
    ("canary_cosine", "Canaries of random direction", "Andrew et al. 2023", "fellow_client"),
    ("sum_inversion", "Texts out of the secure sum", "Petrov et al. 2024", "secure_server"),
    ("update_score", "Gradients against single updates", "Zhu et al. 2024", "server"),
    ("label_counts", "Labels out of one update", "Wainakh et al. 2022", "server"),
)
_ORDER = [name for name, *_ in VANTAGES]
_OF_TEXTS = {
    "sum_inversion": {
        **{"bag_recall": 0.04, "bag_precision": 0.93, "recall": 0.03, "precision": 0.31},
        **{"updates": 3, "sums": 3},
    },
    "label_counts": {"mean_count_error": 1.8, "cosine": 0.71},
}


def protected() -> dict[str, Any]:
    """Scores that are independent of the coins; epsilon 8 accounted for one example."""
    return _audit("notes-epsilon-8", {}, 7.97, 0.842)


def unprotected() -> dict[str, Any]:
    """No guarantee, and every attack is better than the one before it; one of them recovers texts."""
    shifts = {"loss": 0.35, "lira": 1.1, "rmia": 1.0, "regression": 0.8, "canary_cosine": 0.0, "update_score": 1.7}
    audit = _audit("notes-without-privacy", shifts, None, 0.871)
    for cell in audit["cells"]:
        if cell["attack"] == "canary_cosine":
            cell |= nothing("no canaries were planted: set evaluation.canaries before training")
        if cell["attack"] == "sum_inversion" and cell["applicable"]:
            cell["measured"] |= {"bag_recall": 0.83, "bag_precision": 0.9, "recall": 0.8, "precision": 0.25}
    return audit


def violation() -> dict[str, Any]:
    """Epsilon 1 is claimed, and the attacks show more."""
    return _audit("notes-broken", {attack: 2.6 for attack, *_ in ATTACKS}, 0.99, 0.866)


def nothing(why: str) -> dict[str, Any]:
    """The content of a cell that does not apply."""
    numbers = dict.fromkeys(("auc", "auc_interval", "tpr_at_fpr", "epsilon_lower"))
    return {"applicable": False, "why": why, "measured": {}, **numbers}


def ranked(members: Any, others: Any, *, bound: bool = True) -> dict[str, Any]:
    """The numbers of a cell. The interval is Hanley's and McNeil's, since resampling takes too long for many cells."""
    auc, m, n = roc.auc(members, others), len(members), len(others)
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = 1.96 * np.sqrt((auc * (1 - auc) + (m - 1) * (q1 - auc**2) + (n - 1) * (q2 - auc**2)) / (m * n))
    interval = float(max(0, auc - spread)), float(min(1, auc + spread))
    at = {rate: roc.tpr_at(members, others, rate) for rate in roc.FALSE_POSITIVE_RATES}
    found = roc.to_dict(roc.Ranking(auc, interval, m, n, at))
    if not bound:
        return found
    scores, truth = np.concatenate([members, others]), np.arange(m + n) < m
    lower = lower_bound(scores, truth, 1e-5, 0.05)
    return found | {"epsilon_lower": lower.epsilon, "epsilon_how": "as many guesses as show most"}


def _audit(name: str, shifts: dict[str, float], epsilon: float | None, accuracy: float) -> dict[str, Any]:
    random = np.random.default_rng(3)
    cells, curves = [], {}
    for attack, _, _, weakest in ATTACKS:
        members, others = random.normal(shifts.get(attack, 0.0), 1, 900), random.normal(0, 1, 903)
        numbers, curve = ranked(members, others), _roc(members, others)
        for vantage in _ORDER:
            cell = {"attack": attack, "vantage": vantage, "applicable": True, "why": "", "note": "", "seconds": 1.2}
            if _ORDER.index(vantage) < _ORDER.index(weakest):
                cell |= nothing(f"it needs {VANTAGES[_ORDER.index(weakest)][2]}")
            elif attack in _OF_TEXTS:
                cell |= nothing("") | {"applicable": True, "measured": dict(_OF_TEXTS[attack])}
            else:
                cell |= numbers | {"measured": {}}
            cells.append(cell)
            curves[f"{attack}/{vantage}"] = curve
    protection = {"unit": "none" if epsilon is None else "example", "delta": None if epsilon is None else 1e-5}
    clients = [
        {"client": f"client-{i:04d}", "units": 9 - i % 4, "score": 0.8 - i / 40, "auc": None if i % 3 else 0.7 - i / 60}
        for i in range(14)
    ]
    exposed = [
        {"unit": f"{clients[i]['client']}/{i * 7}", "client": clients[i]["client"], "score": 4 - i / 9, "rank": i + 1}
        | {"member": i % 5 != 3, "text": None}
        for i in range(12)
    ]
    rows = (
        ("epsilon 1", 0.99, 0.71, 0.497, 0.009, 0.0),
        ("epsilon 8", 7.97, 0.842, 0.512, 0.012, 0.1),
        ("no privacy", None, 0.871, 0.884, 0.31, 2.9),
    )
    sweep = [
        {"run_dir": f"runs/{label}", "label": label, "epsilon": other, "accuracy": accurate, "auc": auc}
        | {"auc_interval": [auc - 0.027, auc + 0.027], "tpr_at_1": {"tpr": tail}, "epsilon_lower": lower}
        for label, other, accurate, auc, tail, lower in rows
    ]
    return {
        **protection,
        **{"schema": 1, "run_dir": f"runs/{name}", "method": "ffa_lora", "accuracy": accuracy, "significance": 0.05},
        **{"audited_unit": "example", "epsilon_accounted": epsilon, "members": 900, "non_members": 903},
        **{"baseline": {"auc": 0.507, "auc_interval": [0.48, 0.534], "at_chance": True}},
        "vantages": [{"name": name, "title": title, "sees": sees} for name, title, sees in VANTAGES],
        "attacks": [{"name": name, "title": title, "paper": paper} for name, title, paper, _ in ATTACKS],
        **{"cells": cells, "roc": curves, "clients": clients, "exposed": exposed, "sweep": sweep},
    }


def _roc(members: Any, others: Any) -> dict[str, list[float]]:
    """The ROC at every hundredth score and the last: thousands of points would dominate the time of every page test."""
    band = roc.band(members, others)
    lines = {"fpr": band.fpr, "tpr": band.tpr, "low": band.low, "high": band.high}
    return {name: [*line[::100].tolist(), float(line[-1])] for name, line in lines.items()}


def copied(audit: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The audit with some keys changed."""
    return {**copy.deepcopy(audit), **changes}


_NOTHING: dict[str, Any] = {
    **{"schema": 1, "run_dir": None, "method": None, "model": None, "data": None, "unit": None, "delta": None},
    **{"accuracy": None, "audited_unit": "example", "audited_of": "data", "canaries": "none", "recorded": "models"},
    **{"rounds": 2, "references": 0, "epsilon_promised": None, "adjacency": None, "personal": []},
    **{"epsilon_accounted": None, "members": 0, "non_members": 0, "significance": 0.05, "main": None},
    **{"asked_for": [], "cells": [], "roc": {}, "baseline": {}, "clients": [], "exposed": [], "accusations": []},
    **{"expected": None, "sweep": [], "verdict": {}},
}
_CELL = asdict(record.Cell("loss", "outsider", applicable=True, why=""))
_TAIL = asdict(record.Tail(0.01))
_BASELINE = {"auc": None, "auc_interval": None, "at_chance": None, "why": ""}
_CLIENT = {"units": 1, "score": 0.5, "held_out": 0, "score_held_out": None}
_EXPOSED = {"share_below": 0.5, "text": None}
_RUN = {
    **dict.fromkeys(("epsilon", "accuracy", "attack", "vantage", "auc", "auc_interval", "tpr_at_1", "tpr_at_01")),
    **dict.fromkeys(("epsilon_lower", "epsilon_lower_attack", "epsilon_lower_vantage")),
    **{"run_dir": "runs/a", "label": "a", "delta": 0.0, "of": {}},
}


def whole(told: Mapping[str, Any]) -> dict[str, Any]:
    """The content of an audit.json of which a test tells the parts that matter to it."""
    audit = {**_NOTHING, **told}
    known = {"epsilon_accounted": audit["epsilon_accounted"]}
    known |= {name: told[name] for name in ("members", "non_members") if name in told}
    audit["cells"] = [{**_CELL, **known, **cell} for cell in audit["cells"]]
    for cell in audit["cells"]:
        cell["estimates"] = [{"point": None, **one} for one in cell["estimates"]]
    audit["baseline"] = {**_BASELINE, **audit["baseline"]}
    audit["clients"] = [{**_CLIENT, **one} for one in audit["clients"]]
    audit["exposed"] = [{**_EXPOSED, **one} for one in audit["exposed"]]
    audit["sweep"] = [{**_RUN, **one} for one in audit["sweep"]]
    for run in audit["sweep"]:
        run |= {name: {**_TAIL, **run[name]} for name in ("tpr_at_1", "tpr_at_01") if run[name] is not None}
    for several, one, about in (("vantages", "vantage", "sees"), ("attacks", "attack", "paper")):
        listed: Iterable[dict[str, Any]] = told.get(several) or (
            {"name": name} for name in dict.fromkeys(cell[one] for cell in audit["cells"])
        )
        audit[several] = [{"title": entry["name"], about: "", **entry} for entry in listed]
    audit["verdict"] = {"level": "unsupported", "text": "", "summary": "", **audit["verdict"]}
    return audit


def audit(told: Mapping[str, Any]) -> record.Audit:
    """The record of `whole`; with a verdict, unless the test tells one."""
    found = record.read(whole(told))
    return found if told.get("verdict") else replace(found, verdict=sentences.verdict(found))


def verdict(told: Mapping[str, Any]) -> dict[str, str]:
    """The verdict on it."""
    return asdict(sentences.verdict(record.read(whole(told))))


def audit_of(*cells: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An audit of examples without a guarantee whose cells are these, all of the outsider."""
    named = [
        {"attack": f"attack-{i}", "vantage": "outsider", "applicable": True, **cell} for i, cell in enumerate(cells)
    ]
    baseline = {"auc": 0.5, "auc_interval": [0.47, 0.53], "at_chance": True}
    told = {"unit": "none", "audited_unit": "example", "significance": 0.05, "baseline": baseline, "cells": named}
    return {**told, **changes}


def cell(auc: float, *, half: float = 0.03, units: int = 900, **more: Any) -> dict[str, Any]:
    return {"auc": auc, "auc_interval": [auc - half, auc + half], "members": units, "non_members": units, **more}


FAILED = {"auc": 0.63, "auc_interval": [0.6, 0.66], "at_chance": False}  # a baseline without a model
REPLACED = {"epsilon_accounted": None, "epsilon_promised": 7.08, "adjacency": "one client replaced by another"}
DUMMIES: dict[str, Any] = {
    **{"audited_unit": "client", "audited_of": "dummies", "canaries": "direction"},
    "baseline": {"auc": None, "auc_interval": None, "at_chance": None, "why": "dummies have no texts"},
}
