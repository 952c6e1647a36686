"""Settings that are left open: the protection that is chosen, what follows from it, and how many numbers methods release."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import PretrainedConfig

from privacy.forecast import Possible, Setting, in_turn, recommended
from privacy.mechanisms import Gaussian
from privacy.plan import Target
from secure_fed import Federation
from secure_fed.commands.budget_methods import spaces
from secure_fed.commands.budget_plan import show_methods
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.architecture import width_of
from secure_fed.learning.tasks import TASKS
from secure_fed.methods import METHODS, catalogue
from secure_fed.report.terminal import PlainConsole
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.methods.test_catalogue import DEBERTA, decoder, described

TARGET = {"privacy.unit": "client", "privacy.epsilon": 8.0, "privacy.delta": 1e-3, "federation.cohort": 2}
MASKED = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.0, "secure_aggregation.corrupt": 0.0}
OPEN = {"federation.server_optimizer": "auto", "federation.server_lr": None, "privacy.clip_norm": None}
OPEN |= {"federation.average_last": None}
NUMBERS = 2 * (6 + 8) + 2 * (8 + 8) + 3 * 9  # the numbers that toys train: rank-2 factors of two layers, and the head
AUTO = {"federation.sampling": "auto", "privacy.noise": "auto", "privacy.correlation": "auto"}
PRIVATE = {"privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
CLIENT, EXAMPLE = ({"privacy.unit": unit, **PRIVATE} for unit in ("client", "example"))
QUIET = {"privacy.epsilon": 500.0, "federation.cohort": 4, "federation.rounds": 2}
STOPS = {**TARGET, "privacy.noise_multiplier": None, "privacy.on_exhausted": "stop"}
# Rounds that cannot be added up get no momentum.
SKETCHED = {"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 1}
UNADDED: tuple[dict[str, Any], ...] = ({"method.name": "rolora"}, SKETCHED)
TWENTY = {**CLIENT, "federation.cohort": 2, **OPEN, "federation.rounds": 20}


def way(**own: Any) -> tuple[str, str, str]:
    """(sampling, noise, correlation) as settled for TARGET, with all three open except where `own` sets them."""
    config = settled({**TARGET, **AUTO, **own})
    return config.federation.sampling, config.privacy.noise, config.privacy.correlation


@every("method", ["svd_adaptation", "fedara"])
def test_a_short_run_of_three_factors_gets_a_higher_rate(method: str) -> None:
    """Rate times steps is 0.8 at least, the rate at most four times that of a long run; privacy has a rule of its own."""

    def rate(steps: int | None, **own: Any) -> float | None:
        usual = {"method.name": method, "training.lr": None, "federation.rounds": 10, "training.steps": steps}
        return settled({**usual, **own}).training.lr

    assert rate(16) == rate(1000) == 5e-3
    assert rate(8) == pytest.approx(0.8 / 80)
    assert rate(1) == pytest.approx(2e-2)
    # Eight clients of four examples: two batches of two or fewer in each of three epochs of each round.
    assert rate(None, **{"training.epochs": 3, "training.batch_size": 2}) == pytest.approx(0.8 / 60)
    assert rate(8, **{"method.name": "fedlora"}) == 5e-3
    assert rate(1, **CLIENT) == 2e-2
    assert rate(1, **{"training.lr": 1e-3}) == 1e-3


def settled(settings: dict[str, Any], **more: Any) -> RunConfig:
    return toys.federation(settings, sizes=(4,) * 8, **more).config


@every(
    ("own", "found"),
    [
        ({}, ("schedule", "central", "banded")),
        ({"privacy.epsilon": None, **PRIVATE, "federation.cohort": 4, **MASKED}, ("schedule", "central", "banded")),
        ({"privacy.correlation": "none", "privacy.noise": "central"}, ("schedule", "central", "none")),
        ({"privacy.clip_quantile": 0.5}, ("schedule", "central", "none")),
        ({"method.name": "rolora"}, ("schedule", "central", "none")),
        ({"privacy.noise": "local"}, ("schedule", "local", "none")),
        ({"federation.sampling": "poisson"}, ("poisson", "central", "none")),
        ({"federation.sampling": "fixed"}, ("fixed", "central", "none")),
        # Every client has a turn in every round: there are no gaps for correlated noise.
        ({"federation.cohort": 8}, ("schedule", "central", "none")),
        # Shares are taken where their noise is small, behind masks alone.
        ({**QUIET, **MASKED}, ("schedule", "distributed", "none")),
        ({**QUIET, **MASKED, "privacy.noise": "central"}, ("schedule", "central", "banded")),
        (QUIET, ("schedule", "central", "banded")),
        (
            {**MASKED, "privacy.noise": "distributed", "privacy.hidden_cohort": True, "federation.cohort": 4},
            ("poisson", "distributed", "none"),
        ),
    ],
)
def test_what_is_left_open_is_settled(own: dict[str, Any], found: tuple[str, str, str]) -> None:
    assert way(**own) == found


def test_shares_are_taken_where_their_noise_is_small_behind_masks_alone() -> None:
    quiet = {"privacy.epsilon": 500.0, "federation.cohort": 4, "federation.rounds": 2}
    assert way(**quiet, **MASKED) == ("schedule", "distributed", "none")
    assert way(**quiet, **MASKED, **{"privacy.noise": "central"})[1] == "central"
    assert way(**quiet)[1] != "distributed"


def test_other_units_are_left_alone() -> None:
    for settings in ({}, EXAMPLE):
        left = {"federation.server_lr": 1.0, "federation.server_optimizer": "mean", "federation.average_last": 1}
        config = toys.config({**left, **settings, **({"privacy.clip_norm": 1.0} if settings else {})})
        assert settled(settings) == config


@every(
    ("setting", "beside", "found"),
    [
        *(("training.batch_size", beside, batch) for beside, batch in (({}, 16), (CLIENT, 256), (EXAMPLE, 256))),
        ("training.lr_schedule", {}, "stable_decay"),
        *(("training.lr_schedule", beside, "constant") for beside in (CLIENT, EXAMPLE)),
        ("federation.average_last", TWENTY, 5),
        *(
            ("federation.average_last", {**TWENTY, **beside}, 1)
            for beside in (
                *({"federation.rounds": 3}, {"training.optimizer": "sgd"}, {"method.name": "fedara"}),
                *({"privacy.unit": "example"}, {"evaluation.patience": 3}, STOPS),
            )
        ),
        ("privacy.clip_norm", {**TWENTY, "training.optimizer": "sgd"}, 1.0),
        *(("federation.server_optimizer", {**TWENTY, **beside}, "mean") for beside in UNADDED),
        ("training.head_factor", {}, 1.0),
    ],
)
def test_a_setting_that_is_left_open_is_settled(setting: str, beside: dict[str, Any], found: object) -> None:
    """A batch is larger and the rate constant under noise, and a run then ends with the mean of the last quarter."""
    left = "auto" if setting in ("training.lr_schedule", "federation.server_optimizer") else None
    section, name = setting.split(".")
    assert getattr(getattr(settled({**beside, setting: left}), section), name) == found


def test_settings_that_are_set_stay() -> None:
    own = {"training.batch_size": 3, "training.lr_schedule": "cosine", "training.head_factor": 1.0}
    own |= {"federation.average_last": 2, "federation.server_optimizer": "mean", "privacy.clip_norm": 0.5}
    config = settled({**TWENTY, **own})
    assert config == config.replace({tuple(name.split(".", 1)): value for name, value in own.items()})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({}, 3.0),
        ({"training.optimizer": "sgd"}, 1.0),
        ({"method.name": "head", "method.rank": 8}, 1.0),
        (CLIENT, 1.0),
    ],
)
def test_the_last_layer_takes_longer_steps_where_nobody_is_protected(more: dict[str, Any], factor: float) -> None:
    def found(width: int = 257, **own: Any) -> float | None:
        config = toys.config({"training.head_factor": None, "method.modules_to_save": (), **more, **own})
        train = [toys.examples(client, 4) for client in range(8)]  # not read in this test
        model = small_models.make("bert")
        model.config.hidden_size = width  # stands for another model
        return Federation(config, model=model, train=train, test=train[0]).config.training.head_factor

    assert found() == factor
    assert found(256) == 1.0
    assert found(**{"training.head_factor": 5.0}) == 5.0


def test_the_width_is_that_of_the_part_for_texts() -> None:
    text = SimpleNamespace(hidden_size=512)
    of_parts = SimpleNamespace(get_text_config=lambda: text, vision=SimpleNamespace(hidden_size=64))
    by_stage = SimpleNamespace(hidden_size=(64, 128))
    found = [width_of(each) for each in (of_parts, text, by_stage, None)]
    assert found == [512, 512, None, 0], "0 is a module without a configuration"


@every(
    ("width", "beside", "lr"),
    [
        *((width, {}, 5e-3) for width in (None, 128, 256)),
        (512, {}, 2.5e-3),
        (4096, EXAMPLE, 4 * 5e-3 / 16),
        (None, EXAMPLE, 4 * 5e-3),
        *(("decoder", {"method.name": name}, 5e-3 * times) for name, times in (("federa", 1 / 3), ("fedlora", 1.0))),
    ],
)
def test_a_rate_that_is_left_open_goes_by_the_model(width: int | str | None, beside: dict[str, Any], lr: float) -> None:
    """By its width; and FeDeRA's large start needs shorter steps where a model continues texts."""

    def found(rate: float | None) -> float | None:
        model: Any = toys.Toy()
        if width == "decoder":
            model.get_output_embeddings = nn.Identity
        elif width is not None:
            model.config = PretrainedConfig(hidden_size=width)
        return settled({**beside, "training.lr": rate}, model=model).training.lr

    assert found(None) == pytest.approx(lr)
    assert found(0.3) == 0.3


