"""A node: it checks every envelope that it receives, and answers those that its owner, its policy and the protocol admit.

An offer brings a charter. The node accepts it if its owner named the coordinator that signed it, if the policy admits its
terms, if the owner has accepted the federation where `accept = "ask"` demands it, if model and data are as the charter states,
and if the owner's budget has room for its cost; then the node proves which member it is. The budget is reserved before the
first answer to a round. Every other envelope must be signed by that coordinator. The node signs every answer together with the
request. It answers nothing of a federation that its owner closed.

An error of this package, of `privacy` or of `protocols` becomes a refusal of one sentence, which is noted for the owner
(`Journal`). The coordinator gets the sentence only if it contains neither data nor paths (`refusal`), else the kind of error;
agent.log then has the sentence too. An unexpected error is described in agent.log alone, and not to the coordinator.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from privacy.entropy import Entropy
from privacy.errors import BudgetExhausted, LedgerError, PrivacyError
from privacy.participation import Attendance, NotYourTurn, PublicOrder
from protocols import errors as protocol
from protocols.client import OneClient
from protocols.record import OnDisk
from secure_fed.config.run_config import find
from secure_fed.deployment import messages
from secure_fed.deployment.charter import MOST_BYTES as MOST_CHARTER
from secure_fed.deployment.charter import Charter, CharterError
from secure_fed.deployment.envelope import (
    ANSWER,
    REQUEST,
    Envelope,
    EnvelopeError,
    Forged,
    digest,
    opened,
    sealed,
    unsealed,
)
from secure_fed.deployment.home import Home, HomeError, Journal, placed
from secure_fed.deployment.memberships import (
    MODEL,
    FederationCost,
    NodeLedger,
    NotAgreedError,
    closed,
    keep,
    note_accepted,
    note_contact,
    require_agreed,
    require_few,
)
from secure_fed.deployment.messages import End, Ended, Left, Message, Offer, Refusal
from secure_fed.deployment.policy import PolicyError, named, require
from secure_fed.deployment.problem import of_node
from secure_fed.errors import (
    ConfigError,
    DataError,
    MethodError,
    ModelError,
    OwnLoopError,
    RequestError,
    SecureFedError,
)
from secure_fed.learning.training.local_function import LocalFunction
from secure_fed.learning.training.trial_results import PASS_SIZES
from secure_fed.methods import build
from secure_fed.methods.method import State, fits
from secure_fed.rounds.client import Client
from secure_fed.rounds.local_function import require_function, require_trainable
from secure_fed.rounds.masked.terms import Registry
from secure_fed.rounds.masked.wiring import Elsewhere
from secure_fed.rounds.transport import Participant, Reply, Request, Stage, Staged
from secure_fed.runs import membership
from secure_fed.runs.assembly import Assembly, assemble, rounds_paid
from secure_fed.runs.budget import RunBudget, name_in_ledger
from secure_fed.runs.directory import ATTENDANCE, OWN_RESULT, made_private
from secure_fed.runs.durable import atomic_write
from secure_fed.runs.run import facts_of
from secure_fed.runs.store import read_personal, write_personal, write_trained
from secure_fed.tensors.tensors import Tensors

_log = logging.getLogger(__name__)
_LATEST = "latest"  # in the name of the file of personal tensors
_BESIDE = 10_000  # bytes for each member in a message of the protocol, at most


class Node:
    """The node's answers to envelopes, one at a time.

    entropy: the source of noise and coins; the operating system, except in tests.
    """

    def __init__(self, folder: Path, entropy: Entropy | None = None) -> None:
        self.home = Home.load(folder)
        self._local = function_in(folder, self.home.local) if self.home.local else None
        self._journal = Journal(folder)
        self._entropy = entropy
        self._joined: Party | None = None  # the federation that the node takes part in now

    def answer(self, envelope: Envelope) -> Envelope:
        """The signed answer, or a refusal. Never raises an exception of this package."""
        asked, known = "", False
        charter = self._joined.charter if self._joined else None
        try:
            asked = messages.kind(envelope)
            charter, message = (self._offer if asked == "offer" else self._request)(envelope)
            if known := named(self.home.policy, charter):
                note_contact(self.home, charter)
            answer, told = self._answered(charter, message, asked, digest(envelope))
        except (SecureFedError, PrivacyError, protocol.ProtocolError) as error:
            answer, told = refusal(error), str(error)
            if answer.sentence != told:
                _log.warning("%s refused: %s", asked, told)
        self._journal.note(
            asked, charter.name if charter else "", told, refused=isinstance(answer, Refusal), known=known
        )
        found = self._sealed(answer, envelope)
        if isinstance(answer, Ended):
            self.close()
        return found

    @property
    def most(self) -> int:
        """The bytes that an envelope's arrays may have: a charter's, or those of the federation's largest message."""
        return self._joined.most if self._joined else MOST_CHARTER + _BESIDE

    def close(self) -> None:
        if self._joined:
            self._joined.close()
            self._joined = None

    def _offer(self, envelope: Envelope) -> tuple[Charter, Message]:
        """A charter and its offer, both signed by the coordinator that the charter names."""
        offer = messages.decode(unsealed(envelope))
        if not isinstance(offer, Offer):
            raise Refused("an envelope is labelled as an offer and contains none")
        charter = Charter.verified(offer.charter)
        opened(envelope, charter.coordinator, REQUEST, charter.digest)
        return charter, offer

    def _request(self, envelope: Envelope) -> tuple[Charter, Message]:
        """A message of the coordinator of this node's federation."""
        if self._joined is None:
            raise Refused("this node takes part in no federation now: it was started anew, and waits for the charter")
        charter = self._joined.charter
        return charter, messages.decode(opened(envelope, charter.coordinator, REQUEST, charter.digest))

    def _answered(self, charter: Charter, message: Message, asked: str, sent: bytes) -> tuple[Message, str]:
        """The answer, and a sentence for the journal. A repeated offer of the same charter starts nothing anew.

        sent: the envelope's digest.
        """
        if not isinstance(message, End) and closed(self.home.federation(charter.digest)):
            raise Refused(f"this node's owner has closed the federation {charter.name!r} at this node, for good")
        if isinstance(message, Offer):
            require(self.home.policy, charter)
            require_few(self.home, charter)
            if self.home.policy.accept == "ask":
                require_agreed(self.home, charter, message.charter)
            party = self._joined
            if party is None or party.charter.digest != charter.digest:
                party = Party(charter, self.home, self._local, self._entropy)
                party.begin(message.charter)
                self.close()  # it leaves any other federation
                self._joined = party
            accepted = message.accepted(self.home.identity, charter.digest, party.number)
            told = f"accepted as member {party.number + 1} of {len(charter.members)}"
            return accepted, f"{told}; {party.cost}" if party.cost else told
        if isinstance(message, End) and self._joined:
            nothing = not message.tensors or closed(self.home.federation(charter.digest))
            return Ended(), "ended" if nothing else self._joined.end(message)
        if self._joined is None or not isinstance(message, Request | Stage):
            raise Refused(f"the server asks for {asked!r:.40}, which a node does not answer")
        stage = message.name if isinstance(message, Stage) else message.pass_name
        answer = self._joined.answer(message, sent)
        done = "left, since too few others are there" if answer is None else "answered"
        return Left() if answer is None else answer, f"round {message.round + 1}, {stage}: {done}"

    def _sealed(self, answer: Message, envelope: Envelope) -> Envelope:
        bare = messages.encode(answer)
        if self._joined is None:
            return bare
        return sealed(bare, self.home.identity, ANSWER, self._joined.charter.digest, digest(envelope))


