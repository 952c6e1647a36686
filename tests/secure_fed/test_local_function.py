"""A function of the user's as the local step: what it gets, what comes back, and that no client's call reaches another's."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from attacks.adversary.shadows import references
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, MethodError, OwnLoopError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.training.local_function import LocalFunction
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import OwnObjective
from tests.cells import chosen, every
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed.masked.lying import request_of

COLLATE = Collate(0)
CLIENT: dict[str, Any] = {
    **{"privacy.unit": "client", "privacy.noise_multiplier": 0.5, "privacy.clip_norm": 0.5, "privacy.delta": 1e-3},
    "evaluation.dummies": 0,
}
MASKED = {"secure_aggregation.enabled": True}
ONE_ROUND = {"federation.rounds": 1}
WHOLE = {"evaluation.audit_fraction": 0.0}


def settings(name: str = "fedlora", **more: Any) -> RunConfig:
    """The small federation of the contracts, without settings of secure-fed's own steps."""
    usual = RunConfig().training
    own = {f"training.{key}": getattr(usual, key) for key in ("steps", "batch_size", "lr", "optimizer", "together")}
    return runs.settings(name, **{**own, **more})


def batch_of(examples: Sequence[Any]) -> Any:
    return COLLATE([examples[index] for index in range(len(examples))])


def sgd(model: nn.Module, examples: Sequence[Any], round: int) -> float:
    """Two steps over all examples, as the contracts' own steps make with `training.batch_size` = 16."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.02)
    batch = batch_of(examples)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses) / 2


def federation(config: RunConfig, local: LocalFunction, **own: Any) -> Federation:
    return runs.federation(config, local=local, **own)


def moved(amount: float) -> LocalFunction:
    """A function that adds a number to every trained parameter."""

    def function(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        with torch.no_grad():
            for one in model.parameters():
                if one.requires_grad:
                    one.add_(amount)

    return function


def apart(one: Federation, other: Federation) -> float:
    """The largest difference between the final states of two federations."""
    a, b = (built.run().state.tensors.dense().parts() for built in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())


# --- what comes back


@pytest.mark.parametrize(
    ("name", "personal"),
    chosen(
        [*((name, ()) for name in METHODS if name != "adamix"), ("fedlora", ("classifier",))],
        [("c2a", ()), ("fedlora", ("classifier",))],
    ),
)
def test_the_same_steps_in_a_function_train_the_same(name: str, personal: tuple[str, ...]) -> None:
    more = {**ONE_ROUND, "method.personal": personal}
    own = {"training.batch_size": 16, "training.lr_schedule": "constant"}
    expected, found = runs.federation(runs.settings(name, **own, **more)), federation(settings(name, **more), sgd)
    far = apart(expected, found)
    assert far < 1e-3, far  # fedask refactors products of nearly equal singular values


def test_a_method_that_trains_on_its_own_loss_is_refused() -> None:
    assert {name for name in METHODS if isinstance(build(runs.settings(name)), OwnObjective)} == {"adamix"}
    with refused(MethodError, "method.name"):
        federation(settings("adamix"), sgd)


def test_a_function_that_trains_nothing_changes_nothing_in_bfloat16_too() -> None:
    """float32 tensors are rounded on their way into the model, and this rounding must not be sent as a change."""

    def once(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        if round == 1:
            moved(0.01 * len(examples))(model, examples, round)

    train = [runs.examples(seed + 1, size) for seed, size in enumerate(runs.SIZES)]
    states = runs.States()
    own = {"train": train, "test": runs.examples(99, 12), "local": once, "callbacks": [states]}
    Federation(settings(), model=runs.model().to(torch.bfloat16), **own).run()
    first, second = (state.tensors.dense().parts() for state in states.after)
    assert any(not torch.equal(one, one.bfloat16().float()) for one in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_long_change_is_clipped() -> None:
    built = federation(settings(**CLIENT, **ONE_ROUND), moved(1e4))
    sent = built.assembly.clients[0].handle(request_of(built, lr=5e-3)).contribution
    assert sent.norm() == pytest.approx(CLIENT["privacy.clip_norm"], rel=1e-5)


def test_a_client_weighs_its_examples_and_the_reported_loss_is_the_mean_over_clients() -> None:
    def by_size(model: nn.Module, examples: Sequence[Any], round: int) -> float:
        moved(float(len(examples)))(model, examples, round)
        return float(len(examples))

    built = federation(settings("bitfit", **ONE_ROUND, **WHOLE, **{"federation.weighting": "examples"}), by_size)
    result = built.run()
    mean = sum(size * size for size in runs.SIZES) / sum(runs.SIZES)
    moves = (result.state.tensors - built.assembly.initial.tensors).dense().parts()
    assert all(torch.allclose(move, torch.tensor(mean)) for move in moves.values())
    assert (result.records[0]["train_loss"], result.records[0]["lr"]) == (np.mean(runs.SIZES), None)
    assert federation(settings(**ONE_ROUND), moved(0.1)).run().records[0]["train_loss"] is None
    assert federation(settings(**CLIENT, **ONE_ROUND), by_size).run().records[0].get("train_loss") is None


# --- what the function gets


@pytest.mark.parametrize("name", chosen(["ffa_lora", "rolora"], ["rolora"]))
def test_the_function_gets_the_rounds_tensors_in_training_mode(name: str) -> None:
    seen: list[int] = []
    states = runs.States()

    def look(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        state = [built.assembly.initial, *states.after][-1]
        trains = built.assembly.method.plan(state).trainable
        assert {name for name, one in model.named_parameters() if one.requires_grad} == set(trains)
        for tensor in state.tensors:
            assert torch.equal(model.get_parameter(tensor).detach(), state.tensors.tensor(tensor))
        assert all(module.training for module in model.modules())
        assert torch.is_grad_enabled()
        assert {one.device for one in model.parameters()} == {built.assembly.objective.device}
        seen.append(round)
        moved(0.01)(model, examples, round)

    built = federation(settings(name), look, callbacks=[states])
    built.run()
    assert seen == [1] * len(runs.SIZES) + [2] * len(runs.SIZES)


def test_transformers_knows_of_the_adapters_in_the_model(tmp_path: Path) -> None:
    """Without its mark a Trainer's checkpoint is the whole model, and it refuses a quantised base."""

    one_round = settings(**ONE_ROUND)
    federation(one_round, lambda model, examples, round: model.save_pretrained(tmp_path / str(len(examples)))).run()  # type: ignore[operator]
    written = {file.name for folder in tmp_path.iterdir() for file in folder.iterdir()}
    assert "adapter_config.json" in written
    assert "model.safetensors" not in written


