"""Under client-level privacy, no bit of a client's training depends on other clients, threads or devices."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate
from transformers import BertConfig, BertForSequenceClassification

from privacy.entropy import SeededEntropy
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.per_example import EachOwn, NoRuleError, SmallProductsApart
from secure_fed.learning.models.dropout_and_checkpointing import OwnDropout
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import parallel, trainings
from secure_fed.learning.training.common_passes.packing import Room
from secure_fed.learning.training.common_passes.parallel import copies_on
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import PrivateSteps, Trained
from secure_fed.learning.training.objective import Objective
from secure_fed.rounds.transport import InProcess
from secure_fed.runs import assembly
from tests.cells import chosen, every
from tests.contracts import runs as contracts
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.masked.lying import request_of
from tests.secure_fed.privately import Noted
from tests.secure_fed.test_cohort import USUAL, Setting, adapted, require_equal, toy

SIZES = (9, 4, 1, 6, 7, 5)
SETTINGS = replace(USUAL, epochs=1)


def texts(seed: int, count: int) -> list[dict[str, Any]]:
    """Texts of 2 to 40 words."""
    rng = np.random.default_rng([7, seed])
    lengths = rng.integers(2, 40, count)
    return [{"input_ids": rng.integers(2, small_models.VOCABULARY, n), "labels": int(rng.integers(3))} for n in lengths]


def trained(setting: Setting, rows: Sequence[int], *, public: bool, ways: Ways | None = None) -> list[bytes]:
    """The digests of the trained tensors of the jobs of these rows, trained together."""
    jobs = setting.jobs(SIZES, settings=SETTINGS)
    jobs = [replace(job, examples=texts(row, SIZES[row])) for row, job in enumerate(jobs)]
    found = train_together(setting.objective, [jobs[row] for row in rows], ways or Ways(), public=public)
    return [hashlib.sha256(one.after.to_bytes()).digest() for one in found]


def wide_model() -> nn.Module:
    """A BERT of a width at which the summation order in matrix products changes bits."""
    config = BertConfig(
        **{"vocab_size": small_models.VOCABULARY, "max_position_embeddings": 64, "num_labels": 3},
        **{"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def wide() -> Setting:
    return adapted(wide_model())


@pytest.fixture(scope="module")
def bert() -> Setting:
    return wide()


@pytest.mark.parametrize("mixes", chosen([True, False], [False]))
def test_who_else_trains_moves_no_bit(bert: Setting, mixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients share passes of public shapes, or with a larger model none."""
    monkeypatch.setattr(Room, "mixes", mixes)
    everybody = trained(bert, range(6), public=True)
    assert trained(bert, [3, 0], public=True) == [everybody[3], everybody[0]]
    assert trained(bert, [4], public=True) == [everybody[4]]


@pytest.mark.gpu
@pytest.mark.parametrize("public", [True, False])
def test_who_else_trains_moves_no_bit_on_a_gpu_either(public: bool) -> None:
    device = torch.device("cuda")
    model = wide_model()
    setting = adapted(model)
    setting = replace(setting, objective=Objective(model.to(device), classification.loss, device))
    everybody = trained(setting, range(6), public=public)
    assert (trained(setting, [3, 0], public=public) == [everybody[3], everybody[0]]) == public


def test_tight_passes_would_move_bits(bert: Setting) -> None:
    """Shows that the test above can fail."""
    everybody = trained(bert, range(6), public=False)
    assert trained(bert, [3, 0], public=False) != [everybody[3], everybody[0]]


