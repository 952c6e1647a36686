"""Rules between settings: when a setting has an effect, and which settings require or exclude each other.

Changing a setting that has no effect is an error. Settings that contradict each other, or would void a privacy guarantee, are
refused before anything is read. The limits of a single setting are in `setting`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from secure_fed.config.settings import DIAGNOSTICS, LOCAL_DIAGNOSTICS, WRITE, Sections
from secure_fed.errors import ConfigError


def check(config: Sections) -> None:
    """ConfigError for a changed setting without effect, and for settings that contradict each other."""
    defaults = Sections()
    for name, effective, needs in EFFECTS:
        value = value_of(config, name)
        if value != value_of(defaults, name) and not effective(config):
            wrong(config, name, needs, f"{name} = {value!r} has no effect here: it needs {needs}")
    _federation(config)
    _privacy(config)
    if config.evaluation.dummies and config.federation.weighting == "examples":
        why = "a dummy client has no examples to be weighted by; set federation.weighting = 'uniform'"
        refuse(config, "evaluation.dummies", "federation.weighting = 'examples'", why)
    _partition(config)
    _answers(config)
    _diagnostics(config)
    if config.model.memory is not None and config.model.device_map and config.privacy.unit in ("example", "person"):
        why = (
            "that an example's gradient depends on no other is compared on one device with all of the model; use "
            "model.quantization, or protect clients"
        )
        refuse(config, "model.device_map", f"privacy.unit = {config.privacy.unit!r}", why)
    _ranks(config)
    if config.training.lr_warmup >= config.federation.rounds:
        message = (
            f"training.lr_warmup is {config.training.lr_warmup}, not below federation.rounds = {config.federation.rounds}: "
            "lower it, or raise federation.rounds"
        )
        wrong(config, "training.lr_warmup", "below federation.rounds", message)


def value_of(config: Sections, name: str) -> Any:
    """The value of `section.key`."""
    section, _, setting = name.partition(".")
    return getattr(getattr(config, section), setting)


def _generated(config: Sections) -> bool:
    return config.data.name == "builtin/notes" and not config.data.train


def _own_data(config: Sections) -> bool:
    return not _generated(config)


def _dirichlet(config: Sections) -> bool:
    keyed = bool(config.data.client) or isinstance(config.data.train, tuple)
    drawn = config.data.partition in ("dirichlet", "label_dirichlet", "language")
    return drawn or (config.data.partition == "auto" and not keyed)


def _where(*needs: tuple[Any, ...]) -> tuple[Callable[[Sections], bool], str]:
    """Whether each setting has one of the values behind its name, and the same in words."""
    words = (
        f"{name} = {' or '.join('true' if one is True else repr(one) for one in values)}" for name, *values in needs
    )
    return lambda config: all(value_of(config, name) in values for name, *values in needs), " and ".join(words)


def _counted_by_client(config: Sections) -> bool:
    return config.privacy.unit in ("example", "person") or (
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
        (f"data.{name}", *_where(("data.task", task)))
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
        lambda c: c.data.task in ("classification", "multi_label", "regression") or c.model.pooling == "model",
        "data.task = 'classification', 'multi_label' or 'regression'",
    ),
    ("model.descriptions", *_where(("data.task", "classification"), ("model.pooling", "mean"))),
    ("model.train_head", lambda c: bool(c.model.descriptions), "model.descriptions"),
    ("evaluation.per_client", lambda c: c.data.task != "regression", "a data.task with an accuracy"),
    ("evaluation.target_accuracy", lambda c: c.data.task != "regression", "a data.task with an accuracy"),
    ("data.test_fraction", lambda c: _own_data(c) and not c.data.test, "data of your own and no data.test"),
    ("data.client", *_where(("data.partition", "natural", "auto"))),
    (
        "evaluation.audit_unit",
        lambda c: (c.audit_fraction > 0 or bool(c.evaluation.dummies)) and c.privacy.unit == "none",
        "evaluation.audit_fraction above 0 or evaluation.dummies, and privacy.unit = 'none': with privacy, the protected unit "
        "is audited",
    ),
    (
        "evaluation.dummies",
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
    ("data.answer_pattern", *_where(("data.metric", "exact_match"))),
    ("evaluation.non_members", _own_data, "data of your own: the built-in notes have test rows of the same kind"),
    ("evaluation.canaries", lambda c: c.audit_fraction > 0, "evaluation.audit_fraction above 0"),
    ("data.examples", _generated, "data.name = 'builtin/notes' and no data.train"),
    ("data.test_examples", _generated, "data.name = 'builtin/notes' and no data.train"),
    ("data.alpha", _dirichlet, "data.partition = 'dirichlet', 'label_dirichlet' or 'language'"),
    ("data.language", *_where(("data.partition", "language"))),
    ("data.labels_per_client", *_where(("data.partition", "pathological"))),
    ("data.matrix", *_where(("data.partition", "matrix"))),
    ("federation.trim", *_where(("federation.aggregate", "trimmed_mean"))),
    (
        "federation.server_momentum",
        lambda c: (
            c.federation.optimizer != "mean" or (c.federation.server_optimizer == "auto" and c.privacy.unit == "client")
        ),
        "federation.server_optimizer = 'momentum' or 'adam'",
    ),
    ("method.sketch", *_where(("method.transport_form", "sketch"))),
    ("method.denoise", *_where(("privacy.unit", "client"))),
    ("method.denoise_over", *_where(("method.denoise", "shrink"), ("privacy.unit", "client"))),
    ("training.epochs", lambda c: c.training.steps is None, "training.steps to be unset"),
    *(
        (f"privacy.{name}", lambda c: c.privacy.unit != "none", "privacy.unit to be set")
        for name in ("epsilon", "delta", "noise_multiplier", "clip_norm", "ledger", "on_exhausted", "even_if_hopeless")
    ),
    ("privacy.noise", *_where(("privacy.unit", "client"))),
    (
        "privacy.clip_quantile",
        lambda c: c.privacy.unit == "client" and c.privacy.noise in ("auto", "central"),
        "privacy.unit = 'client' and privacy.noise = 'central'",
    ),
    ("privacy.correlation", *_where(("privacy.unit", "client"))),
    ("privacy.band", _may_be_banded, "privacy.unit = 'client' and privacy.correlation = 'banded'"),
    ("privacy.hidden_cohort", *_where(("privacy.unit", "client"), ("privacy.noise", "distributed"))),
    *(
        (f"secure_aggregation.{name}", *_where(("secure_aggregation.enabled", True)))
        for name in ("corrupt", "dropout", "active", "neighbours", "threshold", "bits")
    ),
    (
        "secure_aggregation.range",
        lambda c: c.secure_aggregation.enabled and c.privacy.unit != "client",
        "secure_aggregation.enabled = true, and no clip norm on contributions (privacy.unit = 'client')",
    ),
    (
        "secure_aggregation.most_examples",
        *_where(("secure_aggregation.enabled", True), ("federation.weighting", "examples")),
    ),
    (
        "method.ranks_column",
        lambda c: bool(c.data.client) or isinstance(c.data.train, tuple),
        "data.client, or a file for each client",
    ),
    ("method.ranks_column", *_where(("data.partition", "natural", "auto"))),
    ("privacy.mechanism", *_where(("privacy.unit", "client"))),
    ("privacy.person_column", *_where(("privacy.unit", "person"))),
    ("privacy.person_examples", *_where(("privacy.unit", "person"))),
    ("privacy.participations", _counted_by_client, "privacy.unit = 'example' or 'person', or privacy.noise = 'local'"),
    *(
        (f"privacy.{name}", lambda c: bool(c.privacy.ledger), "privacy.ledger")
        for name in ("data_set", "unit_name", "ledger_heads")
    ),
    (
        "training.max_grad_norm",
        lambda c: c.privacy.unit not in ("example", "person"),
        "privacy.unit = 'none' or 'client': otherwise privacy.clip_norm bounds the gradient of every unit",
    ),
    ("training.momentum", *_where(("training.optimizer", "sgd"))),
)


def _federation(config: Sections) -> None:
    federation, masks = config.federation, config.secure_aggregation
    if masks.enabled and federation.vanishing > masks.dropout:
        message = (
            f"federation.vanishing is {federation.vanishing:g}, above secure_aggregation.dropout = {masks.dropout:g}: if so "
            "many clients vanish, a round has no sum; lower it, or raise secure_aggregation.dropout"
        )
        wrong(config, "federation.vanishing", f"at most {masks.dropout:g}", message)
    if federation.clients and federation.cohort and federation.cohort > federation.clients:
        message = (
            f"federation.cohort is {federation.cohort}, more than federation.clients = {federation.clients}: lower it"
        )
        wrong(config, "federation.cohort", f"at most {federation.clients}", message)
    last, rounds = federation.averaged, federation.rounds
    if last > rounds:
        message = f"federation.average_last is {last}, more than federation.rounds = {rounds}: take {rounds} or less"
        wrong(config, "federation.average_last", f"at most {rounds}", message)
    if last > 1 and config.evaluation.patience is not None:
        why = "a run that may end early does not know which rounds are its last; unset one of the two"
        refuse(config, "federation.average_last", f"evaluation.patience = {config.evaluation.patience}", why)
    if federation.aggregate != "mean":
        _robust(config)
    if config.method.transport_form == "sketch" and federation.optimizer != "mean":
        wrong(
            config,
            "federation.server_optimizer",
            "'mean' with method.transport_form = 'sketch'",
            f"federation.server_optimizer = {federation.server_optimizer!r} adds up means of several rounds, whose sketches "
            "span different columns: use 'mean', or method.transport_form = 'dense'",
        )


def _robust(config: Sections) -> None:
    """Refuse medians and trimmed means with settings under which they are impossible, unsafe or meaningless."""
    for beside, refused, why in (
        (
            "secure_aggregation.enabled = true",
            config.secure_aggregation.enabled,
            "the server sees only sums, which it can bound only as a whole (docs/bounding_inputs.md); use 'mean'",
        ),
        (
            "privacy.unit = 'client'",
            config.privacy.unit == "client",
            "one client may move a median by more than the clip norm, so the noise would not cover it; clipping already "
            "bounds each client; use 'mean'",
        ),
        (
            "federation.weighting = 'examples'",
            config.federation.weighting == "examples",
            "each client reports its own example count; set federation.weighting = 'uniform'",
        ),
        (
            "method.transport_form = 'sketch'",
            config.method.transport_form == "sketch",
            "a median of sketches is no sketch of a median; set method.transport_form = 'dense'",
        ),
        ("evaluation.dummies", bool(config.evaluation.dummies), "dummy units are scored by sums; use 'mean'"),
        (
            "method.ranks",
            bool(config.method.ranks or config.method.ranks_column),
            "a rank that fewer than half of the clients train would have a median of zero, and never learn; use 'mean'",
        ),
        (
            "a cohort of fewer than 3 clients",
            min(config.federation.cohort or 3, config.federation.clients or 3) < 3,
            "of two changes neither can be identified as the outlier; raise federation.cohort",
        ),
    ):
        if refused:
            refuse(config, "federation.aggregate", beside, why)


def _partition(config: Sections) -> None:
    """Refuse a partition without the column or matrix that it needs."""
    data = config.data
    for kind, setting, there, missing in (
        (
            "natural",
            "client",
            data.client or isinstance(data.train, tuple),
            "names no column with the client of each row",
        ),
        ("language", "language", data.language, "names no column with the language of each row"),
        ("matrix", "matrix", data.matrix, "gives no shares of the labels"),
    ):
        if data.partition == kind and not there:
            message = f"data.partition is {kind!r}, but data.{setting} {missing}"
            wrong(config, f"data.{setting}", f"set with data.partition = {kind!r}", message)


def _answers(config: Sections) -> None:
    """Refuse answers without a metric, and a pattern that is no regular expression."""
    data = config.data
    if config.evaluation.generate and not data.metric:
        message = (
            f"evaluation.generate is {config.evaluation.generate}, but data.metric names no way to compare answers: set it to "
            "'exact_match', 'f1' or 'rouge_l'"
        )
        wrong(config, "data.metric", "set with evaluation.generate", message)
    try:
        re.compile(data.answer_pattern)
    except (re.error, OverflowError, RecursionError) as error:
        message = f"data.answer_pattern is {data.answer_pattern!r}, which is no regular expression: {error}; correct it"
        wrong(config, "data.answer_pattern", "a regular expression", message)


def _ranks(config: Sections) -> None:
    """Refuse ranks of clients that cannot be read, or that the global adapter does not have."""
    method = config.method
    limit = f"NAME=RANK once for each client, with ranks from 1 to method.rank = {method.rank}"
    try:
        wrong_ranks = [f"{name}={rank}" for name, rank in method.ranks_by_name.items() if not 1 <= rank <= method.rank]
    except ValueError as error:
        wrong_ranks = list(error.args)
    if wrong_ranks:
        wrong(
            config, "method.ranks", limit, f"method.ranks has the entry {wrong_ranks[0]!r:.80}, but it must be {limit}"
        )
    if (method.ranks or method.ranks_column) and method.double_rank:
        why = "double_rank compares methods at equal trained size; leave it out, and set method.rank"
        refuse(config, "method.ranks" if method.ranks else "method.ranks_column", "method.double_rank = true", why)
    if method.ranks and method.ranks_column:
        refuse(config, "method.ranks", "method.ranks_column", "both give the ranks of clients; leave one out")


def _diagnostics(config: Sections) -> None:
    """Refuse diagnostics of single clients where privacy or masks hide single clients' updates."""
    private, masked = config.privacy.unit != "none", config.secure_aggregation.enabled
    for name in config.evaluation.diagnostics:
        if name not in DIAGNOSTICS:
            limit = f"one of {', '.join(DIAGNOSTICS)}"
            message = f"evaluation.diagnostics names {name!r}; it must be one of {', '.join(DIAGNOSTICS)}"
        elif name in LOCAL_DIAGNOSTICS and (private or masked):
            limit = f"privacy.unit = {config.privacy.unit!r}" if private else "secure_aggregation.enabled = true"
            why = (
                "it reveals single clients' updates, without noise"
                if private
                else "it reads single clients' updates, and the server may learn only their sum"
            )
            message = f"evaluation.diagnostics = {name!r} is refused with {limit}: {why}"
        else:
            continue
        raise ConfigError(message, setting="evaluation.diagnostics", value=name, limit=limit)


