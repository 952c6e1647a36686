"""A lying server: every attack works without defences, and is stopped by the documented ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from attacks.adversary.case import Inapplicable
from attacks.adversary.lying_server import LyingServer, Refused
from attacks.lying import lies
from attacks.lying.lies import Head
from attacks.lying.trials import LIES, Outcome, Table, audited, rate, tried
from secure_fed import Federation, RunConfig
from secure_fed.commands.cli import main
from secure_fed.tensors.tensors import Tensors
from tests.attacks.refusals import Capsys, facts_of, refusals
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import toys

BASE = (
    *("data.examples=80", "data.test_examples=200", "data.partition=iid", "federation.clients=20"),
    *("federation.cohort=5", "federation.rounds=20", "evaluation.audit_fraction=0", "method.name=fedlora"),
    *("model.max_length=48", "training.batch_size=8"),
)
FIXED = ("federation.sampling=fixed",)
SGD = ("training.optimizer=sgd", "training.lr=0.1")
NOISE = (
    *("privacy.unit=client", "privacy.epsilon=8", "privacy.clip_norm=0.5", "privacy.noise=local"),
    *("evaluation.dummies=0", "federation.sampling=poisson"),
)
MASKS = (*FIXED, "secure_aggregation.enabled=true")
EACH = 8


@cache
def federation(*settings: str) -> Federation:
    return Federation(RunConfig.load(None, [*BASE, *settings]))


@cache
def laid(settings: tuple[str, ...], round_: int, trusting: bool) -> Table:
    return Table.laid(LyingServer(federation(*settings).assembly, round_, trusting=trusting), EACH, seed=0)


def table(*settings: str, round_: int = 1, trusting: bool = False) -> Table:
    return replace(laid(settings, round_, trusting), rng=np.random.default_rng(1))


def crafted(one: Table) -> dict[str, Tensors]:
    limit = one.server.limit
    return {
        "traps": lies.traps(one.head, one.public_inputs, limit),
        "alarm": lies.alarm(one.head, one.inputs[0], one.public_inputs, limit),
        "dead": lies.dead(one.head),
        "flat": lies.flat(one.head, "adamw"),
    }


def recall(one: Table, held: list[int]) -> float:
    read, _ = one.answer(crafted(one)["traps"], held)
    names = lies.named(one.head, read, one.inputs, EACH, signs=one.adamw)
    return len(set(names) & set(held)) / EACH


@pytest.mark.parametrize("settings", chosen([(*FIXED, *SGD), FIXED], [(*FIXED, *SGD)], whole=True))
def test_traps_name_the_texts_of_a_batch_and_noise_stops_them(settings: tuple[str, ...]) -> None:
    one = table(*settings)
    assert np.mean([recall(one, one.deal()) for _ in range(2)]) > 0.8
    optimizer = SGD if SGD[0] in settings else ()
    noised = table(*NOISE, *optimizer)
    assert np.mean([recall(noised, noised.deal()) for _ in range(2)]) < 0.3


def test_a_row_of_a_trap_is_the_input_of_one_text() -> None:
    """By SGD the ratio of a row's change to its bias's is x, to the rounding of the crafted values in float32."""
    one = table(*FIXED, *SGD)
    held, tensors = one.deal()[:1], crafted(one)["traps"]
    read, _ = one.answer(tensors, held)
    w, b, _, _ = one.head.changes(read)
    loudest = int(b.abs().argmax())
    large = float(one.head.changes(tensors)[0][loudest].abs().max())
    lost = 2**-23 * large / float(b[loudest].abs())
    assert lost < 0.1 < float(one.inputs[held[0]].abs().max())
    torch.testing.assert_close(w[loudest] / b[loudest], one.inputs[held[0]], rtol=lost, atol=lost)


def test_a_unit_fires_for_the_target_alone() -> None:
    one = table(*FIXED)
    target, *others = one.deal()
    tensors = lies.alarm(one.head, one.inputs[target], one.public_inputs, one.server.limit)
    with_, without = (one.answer(tensors, held)[0] for held in ([target, *others[1:]], others))
    scores = [lies.score(one.head, read, one.inputs[target]) for read in (with_, without)]
    assert scores[0] > 1e3 * scores[1]


def test_membership_verdicts_keep_their_level_where_nothing_tells_members_from_others() -> None:
    """Exchangeable scores: of 20,000 verdicts 5 % are members, as many as the level allows."""
    rng = np.random.default_rng(0)
    alarms = [lies.is_member(row[0], list(row[1:])) for row in rng.normal(size=(20_000, lies.NULLS + 1))]
    assert lies.LEVEL == 0.05
    assert abs(np.mean(alarms) - lies.LEVEL) < 0.006


@pytest.mark.weekly
@pytest.mark.parametrize("settings", [FIXED, NOISE], ids=["open", "noise"])
def test_false_alarms_of_real_clients_keep_the_level(settings: tuple[str, ...]) -> None:
    """240 trials, in half of which the client does not hold the text: 6 alarms are due at most, 14 have a chance of 1/1000."""
    found = rate(tried(LIES["membership"], table(*settings), 240))
    assert found.quiet == 120
    assert found.false_alarms < 14


def test_dead_tensors_let_nothing_move_and_a_sum_that_compares_nothing_is_one_clients() -> None:
    one = table(*FIXED, *SGD)
    tensors = crafted(one)
    assert lies.moved(one.head, one.server.answer(0, tensors["dead"])) == 0.0
    held = one.deal()
    texts = [one.candidates[index] for index in held]
    alone = one.server.answer(0, tensors["traps"], texts)
    total = one.server.summed(range(5), tensors["dead"], {0: tensors["traps"]}, {0: texts})
    assert lies.moved(one.head, total - alone) < 1e-6 < lies.moved(one.head, alone)


@pytest.mark.parametrize("active", chosen(["false", "true"], ["true"]))
def test_masks_take_no_update_made_under_another_request(active: str) -> None:
    """The client that is told another state, in a session that fits it, is not in the sum, which is one too few."""
    one = table(*MASKS, f"secure_aggregation.active={active}", *SGD)
    tensors = crafted(one)
    told = {one.cohort[0]: tensors["traps"]}
    with refused(Refused):
        one.server.summed(one.cohort, tensors["dead"], told)
    same = one.server.summed(one.cohort, tensors["traps"])
    assert lies.moved(one.head, same) > 1e-3, "what everybody is told is summed"


@pytest.mark.nightly
def test_a_replay_is_the_answer_to_the_bit_and_noise_makes_it_a_guess() -> None:
    one = table(*FIXED)
    target, *rest = one.deal()
    honest = one.server.honest.select([])
    with_, without = ([one.candidates[index] for index in held] for held in ([target, *rest], rest))
    for own in (with_, without):
        answer = one.server.answer(3, honest, own)
        replays = [one.server.replayed(3, honest, texts) for texts in (with_, without)]
        assert answer.to_bytes() == replays[0 if own is with_ else 1].to_bytes()
        assert lies.has_text(answer, *replays) is (own is with_)
    assert not lies.has_text(replays[1], replays[1], replays[1]), "a tie is without"
    assert rate(tried(LIES["replay"], table(*FIXED), 6)).hits == 6
    assert rate(tried(LIES["replay"], table(*NOISE), 16)).hits < 16


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [(*FIXED, *SGD), FIXED], ids=["sgd", "adamw"])
def test_labels_are_counted_exactly_from_one_step_and_not_under_noise(settings: tuple[str, ...]) -> None:
    found = audited(LyingServer(federation(*settings).assembly), ["labels", "replay"], 6)
    assert [(cell["attack"], cell["hits"]) for cell in found["cells"]] == [("labels", 6), ("replay", 6)]
    assert rate(tried(LIES["labels"], table(*NOISE), 6)).hits < 3


@pytest.mark.nightly
def test_labels_of_steps_whose_rate_falls_are_counted_by_their_mean_rate() -> None:
    falls = ("training.steps=2", "training.head_factor=1", "training.lr_schedule=linear", "federation.rounds=2")
    one = table(*FIXED, *SGD, *falls)
    assert one.server.falling.as_long(2) == 1.5
    assert rate(tried(LIES["labels"], one, 8)).hits == 8, "6 by the full rate"


@pytest.mark.parametrize("which", chosen(["traps", "alarm", "dead", "flat"], ["traps"]))
def test_no_crafted_tensor_is_accepted_in_the_first_round(which: str) -> None:
    one = table(*FIXED, round_=0)
    with refused(Refused):
        one.server.answer(0, crafted(one)[which])
    one.server.answer(0, one.server.honest.select([]))
    table(*FIXED, round_=0, trusting=True).server.answer(0, crafted(one)[which])


def test_crafted_values_keep_to_the_limit_that_clients_accept() -> None:
    one = table(*FIXED, "federation.largest_value=1")
    for tensors in (crafted(one)[which] for which in ("traps", "alarm")):
        assert max(float(tensors.tensor(name).abs().max()) for name in tensors) <= 1.0
        one.server.answer(0, tensors)


def test_a_rate_counts_refusals_as_misses_and_members_alone() -> None:
    """An attack that accuses every client does not work."""
    outcomes = [Outcome(True, 0.1), Outcome(False, 0.1), Outcome(True, 0.1, quiet=True), Outcome(False, 0.0, "no")]
    found = rate(outcomes)
    assert (found.hits, found.of, found.refused, found.why, found.false_alarms, found.quiet) == (1, 3, 1, "no", 1, 1)
    assert found.guess == pytest.approx(0.1)
    assert 0 < found.interval[0] < 1 / 3 < found.interval[1] < 1
    assert not found.works
    members, others = [Outcome(True, 0.05)] * 4, [Outcome(True, 0.05, quiet=True)] * 4
    assert not rate(members + others).works
    assert rate(members + [Outcome(False, 0.05, quiet=True)] * 4).works, "the fewest trials are enough"
    assert lies.whole(torch.tensor([0.26, 0.26, 0.48]), 4).tolist() == [1, 1, 2], "whole numbers add up"
    assert lies.whole(torch.tensor([-1.0, 0.0, 0.0]), 4).sum() == 4


@pytest.mark.parametrize(
    "settings",
    [
        None,  # a model without a hidden layer in its head
        ("method.name=fedtt",),  # a train in the head
        ("method.name=fedtt_plus",),  # cores in turn
        ("method.name=fedlora", "method.personal=['classifier']"),
        ("method.name=fra_lora", "method.transport_form=sketch"),  # two passes
    ],
    ids=["no hidden layer", "train", "cores", "personal", "passes"],
)
def test_what_is_not_attacked_says_why(settings: tuple[str, ...] | None) -> None:
    of = toys.federation() if settings is None else federation(*settings)
    with refused(Inapplicable):
        server = LyingServer(of.assembly)
        Head.of(server, server.assembly.problem.test[0])


def test_the_command_tries_a_configuration(tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "run.toml"
    settings = [one.split("=") for one in BASE]
    file.write_text("\n".join(f"{name} = {text if text[0].isdigit() else repr(text)}" for name, text in settings))
    command = ["audit", "lying", str(file), "--trials", "8", "--attack"]
    found = facts_of([*command, "traps"], capsys)
    assert (found["round"], found["sees"], found["trials"]) == (2, "single updates", 8)
    (cell,) = found["cells"]
    assert cell["hits"] >= 4
    assert cell["works"]
    assert main([*command, "labels", "--fail-above", "rate=0.5"]) == 4
    said = capsys.readouterr()
    assert "all counts are right in 100% of 8 trials" in " ".join(said.out.split())
    assert "a rate of 1.00 is above --fail-above rate=0.5" in said.err


def test_attacks_that_do_not_apply_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """Otherwise a pipeline with --fail-above would pass without a trial."""

    def unlabelled(_: object) -> int:
        raise Inapplicable("the attack counts labels")

    monkeypatch.setattr("attacks.lying.trials._label", unlabelled)
    monkeypatch.setattr("attacks.lying.command._server", lambda *_: LyingServer(federation(*FIXED).assembly))
    (configuration := tmp_path / "run.toml").touch()
    asked = ["audit", "lying", str(configuration), "--trials", "8"]
    wrong = (["--attack", "lira"], ["--trials", "1"], ["--fail-above", "auc=0.6"])
    refusals("lying", [*([*asked, *more] for more in wrong), [*asked, *["--attack", "labels"] * 2]], capsys)
    monkeypatch.setattr("attacks.lying.trials.LIES", {"labels": LIES["labels"]})
    assert main([*asked, "--fail-above", "rate=1"]) == 5, "nor without --attack"
    assert "none of the attacks applies here" in capsys.readouterr().err
