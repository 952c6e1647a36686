"""The protection that is chosen where the settings leave it open, and other settings that follow from it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import PretrainedConfig

from privacy.forecast import Possible, Setting, in_turn
from privacy.mechanisms import Gaussian
from privacy.plan import Target
from secure_fed import Federation
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.architecture import width_of
from tests.secure_fed import small_models, toys

TARGET = {"privacy.unit": "client", "privacy.epsilon": 8.0, "privacy.delta": 1e-3, "federation.cohort": 2}
MASKED = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.0, "secure_aggregation.corrupt": 0.0}
OPEN = {"federation.server_optimizer": "auto", "federation.server_lr": None, "privacy.clip_norm": None}
OPEN |= {"federation.average_last": None}
NUMBERS = 2 * (6 + 8) + 2 * (8 + 8) + 3 * 9  # the numbers that toys train: rank-2 factors of two layers, and the head
AUTO = {"federation.sampling": "auto", "privacy.noise": "auto", "privacy.correlation": "auto"}


def way(**own: Any) -> tuple[str, str, str]:
    """(sampling, noise, correlation) as settled for TARGET, with all three open except where `own` sets them."""
    config = settled({**TARGET, **AUTO, **own})
    return config.federation.sampling, config.privacy.noise, config.privacy.correlation


@pytest.mark.parametrize("method", ["svd_adaptation", "fedara"])
def test_a_short_run_of_three_factors_gets_a_higher_rate(method: str) -> None:
    """Rate times steps is 0.8 at least, the rate at most four times that of a long run; privacy has a rule of its own."""

    def rate(**own: Any) -> float | None:
        usual = {"method.name": method, "training.lr": None, "federation.rounds": 10}
        return settled({**usual, **{name.replace("__", "."): value for name, value in own.items()}}).training.lr

    assert rate(training__steps=16) == rate(training__steps=1000) == 5e-3
    assert rate(training__steps=8) == pytest.approx(0.8 / 80)
    assert rate(training__steps=1) == pytest.approx(2e-2)
    # Eight clients of four examples: two batches of two or fewer in each of three epochs of each round.
    assert rate(training__steps=None, training__epochs=3, training__batch_size=2) == pytest.approx(0.8 / 60)
    assert rate(training__steps=8, method__name="fedlora") == 5e-3
    assert rate(training__steps=1, privacy__unit="client", privacy__noise_multiplier=1.0, privacy__delta=1e-3) == 2e-2


def test_a_rate_that_is_set_stays() -> None:
    assert settled({"method.name": "svd_adaptation", "training.steps": 1, "training.lr": 1e-3}).training.lr == 1e-3


def settled(settings: dict[str, Any], **more: Any) -> RunConfig:
    return toys.federation(settings, sizes=(4,) * 8, **more).config


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({}, ("schedule", "central", "banded")),
        (
            {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0, "federation.cohort": 4, **MASKED},
            ("schedule", "central", "banded"),
        ),
        ({"privacy.correlation": "none", "privacy.noise": "central"}, ("schedule", "central", "none")),
        ({"privacy.clip_quantile": 0.5}, ("schedule", "central", "none")),
        ({"method.name": "rolora"}, ("schedule", "central", "none")),
        ({"privacy.noise": "local"}, ("schedule", "local", "none")),
        ({"federation.sampling": "poisson"}, ("poisson", "central", "none")),
        ({"federation.sampling": "fixed"}, ("fixed", "central", "none")),
        (
            {"federation.cohort": 8},
            ("schedule", "central", "none"),
        ),  # every client has a turn in every round: there are no gaps for correlated noise
    ],
)
def test_what_is_left_open_is_settled(own: dict[str, Any], found: tuple[str, str, str]) -> None:
    assert way(**own) == found


def test_shares_are_taken_where_their_noise_is_small_behind_masks_alone() -> None:
    quiet = {"privacy.epsilon": 500.0, "federation.cohort": 4, "federation.rounds": 2}
    assert way(**quiet, **MASKED) == ("schedule", "distributed", "none")
    assert way(**quiet, **MASKED, **{"privacy.noise": "central"})[1] == "central"
    assert way(**quiet)[1] != "distributed"


def test_what_counts_on_coins_gets_them() -> None:
    own_coins = {"privacy.noise": "distributed", "privacy.hidden_cohort": True, "federation.cohort": 4}
    assert way(**own_coins, **MASKED) == ("poisson", "distributed", "none")
    assert settled({**TARGET, **AUTO}, mechanism=Gaussian).federation.sampling == "poisson"


def test_other_units_are_left_alone() -> None:
    example = {"privacy.unit": "example", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
    for settings in ({}, example):
        left = {"federation.server_lr": 1.0, "federation.server_optimizer": "mean", "federation.average_last": 1}
        config = toys.config({**left, **settings, **({"privacy.clip_norm": 1.0} if settings else {})})
        assert settled(settings) == config


@pytest.mark.parametrize(("unit", "batch"), [("none", 16), ("client", 256), ("example", 256)])
def test_a_batch_is_larger_where_noise_is_added(unit: str, batch: int) -> None:
    private = {} if unit == "none" else {"privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
    settings = {"privacy.unit": unit, **private, "training.batch_size": None}
    assert settled(settings).training.batch_size == batch
    assert settled({**settings, "training.batch_size": 3}).training.batch_size == 3


@pytest.mark.parametrize(
    ("unit", "schedule"), [("none", "stable_decay"), ("client", "constant"), ("example", "constant")]
)
def test_the_rate_falls_where_no_noise_is_added(unit: str, schedule: str) -> None:
    private = {} if unit == "none" else {"privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
    settings = {"privacy.unit": unit, **private, "training.lr_schedule": "auto"}
    assert settled(settings).training.lr_schedule == schedule
    assert settled({**settings, "training.lr_schedule": "cosine"}).training.lr_schedule == "cosine"


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({}, 3.0),
        ({"training.optimizer": "sgd"}, 1.0),
        ({"method.name": "head", "method.rank": 8}, 1.0),
        ({"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}, 1.0),
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
    assert found == [512, 512, None, None]


def test_a_factor_of_a_head_that_is_not_there_is_refused() -> None:
    assert settled({"training.head_factor": None}).training.head_factor == 1.0
    with pytest.raises(
        ConfigError, match=r"head_factor = 5 has no effect here: no head trains whose last layer is known"
    ):
        settled({"training.head_factor": 5.0})


def test_sgd_has_no_rate_of_its_own() -> None:
    assert settled({"training.optimizer": "sgd", "training.lr": 0.1}).training.lr == 0.1
    with pytest.raises(ConfigError, match=r"optimizer = 'sgd' needs training\.lr"):
        settled({"training.optimizer": "sgd", "training.lr": None})


@pytest.mark.parametrize(("width", "lr"), [(None, 5e-3), (128, 5e-3), (256, 5e-3), (512, 2.5e-3), (4096, 5e-3 / 16)])
@pytest.mark.parametrize(("unit", "longer"), [("none", 1), ("example", 4)])
def test_a_rate_that_is_left_open_goes_by_the_models_width(
    width: int | None, lr: float, unit: str, longer: int
) -> None:
    private = {} if unit == "none" else {"privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3}
    settings = {"privacy.unit": unit, **private, "training.lr": None}

    def found(**given: float) -> float | None:
        model = toys.Toy()
        if width is not None:
            model.config = PretrainedConfig(hidden_size=width)
        return settled({**settings, **given}, model=model).training.lr

    assert found() == pytest.approx(longer * lr)
    assert found(**{"training.lr": 0.3}) == 0.3


@pytest.mark.parametrize(("method", "times"), [("federa", 1 / 3), ("fedlora", 1.0)])
def test_a_rate_that_is_left_open_goes_by_the_kind_of_model(method: str, times: float) -> None:
    """FeDeRA's large start needs shorter steps where a model continues texts; other methods take their usual rate."""

    def found(*, decoder: bool) -> float | None:
        model: Any = toys.Toy()
        if decoder:
            model.get_output_embeddings = nn.Identity
        return settled({"method.name": method, "training.lr": None}, model=model).training.lr

    assert found(decoder=False) == 5e-3
    assert found(decoder=True) == pytest.approx(5e-3 * times)