def test_a_client_without_examples_is_not_called() -> None:
    """A client that an audit left without data takes part, and contributes nothing."""
    called: list[int] = []

    built = federation(settings(**WHOLE), lambda model, examples, round: called.append(len(examples)))
    assert not built.assembly.clients[0].like(()).handle(request_of(built, lr=5e-3)).contribution.norm()
    assert not called


# --- no call reaches another client's


def _gradients(model: nn.Module) -> None:
    for one in model.parameters():
        one.grad = torch.ones_like(one)


TRACES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda model: setattr(model, "seen", 1),
    "configuration": lambda model: setattr(model.config, "seen", 1),
    "hook": lambda model: model.register_forward_hook(lambda module, args, output: output),
    "buffer": lambda model: next(model.buffers()).add_(1),
    "new buffer": lambda model: model.register_buffer("seen", torch.ones(1)),
    "evaluating": lambda model: model.eval(),
    "replaced": lambda model: model.add_module("dropout", nn.Identity()),
    "forward": lambda model: setattr(model, "forward", lambda *args, **named: None),
    "thawed": lambda model: model.requires_grad_(True),
    "gradients": _gradients,
    "trained": lambda model: moved(1.0)(model, (), 1),
    "no gradients": lambda model: torch.set_grad_enabled(False),
}


def signature(model: Any) -> tuple[Any, ...]:
    """Everything in which a trace of an earlier call could be seen."""
    modules = {
        name: (type(one), sorted(vars(one)), one.training, len(one._forward_hooks))
        for name, one in model.named_modules()
    }
    parameters = {
        name: (float(one.detach().double().sum()), one.requires_grad, one.grad is None, one.dtype)
        for name, one in model.named_parameters()
    }
    buffers = {name: float(one.double().sum()) for name, one in model.named_buffers()}
    return modules, parameters, buffers, sorted(vars(model.config)), torch.is_grad_enabled()