@pytest.mark.parametrize(
    ("public_texts", "private"), chosen([(0, False), (3, False), (0, True), (3, True)], [(3, True)])
)
def test_no_clients_data_decide_how_the_others_train(public_texts: int, private: bool) -> None:
    """A collate function of the user's own, for which nothing can be made up. In a trial on the largest client's texts, a loss
    that is not finite made all clients train in turn, with other bits.
    """

    def rows(seed: int, count: int, weight: float = 1.0) -> list[dict[str, Any]]:
        own = [one | {"input_ids": torch.tensor(one["input_ids"][:1]).repeat(12)} for one in texts(seed, count)]
        return [one | {"weight": torch.tensor(weight, dtype=torch.bfloat16)} for one in own]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return batch["weight"] * classification.loss(model, {name: batch[name] for name in ("input_ids", "labels")})

    def after(weight: float) -> list[bytes]:
        setting, ways = adapted(wide_model().bfloat16(), loss), Ways()
        setting.objective.public = rows(99, public_texts)
        jobs = setting.jobs((9, 8, 8), settings=SETTINGS, collate=default_collate)
        jobs = [replace(job, examples=rows(row, 9 - row, 1.0 if row else weight)) for row, job in enumerate(jobs)]
        if private:
            steps = [PrivateSteps(Noted(1.0), 1.0, 1, SeededEntropy(row).stream("s")) for row in range(3)]
            jobs = [replace(job, private=own) for job, own in zip(jobs, steps, strict=True)]
        found = train_together(setting.objective, jobs, ways, public=True)
        assert bool(ways.why_not) != bool(public_texts), "in common passes if there are public texts"
        return [one.after.to_bytes() for one in found[1:]]

    assert after(float("nan")) == after(1.0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("public", "dropout"), chosen([(False, 0.0), (True, 0.0), (False, 0.3)], [(False, 0.0), (False, 0.3)])
)
def test_threads_move_no_bit(public: bool, dropout: float) -> None:
    setting = wide()
    for module in setting.objective.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    alone = trained(setting, range(3), public=public)
    with threads(2):
        assert trained(setting, range(3), public=public) == alone
    assert len(setting.objective.copies) == 2


def test_dropout_in_place_changes_its_input() -> None:
    x = torch.ones(100)
    with OwnDropout(0, torch.device("cpu")):
        functional.dropout(x, 0.5, True, True)
    assert set(x.tolist()) == {0.0, 2.0}


def test_dropout_is_noticed_after_an_evaluation() -> None:
    """Otherwise dropout would be drawn from the process's generator, and no run could be repeated."""
    setting, ways = toy(dropout=0.5), Ways()
    setting.objective.eval()
    train_together(setting.objective, setting.jobs(SIZES, settings=SETTINGS), ways)
    assert [trial.dropout for trial in ways.trials.values()] == [True]


def test_a_model_whose_copy_works_on_the_first_one_is_not_spread() -> None:
    """A copy of `toy`'s model has a `forward` that still calls the `forward` of the first model."""
    setting, ways = toy(), Ways()
    with threads(2):
        together, alone = setting.both(replace(USUAL, optimizer="sgd", lr=0.1), ways)
    assert [(trial.why_not, trial.copies) for trial in ways.trials.values()] == [("", False)]
    require_equal(together, alone)


@pytest.mark.nightly
def test_an_error_in_a_pass_comes_out_and_threads_end(monkeypatch: pytest.MonkeyPatch, bert: Setting) -> None:
    made: list[parallel.Crew] = []
    close = parallel.Crew.close
    monkeypatch.setattr(parallel.Crew, "close", lambda own: (made.append(own), close(own)))
    monkeypatch.setattr(trainings, "found_in", lambda *given: 1 / 0)
    with threads(2), pytest.raises(ZeroDivisionError):
        trained(bert, range(6), public=False)
    assert len(made) == 1


def contributions(built: Any, clients: Sequence[int]) -> dict[int, bytes]:
    """The contributions of these clients to the first pass, requested together."""
    transport, request = built.assembly.transport, request_of(built, lr=built.assembly.config.training.lr)
    assert isinstance(transport, InProcess)
    assert transport.at_once > 1
    replies = transport.exchange(dict.fromkeys(clients, request))
    return {reply.client: reply.contribution.to_bytes() for reply in replies}


def test_a_contribution_under_client_privacy_is_the_clients_own_to_the_bit() -> None:
    def built() -> Federation:
        own = {"training.batch_size": 16, "training.together": 64, "federation.sampling": "poisson"}
        config = contracts.settings("ffa_lora", "client", **own)
        train = [
            [{**one, "input_ids": one["input_ids"][:8]} for one in texts(row, SIZES[row])] for row in range(6)
        ]  # of few widths, since each width is tried out
        return Federation(config, model=wide_model(), train=train, test=texts(9, 2), entropy=SeededEntropy(1))

    everybody = contributions(built(), range(6))
    assert contributions(built(), [0, 3]) == {0: everybody[0], 3: everybody[3]}