def test_a_contribution_may_be_as_long_as_one_step_of_adam() -> None:
    steps = {"training.lr": 1e-3, "federation.cohort": 1}
    clip_norm = settled({**TARGET, **OPEN, **steps}).privacy.clip_norm
    assert clip_norm == pytest.approx(1e-3 * math.sqrt(NUMBERS))
    alone = toys.federation({**steps, "federation.rounds": 1}, sizes=(4,) * 8)
    step = alone.run().state.tensors - alone.assembly.initial.tensors
    assert 0.5 * clip_norm < step.norm() <= clip_norm * (1 + 1e-6)
    assert settled({**TARGET, **OPEN, **steps, "privacy.clip_norm": 0.5}).privacy.clip_norm == 0.5
    assert settled({**TARGET, **OPEN, **steps, "training.optimizer": "sgd"}).privacy.clip_norm == 1.0


@pytest.mark.parametrize("multiplier", [1e-3, 0.1, 1.0])
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


@pytest.mark.parametrize(
    "own",
    [{"method.name": "rolora"}, {"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 1}],
)
def test_rounds_that_cannot_be_added_up_get_no_momentum(own: dict[str, Any]) -> None:
    assert settled({**TARGET, **OPEN, **own}).federation.server_optimizer == "mean"


@pytest.mark.parametrize(
    ("own", "count"),
    [
        ({"federation.rounds": 20}, 5),
        ({}, 1),  # of three rounds
        ({"federation.rounds": 20, "federation.average_last": 2}, 2),
        ({"federation.rounds": 20, "training.optimizer": "sgd"}, 1),
        ({"federation.rounds": 20, "evaluation.patience": 3}, 1),
        ({"federation.rounds": 20, "privacy.on_exhausted": "stop"}, 1),
        ({"federation.rounds": 20, "method.name": "fedara"}, 1),
        ({"federation.rounds": 20, "privacy.unit": "example"}, 1),
    ],
)
def test_a_run_under_noise_ends_with_the_mean_of_the_last_quarter(own: dict[str, Any], count: int) -> None:
    assert settled({**TARGET, **OPEN, **own}).federation.average_last == count


def test_what_never_travels_has_no_part_in_the_steps() -> None:
    noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0, "privacy.correlation": "none"}
    config = settled({**TARGET, **OPEN, **noise, "training.lr": 0.1, "method.personal": ("classifier",)})
    travels = NUMBERS - 3 * 9
    assert config.privacy.clip_norm == pytest.approx(0.1 * math.sqrt(travels))
    assert config.federation.server_lr == pytest.approx(0.125 / (math.sqrt(travels / 3) / 2))


def test_a_mechanism_of_the_users_bounds_what_it_may() -> None:
    noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0, "federation.sampling": "poisson"}
    config = settled({**TARGET, **OPEN, **noise}, mechanism=Gaussian)
    assert (config.privacy.clip_norm, config.federation.server_optimizer, config.federation.server_lr) == (
        1.0,
        "mean",
        1.0,
    )


