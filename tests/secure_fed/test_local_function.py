"""A function of the user's as the local step: what it gets, what comes back, and that no client's call reaches another's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from attacks.adversary.shadows import references
from secure_fed.commands.cli import main
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, MethodError, OwnLoopError, RunDirectoryError, TrainingError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.training.local_function import LocalFunction
from secure_fed.methods import METHODS
from secure_fed.methods.method import OwnObjective
from tests.contracts import runs

COLLATE = Collate(0)
CLIENT = {"privacy.unit": "client", "privacy.noise_multiplier": 0.5, "privacy.clip_norm": 0.5, "privacy.delta": 1e-3}
MASKED = {"secure_aggregation.enabled": True}


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


def like_own_steps(name: str, **more: Any) -> None:
    own = {"training.batch_size": 16, "training.lr_schedule": "constant"}
    expected, found = runs.federation(runs.settings(name, **own, **more)), federation(settings(name, **more), sgd)
    far = apart(expected, found)
    assert far < 1e-3, far  # fedask refactors products of nearly equal singular values


@pytest.mark.parametrize("name", ["bitfit", "rolora", "c2a"])
def test_the_same_steps_in_a_function_train_the_same(name: str) -> None:
    like_own_steps(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in METHODS if name != "adamix"])
def test_the_same_steps_in_a_function_train_the_same_by_every_method(name: str) -> None:
    like_own_steps(name)


def test_personal_tensors_stay_at_their_client() -> None:
    like_own_steps("fedlora", **{"method.personal": ("classifier",)})


def test_a_method_that_trains_on_its_own_loss_is_refused() -> None:
    kinds = {name for name in METHODS if isinstance(runs.federation(runs.settings(name)).assembly.method, OwnObjective)}
    assert kinds == {"adamix"}
    with pytest.raises(MethodError) as refused:
        federation(settings("adamix"), sgd)
    assert refused.value.setting == "method.name"


def test_masked_clients_sum_to_the_same() -> None:
    assert apart(federation(settings(), sgd), federation(settings(**MASKED), sgd)) < 1e-5


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
    ends = [federation(settings(**CLIENT), moved(amount)).run().state.tensors.dense().parts() for amount in (10, 1e4)]
    start = federation(settings(**CLIENT), moved(10)).assembly.initial.tensors.dense().parts()
    far = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in start)
    assert far < 1e-4
    assert max(float((ends[0][name] - start[name]).abs().max()) for name in start) < 5


def test_a_change_that_is_not_finite_is_left_out_or_ends_the_run() -> None:
    def diverges(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        moved(float("nan") if len(examples) == max(runs.SIZES) else 0.01)(model, examples, round)

    whole = {"evaluation.audit_fraction": 0.0}
    rejected = federation(settings(**{**whole, "federation.nonfinite": "skip"}), diverges).run().records[0]["rejected"]
    assert len(rejected) == 1
    with pytest.raises(TrainingError):
        federation(settings(**{**whole, "federation.nonfinite": "fail"}), diverges).run()


def test_a_client_weighs_its_examples() -> None:
    def by_size(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        moved(float(len(examples)))(model, examples, round)

    one_round = {"federation.rounds": 1, "evaluation.audit_fraction": 0.0}
    built = federation(settings("bitfit", **one_round, **{"federation.weighting": "examples"}), by_size)
    start = built.assembly.initial.tensors.dense().parts()
    end = built.run().state.tensors.dense().parts()
    mean = sum(size * size for size in runs.SIZES) / sum(runs.SIZES)
    assert all(torch.allclose(end[name] - start[name], torch.tensor(mean)) for name in start)


def test_the_reported_loss_is_the_mean_over_clients_or_nothing() -> None:
    def counted(model: nn.Module, examples: Sequence[Any], round: int) -> float:
        return float(len(examples))

    config = settings(**{"evaluation.audit_fraction": 0.0})
    records = federation(config, counted).run().records
    assert [record["train_loss"] for record in records] == [np.mean(runs.SIZES)] * runs.ROUNDS
    assert [record["lr"] for record in records] == [None] * runs.ROUNDS
    assert federation(config, moved(0.1)).run().records[0]["train_loss"] is None
    assert federation(settings(**CLIENT), counted).run().records[0].get("train_loss") is None


# --- what the function gets


@pytest.mark.parametrize("name", ["fedlora", "ffa_lora", "rolora"])
def test_the_function_gets_the_rounds_tensors_in_training_mode(name: str) -> None:
    seen: list[int] = []
    ended: list[int] = []

    class Ends:
        def on_round_end(self, record: dict[str, Any], state: Any) -> None:
            ended.append(record["round"])
            states.append(state)

    def look(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        plan = built.assembly.method.plan(states[-1])
        assert {name for name, one in model.named_parameters() if one.requires_grad} == set(plan.trainable)
        for tensor in states[-1].tensors:
            assert torch.equal(model.get_parameter(tensor).detach(), states[-1].tensors.tensor(tensor))
        assert all(module.training for module in model.modules())
        assert torch.is_grad_enabled()
        assert {one.device for one in model.parameters()} == {built.assembly.objective.device}
        seen.append(round)
        moved(0.01)(model, examples, round)

    built = federation(settings(name), look, callbacks=[Ends()])
    states = [built.assembly.initial]
    built.run()
    assert ended == [1, 2]
    assert seen == [1] * len(runs.SIZES) + [2] * len(runs.SIZES)


def test_transformers_knows_of_the_adapters_in_the_model(tmp_path: Path) -> None:
    """Without its mark a Trainer's checkpoint is the whole model, and it refuses a quantised base."""

    def saves(model: Any, examples: Sequence[Any], round: int) -> None:
        model.save_pretrained(tmp_path / str(len(examples)))

    federation(settings(), saves).run()
    written = {file.name for folder in tmp_path.iterdir() for file in folder.iterdir()}
    assert "adapter_config.json" in written
    assert "model.safetensors" not in written