def test_trained_ahead_for_another_request_is_not_used() -> None:
    built = toys.federation()
    client, request, initial = built.assembly.clients[0], request_of(built, lr=0.05), built.assembly.initial
    still = Trained(initial.tensors.select(built.assembly.server.plan(initial).trainable), 0.0)
    right = client.handle(request).contribution.to_bytes()
    client.train_ahead(replace(request, lr=0.1), still)
    assert client.handle(request).contribution.to_bytes() == right
    client.train_ahead(request, still)
    assert client.handle(request).contribution.norm() == 0, "and what is for it is"


GENERATOR = np.random.default_rng(0)


def drawn(*shape: int) -> Tensor:
    return torch.from_numpy(GENERATOR.normal(size=shape)).requires_grad_()


@every("between, per_example, apart", itertools.product([(), (5,), (2, 5)], [1, 3], [False, True]))
def test_every_rule_is_that_of_one_example_at_a_time(between: tuple[int, ...], per_example: int, apart: bool) -> None:
    x, ids = (
        drawn(4 * per_example, *between, 6),
        torch.from_numpy(GENERATOR.integers(0, 7, (4 * per_example, *between))),
    )
    weight, turned, bias, scale = stacks = drawn(4, 7, 6), drawn(4, 6, 7), drawn(4, 7), drawn(4, 6)

    def require(compute: Callable[..., Tensor], *parts: Tensor) -> None:
        """The same losses and gradients for the values of each example as for each example by itself."""
        own = [any(part is stack for stack in stacks) for part in parts]
        with SmallProductsApart(4) if apart else nullcontext():
            found = compute(x, ids, *(EachOwn.of(part) if of else part for part, of in zip(parts, own, strict=True)))
        each = (
            compute(x.chunk(4)[i], ids.chunk(4)[i], *(p[i] if of else p for p, of in zip(parts, own, strict=True)))
            for i in range(4)
        )
        expected = torch.cat(list(each))
        torch.testing.assert_close(found, expected)
        up, into = torch.cos(torch.arange(found.numel()).double()).view_as(found), (x, *stacks)
        gradients = (torch.autograd.grad(y, into, up, True, materialize_grads=True) for y in (found, expected))
        torch.testing.assert_close(*gradients)

    for parts in ((weight, bias), (weight, bias[0]), (weight[0], bias), (weight,)):
        require(lambda x, ids, *parts: functional.linear(x, *parts), *parts)
    for w, b in ((turned, bias), (turned, bias[0]), (turned[0], bias)):
        require(lambda x, ids, w, b: torch.addmm(b, x.flatten(0, -2), w), w, b)
    for row in (None, 0, -1):  # the word whose row does not train
        require(lambda x, ids, w, row=row: functional.embedding(ids, w, row), weight)
    for w, b in ((scale, scale), (scale, None), (scale, scale[0]), (scale[0], scale)):
        require(lambda x, ids, *parts: functional.layer_norm(x, (6,), *parts), *((w,) if b is None else (w, b)))
    require(lambda x, ids, w: functional.rms_norm(x, (6,), w), scale)
    require(lambda x, ids, w: x * w, scale)
    require(lambda x, ids, w: w * x, scale)


def test_what_has_no_rule_is_refused() -> None:
    own = EachOwn.of(drawn(4, 7, 6))
    assert (tuple(own.shape), own.dtype, own.ndim) == ((7, 6), torch.float64, 2)
    ids, one = torch.zeros(4, dtype=torch.long), EachOwn.of(drawn(4, 1))
    for without in (
        *(lambda: own + 1, lambda: own.sum(), lambda: drawn(3, 7) @ own, lambda: own[0], lambda: float(own)),
        lambda: functional.linear(drawn(5, 6), own),  # not each has its part
        lambda: functional.embedding(ids, own, max_norm=1.0),
        lambda: functional.embedding(ids, own, scale_grad_by_freq=True),
        lambda: drawn(4, 6) * one,  # a factor is one for each number
    ):
        with refused(NoRuleError):
            without()


