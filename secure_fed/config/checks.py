"""Settings that require or exclude others, outside privacy: federation, partition of the data, answers, diagnostics,
phantoms."""

from __future__ import annotations

import re

from secure_fed.config import privacy_checks
from secure_fed.config.evaluation import DIAGNOSTICS, LOCAL_DIAGNOSTICS
from secure_fed.config.refusals import refuse, wrong
from secure_fed.config.sections import Sections
from secure_fed.errors import ConfigError


def together(config: Sections) -> None:
    """Refuse settings that contradict each other."""
    _federation(config)
    privacy_checks.check(config)
    if config.evaluation.phantoms and config.federation.weighting == "examples":
        why = "a phantom has no examples to be weighted by; set federation.weighting = 'uniform'"
        refuse(config, "evaluation.phantoms", "federation.weighting = 'examples'", why)
    _partition(config)
    _answers(config)
    _diagnostics(config)
    _device_map(config)
    _ranks(config)
    if config.training.lr_warmup >= config.federation.rounds:
        message = (
            f"training.lr_warmup is {config.training.lr_warmup}, not below federation.rounds = {config.federation.rounds}: "
            "lower it, or raise federation.rounds"
        )
        wrong(config, "training.lr_warmup", "below federation.rounds", message)


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
        ("evaluation.phantoms", bool(config.evaluation.phantoms), "phantoms are scored by sums; use 'mean'"),
        (
            "method.ranks",
            bool(config.method.ranks),
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
    except re.error as error:
        message = f"data.answer_pattern is {data.answer_pattern!r}, which is no regular expression: {error}; correct it"
        wrong(config, "data.answer_pattern", "a regular expression", message)


def _device_map(config: Sections) -> None:
    """Refuse a divided model under privacy of examples, and a memory that cannot be read."""
    if config.model.memory is not None and config.model.device_map and config.privacy.unit in ("example", "group"):
        why = (
            "that an example's gradient depends on no other is compared on one device with all of the model; use "
            "model.quantization, or protect clients"
        )
        refuse(config, "model.device_map", f"privacy.unit = {config.privacy.unit!r}", why)


def _ranks(config: Sections) -> None:
    """Refuse ranks of clients that cannot be read, or that the global adapter does not have."""
    method, limit = (
        config.method,
        f"NAME=RANK once for each client, with ranks from 1 to method.rank = {config.method.rank}",
    )
    try:
        wrong_ranks = [f"{name}={rank}" for name, rank in method.ranks_by_name.items() if not 1 <= rank <= method.rank]
    except ValueError as error:
        wrong_ranks = list(error.args)
    if wrong_ranks:
        wrong(
            config, "method.ranks", limit, f"method.ranks has the entry {wrong_ranks[0]!r:.80}, but it must be {limit}"
        )
    if method.ranks and method.double_rank:
        why = "double_rank compares methods at equal trained size; leave it out, and set method.rank"
        refuse(config, "method.ranks", "method.double_rank = true", why)


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