def test_a_client_without_examples_is_not_called() -> None:
    """A client that an audit left without data takes part, and contributes nothing."""
    called: list[int] = []

    def note(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        called.append(len(examples))

    built = federation(settings(**{"evaluation.audit_fraction": 0.0}), note)
    empty = built.assembly.clients[0].like(())
    request = built.assembly.server
    plan = request.plan(built.assembly.initial)
    asked = request.request(built.assembly.initial, plan, plan.passes[0], 5e-3, {}, "")
    assert all(not part.any() for part in empty.handle(asked).contribution.dense().parts().values())
    assert not called


# --- no call reaches another client's


def attribute(model: nn.Module) -> None:
    model.seen = 1  # type: ignore[assignment]


def configuration(model: nn.Module) -> None:
    model.config.seen = 1


def hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: output)


def buffer(model: nn.Module) -> None:
    next(model.buffers()).add_(1)


def new_buffer(model: nn.Module) -> None:
    model.register_buffer("seen", torch.ones(1))


def evaluating(model: nn.Module) -> None:
    model.eval()


def replaced(model: nn.Module) -> None:
    model.add_module("dropout", nn.Identity())


def forward(model: nn.Module) -> None:
    model.forward = lambda *args, **named: None  # type: ignore[method-assign]


def thawed(model: nn.Module) -> None:
    model.requires_grad_(True)


def gradients(model: nn.Module) -> None:
    for one in model.parameters():
        one.grad = torch.ones_like(one)


def trained(model: nn.Module) -> None:
    moved(1.0)(model, (), 1)


def no_gradients(model: nn.Module) -> None:
    torch.set_grad_enabled(False)


