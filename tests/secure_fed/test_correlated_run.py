"""Correlated noise over a whole run: against theory, across interruptions, and the secret keys it is drawn from."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy import stats

from privacy.correlation import Correlation, square_root
from privacy.entropy import SeededEntropy
from privacy.errors import LedgerError, PrivacyError, TurnPassed
from secure_fed.errors import RunDirectoryError, UsageError
from secure_fed.federation import Federation
from secure_fed.runs.noise_key import NOISE_KEY, NoiseKeys
from tests.cells import chosen, every
from tests.golden import refused
from tests.privacy.test_correlation import dense
from tests.secure_fed import private_toys
from tests.secure_fed.in_turn import BANDED, CLIP, IN_TURN, Killed, Matrix, federation, of_zeros, sums

UNLIKELY = 1e-4


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the operating system's random numbers the same in every test, so that no test fails by chance."""
    stream = SeededEntropy(3).stream("os")
    monkeypatch.setattr("privacy.entropy.os.urandom", lambda count: stream.words(-(-count // 8)).tobytes()[:count])


def white(rows: Matrix, made: Correlation, *, std: float = CLIP) -> Matrix:
    """The matrix C of the correlation times the releases, over `std`: independent standard normals in theory."""
    return dense(made, len(rows)) @ rows / std


def plausible(found: Matrix) -> float:
    """The least p-value of tests for independent standard normals: distribution, variance, correlation of two rounds."""
    rounds, count = found.shape
    squares = float(np.sum(found**2))
    size = 2 * min(stats.chi2.cdf(squares, found.size), stats.chi2.sf(squares, found.size))
    pairs = np.abs(np.corrcoef(found)[np.triu_indices(rounds, 1)]).max() * math.sqrt(count)
    return min(float(stats.kstest(found.flatten(), "norm").pvalue), size, 2 * stats.norm.sf(pairs) * rounds**2 / 2)


def noise(settings: dict[str, Any], seed: int | None = None) -> tuple[Federation, Matrix, list[float]]:
    """A run whose releases are pure noise: the federation, the releases, and the noise level given to its method each round."""
    built = federation({**BANDED, "federation.rounds": 12, **settings}, seed)
    _, watched = of_zeros(built)
    built.run()
    return built, sums(built, watched), [std for _, std in watched.seen]


@pytest.mark.parametrize("seed", chosen([None, 5], [None]), ids=lambda seed: "injected" if seed else "own keys")
def test_the_noise_over_all_rounds_has_the_covariance_of_theory(seed: int | None) -> None:
    """(z C)^2 (C^T C)^-1, with the plan's z; other scales, other bands and independent rounds are rejected."""
    built, steps, _ = noise({"federation.server_optimizer": "momentum", "federation.server_momentum": 0.5}, seed)
    rows = steps - 0.5 * np.concatenate([np.zeros_like(steps[:1]), steps[:-1]])
    plan = built.assembly.protection.plan
    assert plan is not None
    assert plan.correlation == square_root(3, 0.5)
    assert plausible(white(rows, plan.correlation)) > UNLIKELY
    for wrong in (2 / 3, 3 / 2):
        assert plausible(white(rows, plan.correlation, std=wrong * CLIP)) < 1e-12
    for other in (Correlation(), square_root(2, 0.5), square_root(6, 0.5)):
        assert plausible(white(rows, other)) < 1e-6


def test_what_a_method_is_told_of_the_noise_is_what_it_is() -> None:
    built, rows, told = noise({"federation.rounds": 6})
    expected = CLIP * np.sqrt(np.cumsum(square_root(3).weights(6) ** 2))
    np.testing.assert_allclose(np.array(told) * built.assembly.sampler.expected, expected)
    assert np.abs(rows.std(axis=1) / expected - 1).max() < 5 / math.sqrt(2 * rows.shape[1])


def test_epsilon_is_that_of_one_gaussian_release_and_holds_against_everybody_who_sees_cohorts() -> None:
    result = federation({**BANDED, "privacy.band": 5}).run()
    column = np.array(square_root(5).column)
    together = np.zeros(6)
    together[:5] += column
    together[3:] += column[:3]
    expected = get_epsilon_gaussian(1 / np.linalg.norm(together), 1e-3)
    assert result.summary["epsilon"] == result.summary["epsilon_participants"] == pytest.approx(expected)
    assert expected > 1.05 * get_epsilon_gaussian(1 / math.sqrt(2), 1e-3), "bands longer than the gap cost more"


# Interrupted and resumed.


def interrupted(built: Federation, path: Path, dies_in: int, resume: bool = False) -> Matrix:
    """The releases before the kill in round `dies_in`."""
    _, watched = of_zeros(built, dies_in)
    with pytest.raises(Killed):
        built.run(path, resume=resume)
    return sums(built, watched)


def resumed(settings: dict[str, Any], path: Path) -> tuple[Matrix, list[int], Any]:
    built = federation(settings)
    zeros, watched = of_zeros(built)
    result = built.run(path, resume=True)
    return sums(built, watched), [round_ for round_, _ in zeros.asked], result


def test_a_resumed_run_goes_on_with_the_very_same_noise(tmp_path: Path) -> None:
    """The run is killed in three rounds, which are lost; all others are rows of one C^-1 Z, with Z from the keys on disk."""
    settings, lost, rows = {**BANDED, "federation.rounds": 12}, (3, 7, 11), []
    for start, round_ in enumerate(lost):
        built = federation(settings)
        rows.append(interrupted(built, tmp_path / "run", round_, resume=start > 0))
    keys = NoiseKeys.from_bytes((tmp_path / "run" / "private" / NOISE_KEY).read_bytes())
    z = [keys.stream("sum", round_, "change") for round_ in range(12)]
    shapes = [shape for _, shape in built.assembly.server.layout(built.assembly.initial, "change").entries]
    drawn = np.array([np.concatenate([stream.normal(shape).ravel() for shape in shapes]) for stream in z])
    there = [round_ for round_ in range(12) if round_ not in lost]
    inverse = np.linalg.inv(dense(square_root(3), 12))[there]
    np.testing.assert_allclose(np.concatenate(rows), CLIP * inverse @ drawn, atol=1e-6)
    assert plausible(drawn) > UNLIKELY
    last, asked, result = resumed(settings, tmp_path / "run")
    assert (len(last), asked) == (0, [])
    assert ["lost" in record for record in result.records] == [round_ in lost for round_ in range(12)]
    assert private_toys.charged(tmp_path / "run") == 12


def test_no_key_makes_noise_of_two_rounds_and_each_start_has_its_own(tmp_path: Path) -> None:
    interrupted(federation(BANDED), tmp_path / "run", 2)
    path = tmp_path / "run" / "private" / NOISE_KEY
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    interrupted(federation(BANDED), tmp_path / "run", 4, resume=True)
    after = path.read_bytes()
    assert after.startswith(before[:36])  # the key; the check behind it is another
    assert [first for first, _ in NoiseKeys.from_bytes(after).starts] == [0, 3]
    resumed(BANDED, tmp_path / "run")
    assert not path.exists(), "erased at the end"
    keys = NoiseKeys.from_bytes(after)
    old, new = (one for _, one in keys.starts)
    for round_ in range(6):
        drawn = keys.stream("sum", round_, "change").words(4).tolist()
        assert drawn == (old if round_ < 3 else new).stream("sum", round_, "change").words(4).tolist()


def losing(settings: dict[str, Any], lost: set[int]) -> Federation:
    """A federation that loses these rounds before their charge, as a coordinator without its members does."""
    built = federation(settings)
    charge = built.assembly.server.charge

    def charged(round_: int, pass_name: str) -> None:
        if round_ in lost:
            raise TurnPassed("nobody is connected")
        charge(round_, pass_name)

    built.assembly = replace(built.assembly, server=replace(built.assembly.server, charge=charged))
    return built


def test_rounds_lost_before_their_charge_leave_past_noise_its_keys(tmp_path: Path) -> None:
    """Rounds 1 and 2 are lost before their charge, round 5 after it: the new key is for round 6, not for the fifth charge."""
    settings, path = {**BANDED, "federation.rounds": 8}, tmp_path / "run"
    interrupted(losing(settings, {1, 2}), path, 5)
    assert private_toys.charged(path) == 4
    interrupted(losing(settings, {7}), path, 6, resume=True)
    assert [first for first, _ in NoiseKeys.from_bytes((path / "private" / NOISE_KEY).read_bytes()).starts] == [0, 6]
    said = losing(settings, {7}).run(path, resume=True).summary
    assert federation(settings).run(path, resume=True).summary["releases"] == said["releases"] == 5


def test_a_directory_put_back_does_not_make_the_same_noise_twice(tmp_path: Path) -> None:
    """The ledger is put back too, so nothing shows that the round was made before; but the second noise differs."""
    settings = {**BANDED, "federation.rounds": 8}
    interrupted(federation(settings), tmp_path / "run", 3)
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    once, rounds, _ = resumed(settings, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "older", tmp_path / "run")
    twice, same, _ = resumed(settings, tmp_path / "run")
    assert rounds == same == [4, 5, 6, 7]
    apart = once - twice
    expected = CLIP * math.sqrt(2) * square_root(3).column[0] ** -1
    assert apart[0].std() == pytest.approx(expected, rel=0.3)


def _flipped(content: bytes) -> bytes:
    """The content with one bit of a key changed."""
    return content[:9] + bytes([content[9] ^ 1]) + content[10:]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its third round, which every test leaves as it is."""
    path = tmp_path_factory.mktemp("begun") / "run"
    interrupted(federation(BANDED), path, 2)
    return path


@contextmanager
def replaced(file: Path, content: bytes | None) -> Iterator[None]:
    """Another content of this file, or none."""
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    yield
    file.write_bytes(before)


@pytest.mark.parametrize(
    "content",
    [None, b"", bytes(35), bytes(37), NoiseKeys(()).begun(2).to_bytes(), _flipped(NoiseKeys(()).begun(0).to_bytes())],
    ids=["none", "empty", "short", "long", "begun late", "a flipped bit"],
)
def test_charges_without_keys_are_refused_in_one_sentence(begun: Path, content: bytes | None) -> None:
    with replaced(begun / "private" / NOISE_KEY, content), refused(RunDirectoryError):
        federation(BANDED).run(begun, resume=True)


def test_a_begun_run_without_its_record_of_turns_is_refused(begun: Path) -> None:
    with replaced(begun / "private" / "attendance", None), refused(LedgerError):
        federation(BANDED).run(begun, resume=True)


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [({"privacy.epsilon": 3.8, "privacy.on_exhausted": "stop"}, 3), ({"evaluation.patience": 1}, 2)],
    ids=["its budget", "its patience"],
)
def test_a_run_that_ended_early_can_be_asked_again_without_its_keys(
    tmp_path: Path, settings: dict[str, Any], rounds: int
) -> None:
    settings, still = {**BANDED, **settings}, {"metrics": lambda model, batches: {"accuracy": 0.5}}
    said = federation(settings, **still).run(tmp_path / "run").summary
    assert said["rounds"] == said["releases"] == rounds
    assert not (tmp_path / "run" / "private" / NOISE_KEY).exists()
    again = federation(settings, **still).run(tmp_path / "run", resume=True).summary
    assert (again["rounds"], again["epsilon"], again["ended_early"]) == (rounds, said["epsilon"], said["ended_early"])


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("federation.rounds", {"federation.rounds": 7}),
    ("federation.rounds", {"federation.rounds": 5}),
    ("federation.server_optimizer", {"federation.server_optimizer": "momentum"}),
    ("privacy.band", {"privacy.band": 2}),
    ("privacy.correlation", {"privacy.correlation": "none", "privacy.band": None}),
    ("federation.cohort", {"federation.cohort": 3}),
]


@every("setting, changed", CHANGES)
def test_another_length_momentum_band_or_order_is_refused_on_resume(
    begun: Path, setting: str, changed: dict[str, Any]
) -> None:
    """The noise keys on disk belong to the plan with which the run was started."""
    before = (begun / "private" / NOISE_KEY).read_bytes()
    with refused(UsageError):
        federation({**BANDED, **changed}).run(begun, resume=True)
    assert (begun / "private" / NOISE_KEY).read_bytes() == before


def test_nothing_is_released_outside_a_run() -> None:
    with refused(PrivacyError):
        private_toys.one_round(federation(BANDED))


def test_keys_do_not_show_themselves() -> None:
    keys = NoiseKeys(()).begun(0)
    assert keys.starts[0][1].key.hex() not in repr(keys) + repr(keys.starts[0][1])


def test_in_turn_without_correlation_needs_no_key(tmp_path: Path) -> None:
    interrupted(federation(IN_TURN), tmp_path / "run", 2)
    assert not (tmp_path / "run" / "private" / NOISE_KEY).exists()
    rows, asked, _ = resumed(IN_TURN, tmp_path / "run")
    assert asked == [3, 4, 5]
    assert plausible(rows / CLIP) > UNLIKELY