def _privacy(config: Sections) -> None:
    """Refuse settings that would void a guarantee, or leave it undefined."""
    privacy, federation = config.privacy, config.federation
    if privacy.unit == "none":
        return
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        message = (
            f"privacy.unit is {privacy.unit!r} without a guarantee: set privacy.epsilon, or privacy.noise_multiplier"
        )
        wrong(config, "privacy.epsilon", "set, or privacy.noise_multiplier", message)
    if privacy.mechanism and not re.search(r"\.py(@|$)", privacy.mechanism):
        message = (
            f"privacy.mechanism = {privacy.mechanism!r} is no .py file: name one of yours, or leave it out for Gaussian"
        )
        wrong(config, "privacy.mechanism", "a .py file", message)
    if privacy.unit == "person" and not privacy.person_column:
        message = "privacy.unit is 'person', but privacy.person_column names no column with the person of each example"
        wrong(config, "privacy.person_column", "the name of a column with privacy.unit = 'person'", message)
    for name, refused, revealed in (
        ("federation.weighting", federation.weighting == "examples", "the number of a client's examples is private"),
        ("federation.nonfinite", federation.nonfinite == "fail", "a failed run reveals something about one client"),
        (
            "evaluation.per_client",
            config.evaluation.per_client,
            "accuracy on private data would be published without noise",
        ),
    ):
        if refused:
            refuse(config, name, f"privacy.unit = {privacy.unit!r}", revealed)
    if privacy.noise == "distributed":
        _distributed(config)
    if privacy.correlation == "banded":
        _correlated(config)
    if privacy.unit == "client":
        require_small_delta(config, config.federation.clients or 1)  # before data are read, if their number is known
        _denoising(config)


