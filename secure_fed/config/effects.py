"""When a setting has an effect. Changing a setting that has no effect is an error."""

from __future__ import annotations

from collections.abc import Callable

from secure_fed.config.data import WRITE
from secure_fed.config.sections import Sections


def _generated(config: Sections) -> bool:
    return config.data.name == "builtin/notes" and not config.data.train


def _own_data(config: Sections) -> bool:
    return not _generated(config)


def _dirichlet(config: Sections) -> bool:
    keyed = bool(config.data.client) or isinstance(config.data.train, tuple)
    drawn = config.data.partition in ("dirichlet", "label_dirichlet", "language")
    return drawn or (config.data.partition == "auto" and not keyed)


def _divided(kind: str) -> Callable[[Sections], bool]:
    return lambda config: config.data.partition == kind


def _task(name: str) -> Callable[[Sections], bool]:
    return lambda config: config.data.task == name


def _private(*units: str) -> Callable[[Sections], bool]:
    return lambda config: config.privacy.unit in units


def _counted_by_client(config: Sections) -> bool:
    return config.privacy.unit in ("example", "group") or (
        config.privacy.unit == "client" and config.privacy.noise == "local"
    )


def _may_be_banded(config: Sections) -> bool:
    """Whether noise is to be correlated over rounds, or may be: the server's, over clients in turn."""
    privacy, sampling = config.privacy, config.federation.sampling
    in_turn = privacy.unit == "client" and privacy.noise in ("auto", "central") and sampling in ("auto", "schedule")
    return privacy.correlation == "banded" or (privacy.correlation == "auto" and in_turn)


