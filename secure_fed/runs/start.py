"""The start of a federation, before any of its parties is made: settled settings, the problem, the method's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from privacy.sampling import Sampler
from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.hold_out import hold_out
from secure_fed.learning.audit_pool.pool import AuditPool
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.data.pointing import Plain
from secure_fed.learning.models.architecture import positions_of, width_of
from secure_fed.learning.models.checkpointing import wanted
from secure_fed.learning.models.device_map import device_of
from secure_fed.learning.models.devices import find_devices
from secure_fed.learning.models.loading import digest_of, scores_tokens
from secure_fed.learning.problem import Problem
from secure_fed.learning.read_once import read_once
from secure_fed.learning.training.cohort.crew import copies_on
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.method import LoraShaped, Method, RoundPlan, State, loss_of
from secure_fed.rounds.client_models import personal_names, require_ranks, require_shared_factors
from secure_fed.rounds.cohort import cohort_sampler, vacancies
from secure_fed.rounds.open_settings import settled
from secure_fed.tensors.tensors import Tensors


@dataclass(frozen=True)
class Start:
    """The start is the same for every party, except for the examples in `problem`.

    config: with the local steps and the protection of clients settled. problem: without the units that an audit holds out,
    which are in `held_out`. base_digest: of the model before the method changed it. tensors: the initial tensors that the
    method adds to the model or trains in it; those in `personal` never leave their client. plan: of the first round. trained:
    the number of coordinates that a client trains and sends. sampler: of cohorts, without phantoms.
    """

    config: RunConfig
    method: Method
    problem: Problem
    held_out: AuditPool
    base_digest: str
    tensors: Tensors
    personal: tuple[str, ...]
    plan: RoundPlan
    trained: int
    objective: Objective
    sampler: Sampler


def started(config: RunConfig, method: Method, whole: Problem, *, own: bool, steps: bool = True) -> Start:
    """The start over a problem, whose model the method changes. whole: with everybody's examples. own, steps: see `settled`."""
    require_ranks(config, whole.names)
    held_out, problem = hold_out(config, whole)
    if problem.fixed and not isinstance(method, LoraShaped):
        raise _needs_lora(config)
    with activity(f"preparing the tensors of {config.method.name}"):
        base_digest = digest_of(problem.model, (*problem.head, *problem.fixed))  # before the method changes any of it
        tensors = method.prepare(problem.model, problem.head, config.federation.seed)
    if problem.asked is not None:
        problem.asked.room(problem.model)
    personal = personal_names(method, tensors, config.method.personal, config.federation.rounds)
    require_shared_factors(config, tensors, personal)
    plan = method.plan(State(tensors))
    width = width_of(getattr(problem.model, "config", None))
    scoring = any(name in problem.last for name in plan.trainable)
    here = whole.sizes is None and not whole.lazy  # else numbers of examples are unknown, or known after reading all
    config = settled(
        config,
        len(whole.names),
        method,
        State(tensors),
        own=own,
        width=width,
        sizes=[len(own) for own in whole.train] if here else None,
        personal=personal,
        scoring=scoring,
        decoder=scores_tokens(problem.model),
        steps=steps,
    )
    return Start(
        config=config,
        method=method,
        problem=problem,
        held_out=held_out,
        base_digest=base_digest,
        tensors=tensors,
        personal=personal,
        plan=plan,
        trained=tensors.select(plan.trainable).without(personal).numel,
        objective=_objective(config, problem, method, tensors),
        sampler=cohort_sampler(config, len(problem.names), vacancies(problem.names, whole.names)),
    )


def _needs_lora(config: RunConfig) -> ConfigError:
    """A head that never trains is exported beside LoRA factors alone, and a method without an adapter would train nothing."""
    name = config.method.name
    message = (
        f"model.train_head is false, and {name} trains no LoRA adapter; choose a method that does, such as 'federa'"
    )
    return ConfigError(message).about("model.train_head", False, "a method on LoRA")


def _objective(config: RunConfig, problem: Problem, method: Method, tensors: Tensors) -> Objective:
    """The loss of the method's model, on the model's device, with copies on the configuration's other devices.

    Of a model on the meta device, which only has shapes: as if it were on the configuration's first device.
    """
    device, others = device_of(problem.model), find_devices(config.model.device)
    if device.type == "meta":
        device, others = others[0], others[:1]
    longest = None if problem.tokenizer is None else config.model.max_length  # texts passed by the user are not cut
    training, model = config.training, problem.model
    at_once = 1 if config.privacy.unit in ("example", "group") else training.microbatch or training.batch
    tokens = None if longest is None else at_once * min(longest, positions_of(model) or longest)
    checkpointing = wanted(training.checkpointing, model, tokens, device)
    objective = Objective(model, loss_of(method, problem.loss), device, longest=longest, checkpointing=checkpointing)
    if is_declared(problem.facts["test"]["from"]):  # else its rows are the clients' own
        objective.public = Plain(problem.test)
    objective.beside = copies_on(objective, others[1:])
    if problem.tokenizer is not None:  # a model passed directly is its owner's, with texts of any form
        for one in (objective, *objective.beside):
            read_once(one, list(tensors), config.training.microbatch)
    return objective