def cost_of(home: Home, charter: Charter) -> FederationCost | None:
    """The cost of a federation to this node, None without a guarantee. Writes nothing. Raises what joining would raise."""
    local = function_in(home.folder, home.local) if home.local else None
    return Party(charter, home, local, None).cost


def function_in(folder: Path, named: str) -> LocalFunction:
    """The function `FILE.py:NAME` of the node's owner, which is the local step of this node (`local` in node.toml).

    A relative path is in this folder. The file is executed. HomeError if it has none.
    """
    path, _, name = named.rpartition(":")
    file = placed(folder, path, "local")
    spec = spec_from_file_location(f"local_of_{file.stem}", file)
    if not path or spec is None or spec.loader is None or not file.is_file():
        raise _refused(named, 'names no file: write local = "FILE.py:NAME"')
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _refused(named, f"cannot be executed ({type(error).__name__}: {error}): correct the file") from error
    function: Any = getattr(module, name, None)
    if function is None:
        raise _refused(named, f"names {name!r}, which {file} does not have: name a function in it")
    require_function(function)
    return function  # type: ignore[no-any-return]  # of a file that mypy does not see


def _refused(named: str, why: str) -> HomeError:
    return HomeError(f"local = {named!r:.200} {why}").about("local", named, "a function in a file of this machine")


