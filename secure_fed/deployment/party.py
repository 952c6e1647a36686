"""One member's side of a run, on its own machine: an `Assembly` of the whole federation in which only one client gets requests.

The member computes every term itself, from the charter and from its own data, as each client of a simulation does. State that
must outlive the process is in its folder, which only its owner can read:

    accepted.json  the federation's name and cost (`memberships`)
    attendance     the rounds that the member took part in: each at most once, and only its own turns
    sessions       the sums for which it opened shares: each at most once
    private/       its place in the owner's ledger, from its first answer to a round on

Session keys are only in memory. A process that is killed during a round loses them, and the member is missing from that round;
it takes part in the next.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from privacy.entropy import Entropy
from privacy.sampling import Attendance, PublicOrder
from protocols.client import OneClient
from protocols.keys import Identity
from protocols.record import OnDisk
from secure_fed.config import RunConfig
from secure_fed.deployment.charter import Charter
from secure_fed.deployment.memberships import note_accepted
from secure_fed.deployment.own_ledger import OwnLedger, Room
from secure_fed.deployment.own_settings import ModelHere
from secure_fed.deployment.problem import of_node
from secure_fed.errors import ModelError
from secure_fed.learning.models.kept import PASS_SIZES
from secure_fed.learning.training.local_function import LocalFunction
from secure_fed.methods import build
from secure_fed.rounds.local_function import require_trainable
from secure_fed.rounds.masked.terms import Registry
from secure_fed.rounds.masked.wiring import Elsewhere
from secure_fed.rounds.transport import Participant, Reply, Request, Stage, Staged
from secure_fed.runs.assembly import Assembly, assemble, rounds_paid
from secure_fed.runs.budget import RunBudget, name_in_ledger
from secure_fed.runs.directory import ATTENDANCE


@dataclass(frozen=True)
class Own:
    """A member's own settings: its key, its data, their ledger over all federations, and the base model on this machine.

    local: the owner's function, which trains in place of the charter's steps; the charter's parties neither choose nor see it.
    """

    identity: Identity
    train: tuple[Path, ...]
    ledger: OwnLedger
    model: ModelHere
    local: LocalFunction | None = None


class Party:
    """A member of a federation. It answers the server's requests like a client of a simulation."""

    def __init__(self, charter: Charter, own: Own, folder: Path, entropy: Entropy | None = None) -> None:
        self.charter = charter
        self.number = charter.number(own.identity.public)
        self._own, self._folder = own, folder
        self._budget: RunBudget | None = None
        config = _here(charter.config, own)
        method = build(config)
        if own.local is not None:
            require_trainable(config, method)
        problem = of_node(charter, config, self.number, own.train)
        registry = Registry(len(charter.members), charter.identities, {self.number: own.identity})
        players = OneClient(OnDisk(folder / "sessions"))
        elsewhere = Elsewhere(charter.run, registry, players)
        self.assembly = assemble(config, method, problem, entropy, elsewhere=elsewhere, local=own.local)
        _require_same_model(charter, self.assembly)
        self.room = self._room()
        self.assembly.require_by_trials()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note_accepted(folder, charter, self.room.cost if self.room else None)
        self.assembly.objective.kept.files.append(folder / PASS_SIZES)
        with ExitStack() as opening:
            self._attendance = self._begun(opening)
            self._during = opening.pop_all()

    def answer(self, ask: Request | Stage) -> Reply | Staged | None:
        """The answer to a request; None where too few members are left for this member to stay in the round.

        The whole plan is reserved before the first answer of all, whatever the request is. BudgetExhausted if it does not fit.
        """
        self._reserve()
        if _trains(ask, self.assembly) and self.assembly.attendance is None:
            self._attendance.enter(self.number, ask.round)
        masks = self.assembly.masks
        participant: Participant = (masks.clients if masks else self.assembly.clients)[self.number]
        answer: Reply | Staged | None = participant.handle(ask)
        return answer

    def close(self) -> None:
        self._during.close()

    def _room(self) -> Room | None:
        """The federation's cost and the budget left, if it has a guarantee. BudgetExhausted if there is no room now."""
        assembly = self.assembly
        if (plan := assembly.protection.plan) is None:
            return None
        return self._own.ledger.require_room(assembly.config, plan, assembly.problem, self._folder)

    def _reserve(self) -> None:
        """Reserve the federation's whole plan in the owner's ledger, once."""
        assembly = self.assembly
        if (plan := assembly.protection.plan) is None or self._budget is not None:
            return
        reserved = self._own.ledger.reserved(assembly.config, plan, assembly.problem, self._folder)
        self._budget = assembly.charges.budget = self._during.enter_context(reserved)

    def _attended(self, round_: int) -> None:
        """Charge a round that is about to begin here, where the member's own training charges no step of it.

        So the ledger, of which no older copy can be put back unnoticed, knows of every federation in which the member trained.
        """
        if self._budget is not None and self.assembly.protection.placement.charges_federation:
            self._budget.attend(round_)

    def _begun(self, during: ExitStack) -> Attendance:
        """Open the member's record of rounds; `during` closes it, and the budget.

        Every run has the record, so that no round is trained twice. Where the federation as a whole is charged, the member
        takes part in as many rounds as the plan pays for, whatever the server charges: the record admits no later round, and
        the member adds noise for no further sum.
        """
        assembly, members = self.assembly, len(self.charter.members)
        memory = assembly.attendance or Attendance(
            PublicOrder(members, members), rounds_paid(assembly.config, assembly.protection)
        )
        reserved = bool(name_in_ledger(self._folder))
        memory.begin(self._folder / ATTENDANCE, begun=reserved, durable=True, entered=self._attended)
        during.callback(memory.end)
        during.callback(assembly.charges.close)
        plan, left = assembly.protection.plan, None
        if plan is not None:
            last = memory.last(self.number)
            left = plan.releases - plan.passes * (0 if last is None else last + 1)
        if assembly.masks is not None:
            assembly.masks.begin(left if assembly.protection.shares is not None else None)
        return memory


def _here(config: RunConfig, own: Own) -> RunConfig:
    """The charter's settings with this machine's own."""
    return config.replace({**own.model.settings, ("training", "together"): 1})


def _trains(ask: Request | Stage, assembly: Assembly) -> bool:
    """Whether this request makes the member train: any but those for later passes of its round, and so an unknown pass, too."""
    request = ask if isinstance(ask, Request) else ask.request
    if request is None:
        return False
    passes = assembly.method.plan(replace(assembly.initial, round=request.round)).passes  # named anew in each round
    return request.pass_name not in passes[1:]


def _require_same_model(charter: Charter, assembly: Assembly) -> None:
    if assembly.base_digest != charter.model_digest:
        raise ModelError(
            f"the base model {assembly.config.model.name} on this machine has the digest {assembly.base_digest[:16]}..., and "
            f"the federation's {charter.model_digest[:16]}...: take the same model as the coordinator, and set model in "
            "node.toml to its folder"
        )
