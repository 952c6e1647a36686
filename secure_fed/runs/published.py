"""The public values of a private run: every value of its public files, and its source.

    run.json, metrics.jsonl, result.json     a value that follows from one of `Source`
    private/                                 everything else that a run notes: see `WITHHELD`

The guarantee covers everything computed from releases. A value computed from anything else, even the duration of a round, must
not be published with them. So the split is a table: a name that is missing from it stops the run (ValueError), and a file whose
names are all in it contains only values from their stated sources. Without privacy there are no releases: such a run withholds
only digests of its data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from secure_fed.learning.data.holdout import is_declared


class Source(Enum):
    """The source of a public value."""

    RELEASE = "what the mechanism released, and nothing else that is private"
    SETTINGS = "the configuration, the accountant, a ledger, and the software"
    DECLARED = "facts that the guarantee takes as public: labels, clients' names and number, what the noise depends on"
    TEST = "the test set, which trains nothing, and the released model"


RELEASE, SETTINGS, DECLARED, TEST = Source
WITHHELD = None  # the value goes to the private part; the public file has null or nothing in its place

Table = Mapping[str, Any]  # values: a Source, WITHHELD, or a Table for the values of an object

_PROTOCOL: Table = {
    **dict.fromkeys(("bytes_up", "bytes_down"), SETTINGS),
    **dict.fromkeys(("client_seconds", "server_seconds", "survivors", "left_out"), WITHHELD),
}

FACTS: Table = {
    "task": SETTINGS,
    "label_names": DECLARED,
    **dict.fromkeys(("clients", "member"), DECLARED),
    "partition": {"kind": SETTINGS, "jensen_shannon": WITHHELD, "sizes": WITHHELD, "digest": WITHHELD},
    "test": {"from": SETTINGS, "rows": TEST},
    "privacy": SETTINGS,
    "noise_alone": TEST,
    "dummies": SETTINGS,
    "charter": SETTINGS,
    "local": SETTINGS,
    **dict.fromkeys(("model_digest", "chat_template"), SETTINGS),
    "versions": SETTINGS,
    **dict.fromkeys(("data_digest", "examples_digest", "audit", "origin", "ended"), WITHHELD),
}

# The engine's entries for a round. Values measured by an evaluation have other names, and are passed by these names.
ROUND: Table = {
    **dict.fromkeys(("round", "cohort", "bytes_up", "bytes_down", "lr", "transfer_seconds"), SETTINGS),
    **dict.fromkeys(("sketch_residual", "ranks", "variation"), RELEASE),
    **dict.fromkeys(("train_loss", "rejected", "caught", "lost", "seconds"), WITHHELD),
    "masked": _PROTOCOL,
}

_BANDWIDTH: Table = {
    **dict.fromkeys(("megabytes_per_second", "transfer_seconds"), SETTINGS),
    **dict.fromkeys(("compute_seconds", "seconds"), WITHHELD),
}

RESULT: Table = {
    **dict.fromkeys(("schema", "method", "model", "data", "task", "rounds", "cohort", "personal", "unit"), SETTINGS),
    **dict.fromkeys(("clients", "label_names"), DECLARED),
    **dict.fromkeys(("accuracy", "commonest", "no_learning", "macro_f1", "loss", "metrics", "best_round"), TEST),
    "test": {"from": SETTINGS, "rows": TEST},
    "noise_alone": TEST,
    "membership": RELEASE,
    **dict.fromkeys(("membership_of_data", "membership_of_rows"), WITHHELD),
    **dict.fromkeys(("epsilon", "epsilon_participants", "holds_against", "delta"), SETTINGS),
    **dict.fromkeys(("noise_multiplier", "sampling_rate"), SETTINGS),
    **dict.fromkeys(
        ("releases", "epsilon_cumulative", "delta_cumulative", "privacy_statement", "ended_early"), SETTINGS
    ),
    "privacy": {
        **dict.fromkeys(
            ("unit", "adjacency", "epsilon", "epsilon_participants", "delta", "mechanism", "sampling", "accountant"),
            SETTINGS,
        ),
        **dict.fromkeys(("noise", "trust", "released", "not_covered", "private", "place", "hidden_cohort"), SETTINGS),
        **dict.fromkeys(("clip_norm", "planned_releases", "participations"), SETTINGS),
        **dict.fromkeys(("ledger", "data_set", "budget_epsilon", "budget_delta", "renyi"), SETTINGS),
        **dict.fromkeys(("holds_against", "curve", "gaussian_mu", "groups"), SETTINGS),
        "realised": WITHHELD,
    },
    **dict.fromkeys(("bytes_up", "bytes_down"), SETTINGS),
    "secure_aggregation": {
        **dict.fromkeys(
            ("clients", "coins", "neighbours", "threshold", "least", "corrupt", "active", "bits"), SETTINGS
        ),
        **dict.fromkeys(("dummies", "shares", "failure", "abort"), SETTINGS),
        **_PROTOCOL,
        **dict.fromkeys(("rounds_lost", "caught"), WITHHELD),  # reveal whether a secret cohort had some client
    },
    "diagnostics": {"variation": RELEASE, "target": TEST, "bandwidth": _BANDWIDTH},
    "recorded": SETTINGS,
    **dict.fromkeys(("trainable", "seed", "run_dir", "versions"), SETTINGS),
    "seconds": WITHHELD,
}


def of_round(
    record: Mapping[str, Any], measured: Collection[str], *, declared: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A round's record, split into its public and its withheld part.

    measured: the names of an evaluation's values. declared: whether its test set was declared; measurements on rows held out of
    the clients' own data are withheld.
    """
    tested = dict.fromkeys(measured, TEST if declared else WITHHELD)
    return cut(record, {**tested, **ROUND}, whole=False)