def require_small_delta(config: Sections, units: int) -> None:
    """Refuse a delta of one over the number of units: it allows revealing one unit completely."""
    delta = config.privacy.delta
    if delta * units >= 1:
        message = (
            f"privacy.delta is {delta:g}, no less than one over {units} units, so that it would allow publishing one of them: "
            f"set it well below {1 / units:.2g}"
        )
        wrong(config, "privacy.delta", f"below {1 / units:.2g}", message)


def _denoising(config: Sections) -> None:
    """Refuse shrinkage where the noise does not have one known level on every entry."""
    method, optimizer = config.method, config.federation.server_optimizer
    fra = method.name in ("fra_lora", "fra_then_ffa") or (method.name, method.rule) == ("federa", "fra_lora")
    if fra and method.denoise == "shrink" and optimizer == "adam":
        wrong(
            config,
            "federation.server_optimizer",
            "'mean' or 'momentum' with method.denoise = 'shrink'",
            "method.denoise = 'shrink' needs one noise level, but federation.server_optimizer = 'adam' scales each entry "
            "differently: use 'mean' or 'momentum', or method.denoise = 'tangent'",
        )
    if method.denoise_over == "sum" and method.transport_form == "sketch":
        why = "the sketches of different rounds span different columns, so their sum has no single noise level"
        refuse(config, "method.denoise_over", "method.transport_form = 'sketch'", why + "; use 'mean', or 'dense'")