@pytest.mark.parametrize("own", [{"method.name": "rolora"}, {"training.optimizer": "sgd"}])
def test_a_momentum_that_nothing_reads_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"server_momentum = 0\.7 has no effect here, where the server takes the mean"
    ):
        settled({**TARGET, **OPEN, **own, "federation.server_momentum": 0.7})


@pytest.mark.parametrize(
    ("own", "noise", "correlation"),
    [
        ({}, "central", "none"),
        ({}, "central", "banded"),
        ({}, "local", "none"),
        (MASKED, "distributed", "none"),
    ],
)
def test_the_noise_that_the_server_goes_by_is_the_planners(own: dict[str, Any], noise: str, correlation: str) -> None:
    settings = {**TARGET, **own, "federation.sampling": "schedule", "federation.cohort": 4, "evaluation.phantoms": 0}
    federation = toys.federation(
        {**settings, "privacy.noise": noise, "privacy.correlation": correlation}, sizes=(4,) * 8
    )
    setting = Setting(8, 4, 3, 1e-3, dim=NUMBERS)
    ways = in_turn(setting, Target(8.0, None, 1e-3, stop_early=True), Possible(4 if own else 0))
    (share,) = (way.share(setting) for way in ways if (way.noise, way.correlation) == (noise, correlation))
    assert federation.assembly.protection.noise_over_way(4, NUMBERS, 3) == pytest.approx(share, rel=1e-6)