# A setting, the condition under which it has an effect, and this condition in words.
EFFECTS: tuple[tuple[str, Callable[[Sections], bool], str], ...] = (
    ("data.name", lambda c: not c.data.train, "no data.train"),
    *(
        (f"data.{name}", lambda c: _own_data(c) and not c.data.train, "a data.name of your own and no data.train")
        for name in ("revision", "split", "test_split")
    ),
    ("data.task", _own_data, "data of your own"),
    ("data.text", _own_data, "data of your own"),
    (
        "data.text_b",
        lambda c: _own_data(c) and c.data.task not in ("tokens", "chat"),
        "data of your own and another data.task than 'tokens' and 'chat'",
    ),
    ("data.label", lambda c: _own_data(c) and c.data.task not in ("causal_lm", "chat"), "data of your own with labels"),
    *(
        (f"data.{name}", _task(task), f"data.task = {task!r}")
        for name, task in (
            ("class_priors", "classification"),
            ("label_centre", "regression"),
            ("label_scale", "regression"),
            ("stride", "question_answering"),
            ("unanswerable", "question_answering"),
            ("likelihood", "multiple_choice"),
            ("learn", "chat"),
            ("chat_template", "chat"),
        )
    ),
    (
        "data.learn_prompt",
        lambda c: c.data.task == "causal_lm" and bool(c.data.text_b),
        "data.task = 'causal_lm' and data.text_b",
    ),
    ("model.device", lambda c: not c.model.device_map, "no model.device_map, which chooses the devices"),
    ("model.max_memory", lambda c: bool(c.model.device_map), "model.device_map"),
    (
        "model.pooling",
        lambda c: c.data.task in ("classification", "multi_label", "regression"),
        "data.task = 'classification', 'multi_label' or 'regression'",
    ),
    (
        "model.descriptions",
        lambda c: c.data.task == "classification" and c.model.pooling == "mean",
        "data.task = 'classification' and model.pooling = 'mean'",
    ),
    ("model.train_head", lambda c: bool(c.model.descriptions), "model.descriptions"),
    ("evaluation.per_client", lambda c: c.data.task != "regression", "a data.task with an accuracy"),
    ("evaluation.target_accuracy", lambda c: c.data.task != "regression", "a data.task with an accuracy"),
    ("data.test_fraction", lambda c: _own_data(c) and not c.data.test, "data of your own and no data.test"),
    ("data.client", lambda c: c.data.partition in ("auto", "natural"), "data.partition = 'natural' or 'auto'"),
    (
        "evaluation.audit_unit",
        lambda c: (c.audit_fraction > 0 or bool(c.evaluation.phantoms)) and c.privacy.unit == "none",
        "evaluation.audit_fraction above 0 or evaluation.phantoms, and privacy.unit = 'none': with privacy, the protected unit "
        "is audited",
    ),
    (
        "evaluation.phantoms",
        lambda c: c.privacy.unit != "none" or c.evaluation.audit_unit == "client",
        "privacy.unit to be set, or evaluation.audit_unit = 'client': without privacy there are no per-example gradients",
    ),
    (
        "evaluation.generate",
        lambda c: c.data.task in WRITE and (c.data.task != "causal_lm" or bool(c.data.text_b)),
        "data.task = 'chat', or 'causal_lm' and data.text_b, the column of the right answers",
    ),
    ("evaluation.max_new_tokens", lambda c: c.evaluation.generate > 0, "evaluation.generate above 0"),
    ("data.metric", lambda c: c.evaluation.generate > 0, "evaluation.generate above 0"),
    ("data.answer_pattern", lambda c: c.data.metric == "exact_match", "data.metric = 'exact_match'"),
    ("evaluation.non_members", _own_data, "data of your own: the built-in notes have test rows of the same kind"),
    ("evaluation.canaries", lambda c: c.audit_fraction > 0, "evaluation.audit_fraction above 0"),
    ("data.examples", _generated, "data.name = 'builtin/notes' and no data.train"),
    ("data.test_examples", _generated, "data.name = 'builtin/notes' and no data.train"),
    ("data.alpha", _dirichlet, "data.partition = 'dirichlet', 'label_dirichlet' or 'language'"),
    ("data.language", _divided("language"), "data.partition = 'language'"),
    ("data.labels_per_client", _divided("pathological"), "data.partition = 'pathological'"),
    ("data.matrix", _divided("matrix"), "data.partition = 'matrix'"),
    ("federation.trim", lambda c: c.federation.aggregate == "trimmed_mean", "federation.aggregate = 'trimmed_mean'"),
    (
        "federation.server_momentum",
        lambda c: (
            c.federation.optimizer != "mean" or (c.federation.server_optimizer == "auto" and c.privacy.unit == "client")
        ),
        "federation.server_optimizer = 'momentum' or 'adam'",
    ),
    ("method.sketch", lambda c: c.method.transport_form == "sketch", "method.transport_form = 'sketch'"),
    ("method.denoise", _private("client"), "privacy.unit = 'client'"),
    (
        "method.denoise_over",
        lambda c: c.method.denoise == "shrink" and c.privacy.unit == "client",
        "method.denoise = 'shrink' and privacy.unit = 'client'",
    ),
    ("training.epochs", lambda c: c.training.steps is None, "training.steps to be unset"),
    *(
        (f"privacy.{name}", _private("client", "example", "group"), "privacy.unit to be set")
        for name in ("epsilon", "delta", "noise_multiplier", "clip_norm", "ledger", "on_exhausted", "even_if_hopeless")
    ),
    ("privacy.noise", _private("client"), "privacy.unit = 'client'"),
    (
        "privacy.clip_quantile",
        lambda c: c.privacy.unit == "client" and c.privacy.noise in ("auto", "central"),
        "privacy.unit = 'client' and privacy.noise = 'central'",
    ),
    ("privacy.correlation", _private("client"), "privacy.unit = 'client'"),
    ("privacy.band", _may_be_banded, "privacy.unit = 'client' and privacy.correlation = 'banded'"),
    (
        "privacy.hidden_cohort",
        lambda c: c.privacy.unit == "client" and c.privacy.noise == "distributed",
        "privacy.unit = 'client' and privacy.noise = 'distributed'",
    ),
    *(
        (f"secure_aggregation.{name}", lambda c: c.secure_aggregation.enabled, "secure_aggregation.enabled = true")
        for name in ("corrupt", "dropout", "active", "neighbours", "threshold", "bits")
    ),
    (
        "secure_aggregation.range",
        lambda c: c.secure_aggregation.enabled and c.privacy.unit != "client",
        "secure_aggregation.enabled = true, and no clip norm on contributions (privacy.unit = 'client')",
    ),
    (
        "secure_aggregation.most_examples",
        lambda c: c.secure_aggregation.enabled and c.federation.weighting == "examples",
        "secure_aggregation.enabled = true and federation.weighting = 'examples'",
    ),
    ("privacy.group_column", _private("group"), "privacy.unit = 'group'"),
    ("privacy.group_examples", _private("group"), "privacy.unit = 'group'"),
    ("privacy.participations", _counted_by_client, "privacy.unit = 'example' or 'group', or privacy.noise = 'local'"),
    *(
        (f"privacy.{name}", lambda c: bool(c.privacy.ledger), "privacy.ledger")
        for name in ("data_set", "unit_name", "ledger_heads")
    ),
    (
        "training.max_grad_norm",
        lambda c: c.privacy.unit not in ("example", "group"),
        "privacy.unit = 'none' or 'client': otherwise privacy.clip_norm bounds the gradient of every unit",
    ),
    ("training.momentum", lambda c: c.training.optimizer == "sgd", "training.optimizer = 'sgd'"),
)
