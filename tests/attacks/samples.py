"""Contents of audit.json, made from scores of known law: protected, leaking, and contradicting the guarantee."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy import stats

from attacks import record
from attacks.report import words

VANTAGES = (
    ("outsider", "Outsider", "the final adapter"),
    ("fellow_client", "Fellow client", "the shared model after every round"),
    ("secure_server", "Server behind secure aggregation", "the sum of updates in every round"),
    ("server", "Server without secure aggregation", "every single update"),
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
        "bag_recall": 0.04,
        "bag_precision": 0.93,
        "recall": 0.03,
        "precision": 0.31,
        "updates": 3,
        "sums": 3,
    },
    "label_counts": {"mean_count_error": 1.8, "cosine": 0.71},
}


def protected(seed: int = 3) -> dict[str, Any]:
    """Scores that are independent of the coins; epsilon 8 accounted for one example."""
    return _audit("notes-epsilon-8", dict.fromkeys((a for a, *_ in ATTACKS), 0.0), seed, 7.97, 0.842)


def unprotected(seed: int = 3) -> dict[str, Any]:
    """No guarantee, and every attack is better than the one before it; one of them recovers texts."""
    shifts = {"loss": 0.35, "lira": 1.1, "rmia": 1.0, "regression": 0.8, "canary_cosine": 0.0, "update_score": 1.7}
    audit = _audit("notes-without-privacy", shifts, seed, None, 0.871)
    for cell in audit["cells"]:
        if cell["attack"] == "canary_cosine":
            cell |= nothing("no canaries were planted: set evaluation.canaries before training")
        if cell["attack"] == "sum_inversion" and cell["applicable"]:
            cell["measured"] |= {"bag_recall": 0.83, "bag_precision": 0.9, "recall": 0.8, "precision": 0.25}
    return audit


def violation(seed: int = 3) -> dict[str, Any]:
    """Epsilon 1 is claimed, and the attacks show more."""
    audit = _audit("notes-broken", dict.fromkeys((a for a, *_ in ATTACKS), 2.6), seed, 0.99, 0.866)
    return audit


def nothing(why: str) -> dict[str, Any]:
    """The content of a cell that does not apply."""
    numbers = dict.fromkeys(("auc", "auc_interval", "tpr_at_fpr", "epsilon_lower"))
    return {"applicable": False, "why": why, "measured": {}, **numbers}


def ranked(members: np.ndarray, others: np.ndarray, delta: float = 1e-5, *, bound: bool = True) -> dict[str, Any]:
    """The numbers of a cell, computed from the definitions."""
    m, n = len(members), len(others)
    auc = float((stats.rankdata(np.concatenate([members, others]))[:m].sum() - m * (m + 1) / 2) / (m * n))
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = 1.96 * np.sqrt((auc * (1 - auc) + (m - 1) * (q1 - auc**2) + (n - 1) * (q2 - auc**2)) / (m * n))
    return {
        "auc": auc,
        "auc_interval": [float(max(0, auc - spread)), float(min(1, auc + spread))],
        "tpr_at_fpr": {str(rate): _tail(members, others, rate) for rate in (0.01, 0.001)},
        "epsilon_lower": _lower(members, others, delta) if bound else None,
        "epsilon_how": "Clopper-Pearson at a threshold from a held-out half",
        "members": m,
        "non_members": n,
    }


def _audit(name: str, shifts: dict[str, float], seed: int, epsilon: float | None, accuracy: float) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    cells, roc = [], {}
    for attack, _, _, weakest in ATTACKS:
        members, others = random.normal(shifts.get(attack, 0.0), 1, 900), random.normal(0, 1, 903)
        for vantage in _ORDER:
            cell = {"attack": attack, "vantage": vantage, "applicable": True, "why": "", "note": "", "seconds": 1.2}
            cells.append({**cell, **_found(attack, vantage, weakest, members, others)})
            roc[f"{attack}/{vantage}"] = _roc(members, others)
    return {
        "schema": 1,
        "run_dir": f"runs/{name}",
        "method": "ffa_lora",
        "unit": "none" if epsilon is None else "example",
        "audited_unit": "example",
        "epsilon_accounted": epsilon,
        "delta": None if epsilon is None else 1e-5,
        "accuracy": accuracy,
        "members": 900,
        "non_members": 903,
        "significance": 0.05,
        "baseline": {"auc": 0.507, "auc_interval": [0.48, 0.534], "at_chance": True},
        "vantages": [{"name": name, "title": title, "sees": sees} for name, title, sees in VANTAGES],
        "attacks": [{"name": name, "title": title, "paper": paper} for name, title, paper, _ in ATTACKS],
        "cells": cells,
        "roc": roc,
        "clients": [
            {
                "client": f"client-{i:04d}",
                "units": 9 - i % 4,
                "score": 0.8 - i / 40,
                "auc": None if i % 3 else 0.7 - i / 60,
            }
            for i in range(14)
        ],
        "exposed": [
            {
                "unit": f"client-{i % 14:04d}/{i * 7}",
                "client": f"client-{i % 14:04d}",
                "score": 4 - i / 9,
                "rank": i + 1,
            }
            | {"member": i % 5 != 3, "text": None}
            for i in range(12)
        ],
        "sweep": _sweep(),
    }


def _found(attack: str, vantage: str, weakest: str, members: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    if _ORDER.index(vantage) < _ORDER.index(weakest):
        sees = {name: sees for name, _, sees in VANTAGES}[weakest]
        return nothing(f"it needs {sees}")
    if attack in _OF_TEXTS:
        return nothing("") | {"applicable": True, "measured": dict(_OF_TEXTS[attack])}
    return ranked(members, others) | {"measured": {}}


def _tail(members: np.ndarray, others: np.ndarray, rate: float) -> dict[str, Any] | None:
    if len(others) < 3 / rate:
        return None
    threshold = np.sort(others)[::-1][int(rate * len(others))]
    caught, accused = int((members > threshold).sum()), int((others > threshold).sum())
    return {
        "tpr": caught / len(members),
        "tpr_interval": _exact(caught, len(members)),
        "fpr": accused / len(others),
        "fpr_interval": _exact(accused, len(others)),
    }


def _exact(hits: int, of: int, significance: float = 0.05) -> list[float]:
    low = stats.beta.ppf(significance / 2, hits, of - hits + 1) if hits else 0.0
    high = stats.beta.isf(significance / 2, hits + 1, of - hits) if hits < of else 1.0
    return [float(low), float(high)]


def _lower(members: np.ndarray, others: np.ndarray, delta: float) -> float:
    """The lower bound at the best threshold of the first half, measured on the second half."""
    half, rest = slice(None, None, 2), slice(1, None, 2)
    thresholds = np.quantile(others[half], (0.5, 0.8, 0.9, 0.98))
    best = max(thresholds, key=lambda at: _epsilon(members[half], others[half], at, delta))
    return _epsilon(members[rest], others[rest], best, delta)


def _epsilon(members: np.ndarray, others: np.ndarray, at: float, delta: float) -> float:
    tpr = _exact(int((members > at).sum()), len(members))[0]
    fpr = _exact(int((others > at).sum()), len(others))[1]
    return float(max(0.0, np.log(max(tpr - delta, 1e-12) / fpr)))


def _roc(members: np.ndarray, others: np.ndarray) -> dict[str, list[float]]:
    """The ROC at every twentieth score and the last: thousands of points would dominate the time of every page test."""
    scores = np.sort(np.concatenate([members, others]))[::-1]
    thresholds = np.concatenate([[np.inf], scores[::20], scores[-1:]])
    tpr = 1 - np.searchsorted(np.sort(members), thresholds) / len(members)
    fpr = 1 - np.searchsorted(np.sort(others), thresholds) / len(others)
    hits = np.rint(tpr * len(members))
    low = np.nan_to_num(stats.beta.ppf(0.025, hits, len(members) - hits + 1))
    high = np.nan_to_num(stats.beta.isf(0.025, hits + 1, len(members) - hits), nan=1.0)
    return {"fpr": fpr.tolist(), "tpr": tpr.tolist(), "low": low.tolist(), "high": high.tolist()}


def _sweep() -> list[dict[str, Any]]:
    rows = [
        ("epsilon 1", 0.99, 0.71, 0.497, 0.009, 0.0),
        ("epsilon 8", 7.97, 0.842, 0.512, 0.012, 0.1),
        ("no privacy", None, 0.871, 0.884, 0.31, 2.9),
    ]
    return [
        {"run_dir": f"runs/{label}", "label": label, "epsilon": epsilon, "accuracy": accuracy, "auc": auc}
        | {"auc_interval": [auc - 0.027, auc + 0.027], "tpr_at_1": {"tpr": tail}, "epsilon_lower": lower}
        for label, epsilon, accuracy, auc, tail, lower in rows
    ]


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
    return found if told.get("verdict") else replace(found, verdict=words.verdict(found))


def verdict(told: Mapping[str, Any]) -> dict[str, str]:
    """The verdict on it."""
    return asdict(words.verdict(audit(told)))