def _distributed(config: Sections) -> None:
    hidden, sampling = config.privacy.hidden_cohort, config.federation.sampling
    if not config.secure_aggregation.enabled:
        wrong(
            config,
            "secure_aggregation.enabled",
            "true with privacy.noise = 'distributed'",
            "privacy.noise = 'distributed' adds a share of the noise at each client, which protects only their sum: set "
            "secure_aggregation.enabled = true, or privacy.noise = 'local'",
        )
    if sampling == "poisson" and not hidden:
        why = (
            "the server sees who takes part, so the random draw protects nobody; set privacy.hidden_cohort = true, with which "
            "each client decides by a secret coin of its own whether it trains"
        )
        refuse(config, "federation.sampling", "privacy.noise = 'distributed'", why)
    if sampling in ("fixed", "schedule") and hidden:
        contradicts = (
            "contradicts privacy.hidden_cohort = true, with which each client decides by a secret coin of its own"
        )
        message = f"federation.sampling = {sampling!r} {contradicts}"
        wrong(config, "federation.sampling", "privacy.hidden_cohort = true", message)


def _correlated(config: Sections) -> None:
    """Refuse correlated noise where the run is not a single Gaussian mechanism, or where no party can cancel earlier noise."""
    privacy = config.privacy
    for name, refused, why in (
        (
            "federation.sampling",
            config.federation.sampling not in ("auto", "schedule"),
            "its bound needs a known distance between a client's rounds; set federation.sampling = 'schedule'",
        ),
        (
            "privacy.noise",
            privacy.noise not in ("auto", "central"),
            "the clients of a round do not know the noise of earlier rounds, so cannot cancel it; set privacy.noise = "
            "'central'",
        ),
        (
            "privacy.clip_quantile",
            privacy.clip_quantile is not None,
            "noise that follows a changing clip norm does not cancel in sums, and the bound is for one norm; leave it out",
        ),
        (
            "method.transport_form",
            config.method.transport_form == "sketch",
            "the sketches of two rounds span different columns, so the noise of one does not cancel in the other; set "
            "method.transport_form = 'dense'",
        ),
    ):
        if refused:
            refuse(config, name, f"privacy.correlation = {privacy.correlation!r}", why)


def wrong(config: Sections, name: str, limit: str, message: str) -> NoReturn:
    """Raise `message` as an error about the setting `name`, whose value is beyond `limit`."""
    raise ConfigError(message, setting=name, value=value_of(config, name), limit=limit)


def refuse(config: Sections, name: str, beside: str, why: str) -> NoReturn:
    """Refuse a setting's value that another setting excludes."""
    wrong(config, name, beside, f"{name} = {value_of(config, name)!r} is refused with {beside}: {why}")