def test_a_contribution_may_be_as_long_as_one_step_of_adam() -> None:
    steps = {"training.lr": 1e-3, "federation.cohort": 1}
    clip_norm = settled({**TARGET, **OPEN, **steps}).privacy.clip_norm
    assert clip_norm == pytest.approx(1e-3 * math.sqrt(NUMBERS))
    alone = toys.federation({**steps, "federation.rounds": 1}, sizes=(4,) * 8)
    step = alone.run().state.tensors - alone.assembly.initial.tensors
    assert 0.5 * clip_norm < step.norm() <= clip_norm * (1 + 1e-6)


@every("multiplier", [1e-3, 0.1, 1.0])
def test_the_server_goes_far_where_the_noise_lets_it(multiplier: float) -> None:
    noise = {"privacy.epsilon": None, "privacy.noise_multiplier": multiplier}
    settings = {**TARGET, **OPEN, **noise, "privacy.noise": "central", "privacy.correlation": "none"}
    share = multiplier * math.sqrt(NUMBERS / 3) / 2  # for three rounds with two clients each

    def server(**own: Any) -> tuple[str, float | None, float]:
        federation = settled({**settings, **own}).federation
        assert federation.server_lr is not None
        return federation.server_optimizer, federation.server_momentum, federation.server_lr

    assert server() == ("momentum", 0.5, pytest.approx(min(1.6, 0.125 / share)))
    assert server(**{"federation.server_momentum": 0.75}) == ("momentum", 0.75, pytest.approx(min(0.8, 0.0625 / share)))
    assert server(**{"federation.server_optimizer": "mean"}) == ("mean", None, pytest.approx(min(1.6, 0.25 / share)))
    assert server(**{"federation.server_optimizer": "adam"}) == ("adam", 0.9, 0.01)
    assert server(**{"federation.server_lr": 7.0}) == ("momentum", 0.5, 7.0)
    assert server(**{"training.optimizer": "sgd"}) == ("mean", None, 1.0)