class Party:
    """A member of a federation: an `Assembly` of the whole federation in which only one client gets requests.

    The member computes every term itself, from the charter and from its own data, as each client of a simulation does. State
    that must outlive the process is in its folder, which only its owner can read:

        charter.json   the signed charter; accepted.json: the federation's name and cost (`memberships`)
        attendance     the rounds that the member took part in: each at most once, and only its own turns
        sessions       the sums for which it opened shares: each at most once
        private/       its place in the owner's ledger, from its first answer to a round on; its personal tensors, which never
                       leave it, after its last training
        model/         the final model, once the coordinator has sent it: a run directory of this member, for `secure-fed
                       predict` and `export`, with the member's personal tensors and its membership figure in private/

    Session keys are only in memory. A process that is killed during a round loses them, and the member is missing from that
    round; it takes part in the next.

    local: the owner's function, which trains in place of the charter's steps; the charter's parties neither choose nor see it.
    cost: the federation's cost and the budget left before it, None without a guarantee.
    """

    def __init__(self, charter: Charter, home: Home, local: LocalFunction | None, entropy: Entropy | None) -> None:
        """Writes nothing. BudgetExhausted if there is no room for the federation now, and many other errors: see `refusal`."""
        self.charter = charter
        self.number = charter.number(home.identity.public)
        if (name := charter.members[self.number].name) != home.name:
            raise PolicyError(f"the charter calls this node {name!r}, and its own name is {home.name!r}")
        self._answered: set[bytes] = set()  # digests of the requests so far
        self._latest: tuple[bytes, Reply | Staged | None] = b"", None  # the digest of the last answered one, its answer
        self._asked = 0  # the latest round of a request
        self._ledger, self._folder = NodeLedger.of(home), (folder := home.federation(charter.digest))
        self._budget: RunBudget | None = None
        config = charter.config.replace({**home.model, ("training", "together"): 1})
        method = build(config)
        if local is not None:
            require_trainable(config, method)
        problem = of_node(charter, config, self.number, home.train, home.non_members)
        registry = Registry(len(charter.members), charter.identities, {self.number: home.identity})
        elsewhere = Elsewhere(charter.run, registry, OneClient(OnDisk(folder / "sessions")))
        self.assembly = assemble(config, method, problem, entropy, elsewhere=elsewhere, local=local)
        if self.assembly.base_digest != charter.model_digest:
            raise ModelError(
                f"the base model {config.model.name} on this machine has the digest {self.assembly.base_digest[:16]}..., and "
                f"the federation's {charter.model_digest[:16]}...: take the same model as the coordinator, and set model in "
                "node.toml to its folder"
            )
        # A request carries at most the state and the means of earlier passes, none with more numbers than the model.
        numbers = sum(one.numel() for one in problem.model.parameters())
        self.most = MOST_CHARTER + _BESIDE * len(charter.members) + 3 * 8 * numbers
        plan = self.assembly.protection.plan
        self.cost: FederationCost | None = None
        if plan is not None:
            self.cost = self._ledger.require_room(self.assembly.config, plan, self.assembly.problem, folder)
        self.assembly.require_by_trials()

    def begin(self, content: bytes) -> None:
        """Take part: make the federation's folder, or read it. content: the signed charter."""
        folder = self._folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note_accepted(folder, self.charter, self.cost.total if self.cost else None)
        keep(folder, content)
        self.assembly.objective.kept.files.append(folder / PASS_SIZES)
        with ExitStack() as opening:
            self._attendance = self._begun(opening)
            self._during = opening.pop_all()
        self._client.kept = read_personal(folder, _LATEST).get(self.number)

    def answer(self, ask: Request | Stage, sent: bytes) -> Reply | Staged | None:
        """The answer to a request; None where too few members are left for this member to stay in the round.

        sent: the digest of the signed envelope. The latest answered request gets the same answer again, to the bit: the
        coordinator repeats it where an answer was lost. An older one, and one of an earlier round, is refused. Neither costs
        anything, and the round that is under way goes on. The whole plan is reserved before the first answer of all, whatever
        the request is. BudgetExhausted if it does not fit.
        """
        if sent == self._latest[0]:
            return self._latest[1]
        self._require_new(ask, sent)
        self._reserve()
        if _trains(ask, self.assembly) and self.assembly.attendance is None:
            self._attendance.enter(self.number, ask.round)
        masks, before = self.assembly.masks, self._client.kept
        participant: Participant = (masks.clients if masks else self.assembly.clients)[self.number]
        answer: Reply | Staged | None = participant.handle(ask)
        kept = self._client.kept
        if kept and kept is not before:  # durable before the contribution that was trained with them
            write_personal(self._folder, _LATEST, {self.number: kept})
        self._latest = sent, answer
        return answer

    def end(self, message: End) -> str:
        """Keep the final model, completed by this member's personal tensors, and measure it on the member's own rows.

        Refused is a model that is not one of this federation, whole and finite. Nothing of this is sent: the coordinator gets
        the word that the model was kept.
        """
        assembly, own = self.assembly, self._client.personal
        state = State(assembly.initial.tensors | message.tensors, message.round)
        whole = {*message.tensors} == {*assembly.initial.tensors.without(assembly.server.personal)}
        fit = whole and fits(assembly.method, assembly.initial.tensors, state)
        if not (fit and message.tensors.is_finite() and message.round <= assembly.config.federation.rounds):
            raise Refused(f"the final model of {self.charter.name!r} is not one of this federation")
        place = self._folder / MODEL
        write_trained(place, assembly.config, facts_of(assembly), state, self._client.kept or Tensors())
        found = None
        if len(assembly.problem.non_members):
            found = membership.of_rows(assembly, replace(state, tensors=state.tensors | own))
        figures = json.dumps({"membership_of_rows": found}, indent=2) + "\n"
        atomic_write(made_private(place) / OWN_RESULT, figures, private=True)
        return f"the final model, after {message.round} rounds, is kept"

    @property
    def _client(self) -> Client:
        return self.assembly.clients[self.number]

    def close(self) -> None:
        self._during.close()

    def _require_new(self, ask: Request | Stage, sent: bytes) -> None:
        """Refused for a request that was there before, and for a round before the last one that this member took part in or was
        asked for; for that last one too if an earlier process took part in it, whose keys are gone.
        """
        if ask.round < max(self._earliest, self._asked):
            last = self._attendance.last(self.number)
            took = "was asked for a later one" if last is None else f"took part in round {last + 1}"
            raise Refused(f"round {ask.round + 1} is over for this node, which {took}: this is an old request")
        if sent in self._answered:
            raise Refused(
                f"this node has got this request of round {ask.round + 1} before: somebody on the way repeats it"
            )
        self._answered.add(sent)
        self._asked = ask.round

    def _reserve(self) -> None:
        """Reserve the federation's whole plan in the owner's ledger, once."""
        assembly = self.assembly
        if (plan := assembly.protection.plan) is None or self._budget is not None:
            return
        reserved = self._ledger.reserved(assembly.config, plan, assembly.problem, self._folder)
        self._budget = assembly.charges.budget = self._during.enter_context(reserved)

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
        last, plan = memory.last(self.number), assembly.protection.plan
        self._earliest = 0 if last is None else last + 1
        left = None
        if plan is not None and assembly.protection.shares is not None:
            left = plan.releases - plan.passes * self._earliest
        if assembly.masks is not None:
            assembly.masks.begin(left)
        return memory

    def _attended(self, round_: int) -> None:
        """Charge a round that is about to begin here, where the member's own training charges no step of it.

        So the ledger, of which no older copy can be put back unnoticed, knows of every federation in which the member trained.
        """
        if self._budget is not None and self.assembly.protection.placement.charges_federation:
            self._budget.attend(round_)