def test_every_client_of_a_round_begins_from_the_same_model() -> None:
    """Each client's function leaves another trace."""
    seen: list[Any] = []

    def leaves(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        traces = list(TRACES.values())[len(seen) :]
        seen.append(signature(model))
        if traces:
            traces[0](model)

    config, data = settings(**ONE_ROUND, **{"federation.cohort": len(TRACES) + 1}), runs.examples(1, 6)
    Federation(config, model=runs.model(), train=[data] * (len(TRACES) + 1), test=data, local=leaves).run()
    assert len(seen) == len(TRACES) + 1
    for trace, one in zip(TRACES, seen[1:], strict=True):
        assert one == seen[0], f"after {trace}, or one before it"
    assert torch.is_grad_enabled()


def test_a_clients_change_does_not_depend_on_the_clients_before_it() -> None:
    """Not even of a function that draws from the global generators, or counts its calls in a buffer or a parameter."""

    def draws(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        counted = next(model.buffers())
        rate = float(torch.rand(()) + np.random.rand() + random.random() + counted.sum())
        counted.add_(1)
        moved(rate)(model, examples, round)
        for _ in range(len(examples)):
            torch.rand(()), np.random.rand(), random.random()

    def change_of_the_last(first: int) -> dict[str, torch.Tensor]:
        built = federation(settings(**WHOLE), draws)
        replies = [client.handle(request_of(built, lr=5e-3)) for client in built.assembly.clients[first:]]
        return replies[-1].contribution.dense().parts()

    alone, after_others = change_of_the_last(len(runs.SIZES) - 1), change_of_the_last(0)
    assert all(torch.equal(alone[name], after_others[name]) for name in alone)
    assert any(alone[name].any() for name in alone)


def test_the_callers_generators_are_left_as_they_were() -> None:
    def seeded(seed: int) -> None:
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)

    built = federation(settings(**ONE_ROUND), lambda model, examples, round: seeded(1))
    drawn = []
    for run in (lambda: None, built.run):
        seeded(7)
        run()
        drawn.append((float(torch.rand(())), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


# --- what is refused


def words(model: Any) -> Any:
    return model.bert.embeddings.word_embeddings.weight


def transposes(model: Any) -> None:
    one = model.bert.encoder.layer[0].attention.output.dense.weight
    one.data = one.data.t()


def lengthens(model: Any) -> None:
    one = next(one for one in model.parameters() if one.requires_grad)
    one.data = torch.cat([one.data, one.data])


BREAKS: dict[str, Callable[[Any], object]] = {
    "writes": lambda model: words(model).data.add_(1.0),
    "swaps": lambda model: setattr(words(model), "data", torch.zeros(runs.VOCABULARY, 16)),
    "halves": lambda model: model.half(),
    "transposes": transposes,
    "new module": lambda model: setattr(model.bert.embeddings, "word_embeddings", nn.Embedding(runs.VOCABULARY, 16)),
    "lengthens": lengthens,
    "moves what does not train": lambda model: next(
        one.data.add_(1.0) for name, one in model.named_parameters() if ".lora_A." in name
    ),
    "own adapter": lambda model: get_peft_model(model, LoraConfig(target_modules=["query", "value"], r=2)),
    "new parameter": lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "other parameter": lambda model: setattr(
        model.classifier, "weight", nn.Parameter(model.classifier.weight.detach().clone())
    ),
}


@pytest.mark.parametrize(
    ("case", "privacy"),
    chosen(
        itertools.product(BREAKS, ["none", "client"]),
        [(case, "none") for case in ("writes", "swaps", "lengthens", "own adapter", "new parameter")],
    ),
)
def test_a_function_that_changes_more_than_the_trained_tensors_is_refused(case: str, privacy: str) -> None:
    config = settings("ffa_lora", **ONE_ROUND, **(CLIENT if privacy == "client" else {}))

    def local(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        BREAKS[case](model)

    with refused(OwnLoopError) as error:
        federation(config, local).run()
    assert error.value.exit_code == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_federation_whose_frozen_weights_were_changed_trains_no_more(fails: bool) -> None:
    """Its weights are no longer those on which the other parties agree, and a second run would not notice."""
    calls: list[int] = []

    def local(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        calls.append(1)
        if len(calls) == 1:
            BREAKS["writes"](model)
            if fails:
                raise ValueError

    built = federation(settings(), local)
    with pytest.raises(ValueError if fails else OwnLoopError):
        built.run()
    with pytest.raises(OwnLoopError):
        built.run()
    assert len(calls) == 1


def test_further_parameters_that_do_not_train_may_stay() -> None:
    """As those of a reference model."""

    def local(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        model.add_module("reference", copy.deepcopy(model).requires_grad_(False))

    federation(settings(**ONE_ROUND), local).run()


def test_a_function_of_another_form_and_a_loss_that_is_no_float_are_refused() -> None:
    for local in (3, "train.py", lambda model, examples: None):
        with refused(ConfigError, "local", worded=not callable(local)):
            Federation(settings(), local=local)  # type: ignore[arg-type]
    for returned in ("low", np.float32(1.0)):
        with refused(OwnLoopError):
            federation(settings(), lambda model, examples, round, found=returned: found).run()


UNREAD: dict[str, dict[str, Any]] = {
    f"training.{name}": {f"training.{name}": value}
    for name, value in (
        *(("lr", 0.1), ("head_factor", 3.0), ("epochs", 2), ("steps", 3), ("batch_size", 8), ("microbatch", 8)),
        *(("checkpointing", True), ("together", 1), ("optimizer", "sgd"), ("weight_decay", 0.1), ("lr_warmup", 1)),
        *(("max_grad_norm", 1.0), ("lr_schedule", "cosine"), ("proximal", 0.1)),
    )
}
UNREAD |= {"model.device_map": {"model.device_map": "auto"}, "model.device": {"model.device": "cpu,cpu"}}
HALF = {"evaluation.audit_unit": "client", "evaluation.audit_fraction": 0.5}
NOISED = {"privacy.noise_multiplier": 0.5}
UNREAD |= {  # of a guarantee that cannot be kept, and of defaults that follow from the own steps
    "method.ranks": {"method.ranks": ("a=1",)},
    "privacy.clip_norm": {"privacy.unit": "client", **NOISED},
    "evaluation.dummies": {"evaluation.dummies": 8, "evaluation.audit_unit": "client"},
    "evaluation.canaries": {"evaluation.canaries": "direction", **HALF},
}
KEPT_BY_NOBODY = [{"privacy.unit": "example"}, {"privacy.unit": "person", "privacy.person_column": "person"}]


@every(("setting", "more"), [*UNREAD.items(), *(("privacy.unit", {**own, **NOISED}) for own in KEPT_BY_NOBODY)])
def test_a_setting_that_has_no_effect_or_cannot_be_kept_is_refused(setting: str, more: dict[str, Any]) -> None:
    with refused(ConfigError, setting):
        Federation(settings(**more), local=sgd)


# --- resumed, exported, audited


@pytest.mark.parametrize("masked", chosen([False, True], [False]))
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, masked: bool) -> None:
    def noisy(model: nn.Module, examples: Sequence[Any], round: int) -> float:
        moved(float(torch.rand(()) + round))(model, examples, round)
        return 0.0

    config = settings(**(MASKED if masked else {}))
    with pytest.raises(runs.KilledError):
        federation(config, noisy, callbacks=[runs.KilledAfter(1)]).run(tmp_path / "run")
    resumed = federation(config, noisy).run(tmp_path / "run", resume=True).state.tensors.dense().parts()
    whole = federation(config, noisy).run().state.tensors.dense().parts()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_run_is_resumed_by_the_same_function_alone(tmp_path: Path) -> None:
    own = moved(0.1)
    with pytest.raises(runs.KilledError):
        federation(settings(), own, callbacks=[runs.KilledAfter(1)]).run(tmp_path / "run")
    for local in (None, lambda model, examples, round: None):
        with refused(RunDirectoryError):
            runs.federation(settings(), local=local).run(tmp_path / "run", resume=True)
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    federation(settings(), own).run(tmp_path / "run", resume=True)


def test_dummies_audit_a_private_run_and_references_train_by_the_function() -> None:
    called: list[int] = []

    def counts(model: nn.Module, examples: Sequence[Any], round: int) -> float:
        called.append(round)
        return sgd(model, examples, round)

    dummies = {"evaluation.dummies": 8, "privacy.even_if_hopeless": True}
    built = federation(settings(**{**CLIENT, **ONE_ROUND, **dummies}), counts)
    result = built.run()
    assert result.summary["membership"]["of"] == "dummies"
    assert any("local" in what for what in result.summary["privacy"]["not_covered"])
    called.clear()
    references(federation(settings(**ONE_ROUND, **{"evaluation.audit_fraction": 0.5}), counts).assembly, 2, seed=0)
    assert called == [1, 1, 1, 1] * 2