def of_result(summary: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's result, split in the same way; the public part keeps every key, with null for withheld values.

    The best round, and the rounds to a target, follow from evaluations that `of_round` withholds where the test rows were held
    out of private ones.
    """
    declared = is_declared(str(summary["test"]["from"]))
    held_out = {"best_round": WITHHELD, "diagnostics": {**RESULT["diagnostics"], "target": WITHHELD}}
    shown, withheld = cut(summary, RESULT if declared else {**RESULT, **held_out}, whole=True)
    own = ("membership_of_data", "membership_of_rows")  # only some runs have these: no key tells which
    return {name: value for name, value in shown.items() if name not in own}, withheld


def of_facts(facts: Mapping[str, Any], *, private: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts noted when a run begins. Without privacy only digests of the data and of the held-out units, and where and when
    the run began, are withheld.
    """
    if private:
        return cut(facts, FACTS, whole=False)
    divided = dict(facts["partition"])
    own = {"partition": {"digest": divided.pop("digest")}} if "digest" in divided else {}
    own |= {name: facts[name] for name in ("data_digest", "examples_digest", "audit", "origin") if name in facts}
    return {name: value for name, value in facts.items() if name not in own} | {"partition": divided}, own


def cut(
    values: Mapping[str, Any], table: Table, *, whole: bool, strict: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`values` in two parts, by a table that must name each value if `strict`; `whole`: with null for every withheld one."""
    shown: dict[str, Any] = {}
    withheld: dict[str, Any] = {}
    for name, value in values.items():
        if strict and name not in table:
            raise ValueError(
                f"{name!r} is in no table of what a private run may show: add it to the table with its Source, or as WITHHELD"
            )
        rule = table.get(name, TEST)
        if isinstance(rule, Mapping) and isinstance(value, Mapping):
            shown[name], kept = cut(value, rule, whole=whole, strict=strict)
            withheld |= {name: kept} if kept else {}
        elif rule is WITHHELD:
            withheld |= {name: value}
            shown |= {name: None} if whole else {}
        else:
            shown[name] = value
    return shown, withheld


def without_withheld(values: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """`values` for the public, whatever a file contains: without the values that the table withholds."""
    return cut(values, table, whole=False, strict=False)[0]


def together(shown: Mapping[str, Any], withheld: Mapping[str, Any]) -> dict[str, Any]:
    """Both parts joined again, as before the split: for the owner of the data."""
    whole = dict(shown)
    for name, value in withheld.items():
        own = whole.get(name)
        whole[name] = together(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return whole