def test_what_never_travels_has_no_part_in_the_steps() -> None:
    noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0, "privacy.correlation": "none"}
    config = settled({**TARGET, **OPEN, **noise, "training.lr": 0.1, "method.personal": ("classifier",)})
    travels = NUMBERS - 3 * 9
    assert config.privacy.clip_norm == pytest.approx(0.1 * math.sqrt(travels))
    assert config.federation.server_lr == pytest.approx(0.125 / (math.sqrt(travels / 3) / 2))


def test_a_mechanism_of_the_users_counts_on_coins_and_bounds_what_it_may() -> None:
    config = settled(
        {**TARGET, **OPEN, **AUTO, "privacy.epsilon": None, "privacy.noise_multiplier": 1.0}, mechanism=Gaussian
    )
    server = config.federation
    assert (server.sampling, config.privacy.clip_norm) == ("poisson", 1.0)
    assert (server.server_optimizer, server.server_lr) == ("mean", 1.0)


@every(
    ("setting", "settings"),
    [
        ("training.head_factor", {"training.head_factor": 5.0}),  # of a head that is not there
        ("training.lr", {"training.optimizer": "sgd", "training.lr": None}),
        *(
            ("federation.server_momentum", {**TWENTY, **own, "federation.server_momentum": 0.7})
            for own in ({"method.name": "rolora"}, {"training.optimizer": "sgd"})
        ),
    ],
)
def test_a_setting_that_nothing_reads_or_that_is_missing_is_refused(setting: str, settings: dict[str, Any]) -> None:
    with refused(ConfigError, setting):
        settled(settings)