TRACES: list[Callable[[Any], None]] = [
    *(attribute, configuration, hook, buffer, new_buffer, evaluating, replaced, forward, thawed, gradients, trained),
    no_gradients,
]


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


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
def test_every_client_of_a_round_begins_from_the_same_model(trace: Callable[[Any], None]) -> None:
    seen: list[Any] = []

    def leaves(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        seen.append(signature(model))
        trace(model)

    built = federation(settings(**{"federation.rounds": 1}), leaves)
    before = torch.is_grad_enabled()
    built.run()
    assert len(seen) == len(runs.SIZES)
    assert all(one == seen[0] for one in seen)
    assert torch.is_grad_enabled() == before


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
        built = federation(settings(**{"evaluation.audit_fraction": 0.0}), draws)
        server, state = built.assembly.server, built.assembly.initial
        plan = server.plan(state)
        request = server.request(state, plan, plan.passes[0], 5e-3, {}, "")
        replies = [built.assembly.clients[index].handle(request) for index in range(first, len(runs.SIZES))]
        return replies[-1].contribution.dense().parts()

    alone, after_others = change_of_the_last(len(runs.SIZES) - 1), change_of_the_last(0)
    assert all(torch.equal(alone[name], after_others[name]) for name in alone)
    assert any(alone[name].any() for name in alone)


def test_the_callers_generators_are_left_as_they_were() -> None:
    def draws(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    built = federation(settings(), draws)
    drawn = []
    for run in (lambda: None, built.run):
        torch.manual_seed(7), np.random.seed(7), random.seed(7)
        run()
        drawn.append((float(torch.rand(())), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


# --- what is refused


def writes(model: nn.Module) -> None:
    model.bert.embeddings.word_embeddings.weight.data.add_(1.0)  # type: ignore[union-attr, operator]


def swaps(model: nn.Module) -> None:
    model.bert.embeddings.word_embeddings.weight.data = torch.zeros(runs.VOCABULARY, 16)  # type: ignore[union-attr]


def halves(model: nn.Module) -> None:
    model.half()


def transposes(model: nn.Module) -> None:
    one = model.bert.encoder.layer[0].attention.output.dense.weight  # type: ignore[union-attr, index]
    one.data = one.data.t()


def new_module(model: nn.Module) -> None:
    model.bert.embeddings.word_embeddings = nn.Embedding(runs.VOCABULARY, 16)  # type: ignore[union-attr]


def lengthens(model: nn.Module) -> None:
    one = next(one for one in model.parameters() if one.requires_grad)
    one.data = torch.cat([one.data, one.data])


def moves_what_does_not_train(model: nn.Module) -> None:
    with torch.no_grad():
        next(one for name, one in model.named_parameters() if ".lora_A." in name).add_(1.0)


def own_adapter(model: nn.Module) -> None:
    get_peft_model(model, LoraConfig(target_modules=["query", "value"], r=2))  # type: ignore[arg-type]


def new_parameter(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))


def other_parameter(model: nn.Module) -> None:
    model.classifier.weight = nn.Parameter(model.classifier.weight.detach().clone())  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("privacy", [{}, CLIENT], ids=["open", "client"])
@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        (writes, "word_embeddings.weight"),
        (swaps, "word_embeddings.weight"),
        (halves, ".weight"),
        (transposes, "dense.weight"),
        (new_module, "word_embeddings.weight"),
        (lengthens, "lora_B"),
        (moves_what_does_not_train, "lora_A"),
        (own_adapter, "lora_"),
        (new_parameter, "scale"),
        (other_parameter, "classifier.weight"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_a_function_that_changes_more_than_the_trained_tensors_is_refused(
    breaks: Callable[[nn.Module], None], named: str, privacy: dict[str, Any]
) -> None:
    def local(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        breaks(model)

    with pytest.raises(OwnLoopError, match=named) as refused:
        federation(settings("ffa_lora", **privacy), local).run()
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_federation_whose_frozen_weights_were_changed_trains_no_more(fails: bool) -> None:
    """Its weights are no longer those on which the other parties agree, and a second run would not notice."""
    calls: list[int] = []

    def local(model: nn.Module, examples: Sequence[Any], round: int) -> None:
        calls.append(1)
        if len(calls) == 1:
            writes(model)
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

    federation(settings(), local).run()


@pytest.mark.parametrize("returned", ["low", 1, torch.ones(()), np.float32(1.0)], ids=str)
def test_a_loss_that_is_no_float_is_refused(returned: Any) -> None:
    with pytest.raises(OwnLoopError):
        federation(settings(), lambda model, examples, round: returned).run()


@pytest.mark.parametrize(
    "local", [3, "train.py", lambda model, examples: None], ids=["number", "text", "two arguments"]
)
def test_what_cannot_be_called_with_model_examples_and_round_is_refused(local: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Federation(settings(), local=local)
    assert refused.value.setting == "local"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("training.lr", 0.1),
        ("training.head_factor", 3.0),
        ("training.epochs", 2),
        ("training.steps", 3),
        ("training.batch_size", 8),
        ("training.microbatch", 8),
        ("training.checkpointing", True),
        ("training.together", 1),
        ("training.optimizer", "sgd"),
        ("training.weight_decay", 0.1),
        ("training.max_grad_norm", 1.0),
        ("training.lr_schedule", "cosine"),
        ("training.lr_warmup", 1),
        ("training.proximal", 0.1),
        ("privacy.unit", "example"),
        ("privacy.unit", "group"),
        ("model.device_map", "auto"),
        ("model.device", "cpu,cpu"),
        ("method.ranks", ("a=1",)),
    ],
)
def test_a_setting_that_has_no_effect_or_cannot_be_kept_is_refused(setting: str, value: Any) -> None:
    needed = {"privacy.noise_multiplier": 0.5} if setting == "privacy.unit" else {}
    needed |= {"privacy.group_column": "person"} if value == "group" else {}
    with pytest.raises(ConfigError) as refused:
        Federation(settings(**{setting: value, **needed}), local=sgd)
    assert refused.value.setting == setting


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("privacy.clip_norm", {"privacy.unit": "client", "privacy.noise_multiplier": 0.5}),
        ("evaluation.phantoms", {"evaluation.phantoms": 8, "evaluation.audit_unit": "client"}),
        (
            "evaluation.canaries",
            {
                "evaluation.canaries": "direction",
                "evaluation.audit_unit": "client",
                "evaluation.audit_fraction": 0.5,
            },
        ),
    ],
)
def test_a_default_that_follows_from_the_own_steps_is_refused(setting: str, chosen: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        Federation(settings(**chosen), local=sgd)
    assert refused.value.setting == setting


# --- resumed, exported, audited


@pytest.mark.parametrize("more", [{}, MASKED], ids=["plain", "masked"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, more: dict[str, Any]) -> None:
    def noisy(model: nn.Module, examples: Sequence[Any], round: int) -> float:
        moved(float(torch.rand(()) + round))(model, examples, round)
        return sgd(model, examples, round)

    config = settings(**more)
    with pytest.raises(runs.KilledError):
        federation(config, noisy, callbacks=[runs.KilledAfter(1)]).run(tmp_path / "run")
    resumed = federation(config, noisy).run(tmp_path / "run", resume=True).state.tensors.dense().parts()
    whole = federation(config, noisy).run().state.tensors.dense().parts()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_run_is_resumed_by_the_same_function_alone(tmp_path: Path) -> None:
    with pytest.raises(runs.KilledError):
        federation(settings(), sgd, callbacks=[runs.KilledAfter(1)]).run(tmp_path / "run")
    for local in (None, lambda model, examples, round: None):
        with pytest.raises(RunDirectoryError, match="local"):
            runs.federation(settings(), local=local).run(tmp_path / "run", resume=True)
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    federation(RunConfig.load(tmp_path / "run" / "config.json") if False else settings(), sgd).run(
        tmp_path / "run", resume=True
    )


def test_the_adapter_is_exported_for_peft(tmp_path: Path) -> None:
    built = federation(settings(), sgd)
    state = built.run().state
    folder = built.export(state, tmp_path / "adapter")
    batch = batch_of(runs.examples(99, 12))
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = built.load(state).eval()(**given).logits
        found = PeftModel.from_pretrained(runs.model(), folder).eval()(**given).logits
    assert torch.allclose(expected, found, atol=1e-5)


def test_phantoms_audit_a_private_run_and_references_train_by_the_function() -> None:
    called: list[int] = []

    def counts(model: nn.Module, examples: Sequence[Any], round: int) -> float:
        called.append(round)
        return sgd(model, examples, round)

    built = federation(settings(**CLIENT, **{"evaluation.phantoms": 8, "privacy.even_if_hopeless": True}), counts)
    result = built.run()
    assert result.summary["membership"]["of"] == "phantoms"
    assert any("local" in what for what in result.summary["privacy"]["not_covered"])
    called.clear()
    held = federation(settings(**{"evaluation.audit_fraction": 0.5}), counts)
    references(held.assembly, 2, seed=0)
    assert called == [1, 1, 1, 1, 2, 2, 2, 2] * 2