def _trains(ask: Request | Stage, assembly: Assembly) -> bool:
    """Whether this request makes the member train: any but those for later passes of its round, and so an unknown pass, too."""
    request = ask if isinstance(ask, Request) else ask.request
    if request is None:
        return False
    passes = assembly.method.plan(replace(assembly.initial, round=request.round)).passes  # named anew in each round
    return request.pass_name not in passes[1:]


Expected = SecureFedError | PrivacyError | protocol.ProtocolError


class Refused(SecureFedError):  # noqa: N818 - the node's decision
    """The node refuses to answer this envelope."""


# Errors that are sent whole; a subclass is not.
_WHOLE: tuple[type[Expected], ...] = (
    Refused,
    PolicyError,
    NotAgreedError,
    CharterError,
    EnvelopeError,
    Forged,
    messages.MessageError,
    RequestError,
    NotYourTurn,
    protocol.MessageError,
    protocol.Tampering,
    protocol.Misdealt,
    protocol.Aborted,
    protocol.Spent,
)
# The sentence for all other errors: the first that fits.
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (
        BudgetExhausted,
        "its budget for all federations has no room for this charter's privacy.epsilon and privacy.delta",
    ),
    (LedgerError, "the ledger of its budget cannot be used for this charter ([privacy])"),
    (PrivacyError, "it cannot give the guarantee of this charter ([privacy])"),
    (DataError, "its data do not fit the charter ([data]), or not the number of units on its card"),
    (OwnLoopError, "its owner's function for the local step broke a condition"),
    (ModelError, "its base model cannot be used, or is another: take the same model on all machines (model.name)"),
    (MethodError, "it cannot train with the charter's method ([method])"),
    (ConfigError, "it cannot use a setting of the charter"),
    (protocol.ProtocolError, "it cannot take part in the secure sum ([secure_aggregation])"),
    (Exception, "it failed"),
)


def refusal(error: Expected) -> Refusal:
    """The answer to a coordinator whose request ended with this error. It contains neither data nor paths.

    Errors about the charter, a request or the policy's limits are sent whole: they repeat only the coordinator's own text, the
    rounds that this node took part in, and limits of the policy. All other errors may quote a row of the data, a path or a
    number computed from the data. The coordinator gets their kind, and the part or setting that they are about. The owner gets
    the whole sentence, in the journal and in agent.log.
    """
    if type(error) in _WHOLE:
        return Refusal(type(error).__name__, str(error))
    what = next(sentence for kind, sentence in _KINDS if isinstance(error, kind))
    about = _setting(error)
    about = f", about {about}" if about and about not in what else ""
    return Refusal(
        type(error).__name__, f"{what}{about}; the node's owner finds the reason with `secure-fed node status`"
    )


def _setting(error: Expected) -> str:
    """The setting that an error is about, if it is one of a configuration; "" for any other text."""
    section, _, name = getattr(error, "setting", "").partition(".")
    try:
        find(section, name)
    except ConfigError:
        return ""
    return f"{section}.{name}"