@pytest.mark.parametrize(
    ("own", "noise", "correlation"),
    [({}, "central", "none"), ({}, "central", "banded"), ({}, "local", "none"), (MASKED, "distributed", "none")],
)
def test_the_noise_that_the_server_goes_by_is_the_planners(own: dict[str, Any], noise: str, correlation: str) -> None:
    settings = {**TARGET, **own, "federation.sampling": "schedule", "federation.cohort": 4, "evaluation.dummies": 0}
    settings |= {"privacy.noise": noise, "privacy.correlation": correlation}
    federation = toys.federation(settings, sizes=(4,) * 8)
    setting = Setting(8, 4, 3, 1e-3, dim=NUMBERS)
    ways = in_turn(setting, Target(8.0, None, 1e-3, stop_early=True), Possible(4 if own else 0))
    (share,) = (way.share(setting) for way in ways if (way.noise, way.correlation) == (noise, correlation))
    assert federation.assembly.protection.noise_over_way(4, NUMBERS, 3) == pytest.approx(share, rel=1e-6)


SETTING = Setting(clients=5000, cohort=250, rounds=20, delta=1e-5)


def test_release_spaces_are_counted_on_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers with adapters on two matrices of 64 x 64 each; a head of 64 x 2 and a pooler of 64 x 64, with biases."""
    names = ("ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "prefix_tuning")
    monkeypatch.setattr(catalogue, "METHODS", {name: METHODS[name] for name in names})
    wide = {**DEBERTA, "hidden_size": 64, "pooler_hidden_size": 64}
    target = Target(8.0, None, 1e-5)
    rows = list(spaces(described(tmp_path / "model", wide), "model", SETTING, target, Possible()))
    found = {row.method: row for row in rows}
    assert set(found) == {"ffa_lora", "rolora", "fra_lora", "fra_then_ffa"}, (
        "there are no prefixes here, and sketches are wider than 64"
    )
    head = 64 * 2 + 2 + 64 * 64 + 64
    pooled = spaces(str(tmp_path / "model"), "mean", SETTING, target, Possible())
    assert {row.numbers - found[row.method].numbers for row in pooled} == {64 * 2 + 2 - head}, "the pooler is gone"
    rank = RunConfig().method.rank
    assert found["ffa_lora"].numbers == 4 * 64 * rank + head
    assert found["fra_lora"].numbers == 4 * (2 * 64 * rank - rank * rank) + head
    assert found["fra_then_ffa"].numbers == found["fra_lora"].numbers
    assert (found["ffa_lora"].correlation, found["rolora"].correlation) == ("banded", "none")
    assert [row.length for row in rows] == sorted(row.length for row in rows)
    for row in rows:
        own = replace(SETTING, dim=row.numbers, cohort=row.longer_below or 0)
        share = recommended(own, target, Possible(correlated=row.correlation == "banded")).share(own)
        assert share is not None
        assert 0.9 < share <= 1
    show_methods(PlainConsole(), "this", rows)
    out = capsys.readouterr().out
    assert all(f"{row.numbers:,}" in out for row in rows)


@pytest.mark.parametrize("task", chosen([task for task in TASKS if task != "classification"], ["causal_lm"]))
def test_the_noise_of_every_task_is_measured(
    task: str,
    tmp_path: Path,
    small_model: Path,
    small_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For a language model, no head is counted, and chance is that of its vocabulary."""
    monkeypatch.setattr(catalogue, "METHODS", {"ffa_lora": METHODS["ffa_lora"]})
    decodes = task in ("multiple_choice", "chat", "causal_lm")
    model = decoder(tmp_path / "llama", small_tokenizer) if decodes else small_model
    (row,) = spaces(str(model), "model", SETTING, Target(8.0, None, 1e-5), Possible(), task=task)
    assert row.noise_alone is not None
    assert row.noise_alone["start"] is not None
    show_methods(PlainConsole(), "this", [row])
    assert "chance" in capsys.readouterr().out
    if task == "causal_lm":
        assert row.numbers == RunConfig().method.rank * (16 + 8), "B of the projections to queries and values"
        assert row.noise_alone["chance"] == pytest.approx(math.log(len(small_tokenizer)), rel=1e-4)