# Clients divided among devices, each with its own copy of the model; here every device is a name of the CPU.

CPU, ALSO = torch.device("cpu"), torch.device("cpu:0")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[Objective, int]:
    """The number of examples whose loss each objective computed."""
    counts: dict[Objective, int] = {}
    losses = Objective.losses

    def counted(own: Objective, batch: Any) -> Tensor:
        found = losses(own, batch)
        counts[own] = counts.get(own, 0) + len(found)
        return found

    monkeypatch.setattr(Objective, "losses", counted)
    return counts


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [1, 6])
def test_which_device_trains_a_client_moves_no_bit(devices: int, seen: dict[Objective, int]) -> None:
    setting = wide()
    alone = trained(setting, range(6), public=True)
    setting.objective.beside = copies_on(setting.objective, [ALSO] * devices)
    told: list[float] = []
    seen.clear()
    assert trained(setting, range(6), public=True, ways=Ways(told=told.append)) == alone
    assert trained(setting, [4, 2], public=True) == [alone[4], alone[2]]
    used = [setting.objective, *setting.objective.beside]
    assert [one in seen for one in used] == [True] * min(len(used), 6) + [False] * (len(used) - 6)
    assert told == sorted(told)
    assert told[-1] == len(SIZES)


@pytest.mark.nightly
def test_each_has_its_own_model(seen: dict[Objective, int]) -> None:
    """Each device has its own model: tensors that are loaded into one model do not change trainings on the others."""
    setting = wide()
    setting.objective.beside = copies_on(setting.objective, [ALSO])
    before = trained(setting, range(2), public=True)
    with torch.no_grad():
        for parameter in setting.objective.beside[0].model.parameters():
            parameter.mul_(1.5)
    setting.objective.forget_parameters()  # by hand, as between runs, and not by a pass
    moved = [one != other for one, other in zip(trained(setting, range(2), public=True), before, strict=True)]
    assert sum(moved) == 1


def test_results_are_those_of_one_after_the_other() -> None:
    setting, ways = wide(), Ways()
    setting.objective.beside = copies_on(setting.objective, [ALSO])
    together, alone = setting.both(replace(USUAL, optimizer="sgd", lr=0.1), ways)
    assert [trial.copies for trial in ways.trials.values()] == [True]
    require_equal(together, alone)


@pytest.mark.nightly
@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_private_run_on_two_devices(
    unit: str,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: dict[Objective, int],
) -> None:
    """Without dropout, which is drawn for each pass and not for each client."""
    still = shutil.copytree(small_model, tmp_path / "still")
    known = json.loads((still / "config.json").read_text())
    known |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(known))
    files = [f"model.name={still}", f"data.train={small_data}/train.jsonl", f"data.test={small_data}/test.jsonl"]

    def final(devices: list[torch.device]) -> bytes:
        monkeypatch.setattr(assembly, "find_devices", lambda names: devices)
        settings = [f"privacy.unit={unit}", "privacy.noise_multiplier=1", "privacy.delta=0.01", "evaluation.dummies=0"]
        config = RunConfig.load(None, [*settings, *files, "federation.clients=4", "federation.rounds=1"])
        return Federation(config, entropy=SeededEntropy(0)).run().state.tensors.to_bytes()

    alone = final([CPU])
    seen.clear()
    assert final([CPU, ALSO]) == alone
    assert sum(one.device == ALSO for one in seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_round_on_two_gpus(small_model: Path, small_data: Path, seen: dict[Objective, int]) -> None:
    files = [f"model.name={small_model}", f"data.train={small_data}/train.jsonl", f"data.test={small_data}/test.jsonl"]
    config = RunConfig.load(None, [*files, "model.device=cuda:0,cuda:1", "federation.clients=4", "federation.rounds=1"])
    Federation(config).run()
    assert {objective.device for objective in seen} == {torch.device("cuda:0"), torch.device("cuda:1")}
