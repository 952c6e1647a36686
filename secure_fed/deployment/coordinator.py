"""The coordinator: it founds a federation, reaches its members, and conducts the run, without anybody's data.

`found` puts a configuration and the members' cards into one charter, and signs it. `conduct` runs the charter. It is the same
run as in a simulation, with the same engine, directory, budget and report. Differences:

- its transport is `Links`, which matches nodes with members and checks their answers;
- before a round begins it waits until enough members can be reached (`Settings.wait`);
- a round that was begun and not finished is lost, whatever interrupted it, and never repeated: members may have trained for it
  and refuse a second time (`Gate`). So a killed coordinator resumes with the next round.
"""

from __future__ import annotations

import json
import math
import secrets
import struct
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from privacy.errors import TurnPassed
from protocols.client import Here
from protocols.keys import Identity
from protocols.thresholds import colluding, counted_shares, losses, surviving
from secure_fed.config import PrivacyConfig, RunConfig, SecureAggregationConfig
from secure_fed.deployment import messages
from secure_fed.deployment.charter import Charter, Member, faults, fingerprint, neutral
from secure_fed.deployment.envelope import ANSWER, REQUEST, SIGNATURE, Envelope, digest, opened, sealed, unsealed
from secure_fed.deployment.home import (
    BEGUN,
    CHARTER,
    COORDINATOR,
    COORDINATOR_KEY,
    ENDED,
    MEMBERS_TOML,
    RUN,
    CoordinatorHome,
    HomeError,
    budget_of,
    placed,
    read_key,
)
from secure_fed.deployment.messages import Accepted, End, Ended, Left, Offer, Refusal
from secure_fed.deployment.policy import Policy, objections
from secure_fed.deployment.problem import of_coordinator
from secure_fed.errors import ConfigError, ModelError, SecureFedError, TrainingError
from secure_fed.learning import tasks
from secure_fed.learning.data import sources
from secure_fed.learning.data.chats import template_of
from secure_fed.learning.models.loading import digest_of, head_of, load
from secure_fed.learning.tasks.headline import headline, shown
from secure_fed.methods import build
from secure_fed.methods.auto import decided
from secure_fed.report.page import write_report
from secure_fed.rounds.client_models import require_ranks
from secure_fed.rounds.cohort import cohort_size, counts_on_secrecy
from secure_fed.rounds.masked.terms import FEWEST, Registry
from secure_fed.rounds.masked.wiring import Elsewhere
from secure_fed.rounds.sums import Record
from secure_fed.rounds.transport import Reply, Request, Stage, Staged
from secure_fed.runs.assembly import Assembly, assemble
from secure_fed.runs.budget import require_made
from secure_fed.runs.directory import CONFIG
from secure_fed.runs.durable import atomic_write
from secure_fed.runs.probe import probe, require_worth
from secure_fed.runs.run import Result, run
from secure_fed.tensors.tensors import Layout

_OFFER = 30.0  # seconds in which a node answers its first offer, and for which a round waits for a member that was lost
_LONGEST = 900.0  # seconds between two offers to a node that does not answer
_AGAIN = 60.0  # seconds until a node that refused the charter gets it again: its owner may have changed the policy
_MOST_EXAMPLES = 1e9  # of a member whose card declares no number; a far larger weight would overflow the sum
_PAUSE = 1.0  # seconds between two checks for reachable members
_GOODBYE = 30.0  # seconds


def found(folder: Path, config: RunConfig, members: Sequence[Member], name: str) -> Charter:
    """Write and sign the charter of a new federation in the coordinator's folder, and its members for policies. An earlier run
    there is refused.

    config: as for a simulation. The coordinator has the test set, which also determines the classes; each member has its own
    training data.
    """
    identity = read_key(folder / COORDINATOR_KEY)
    if (folder / RUN).exists():
        raise HomeError(
            f"{folder} holds the run of a federation: found a new one in another folder, or move {folder / RUN}"
        )
    task = tasks.build(config.data)
    test = [config.data.test] if isinstance(config.data.test, str) else list(config.data.test)
    if not any(test):
        raise ConfigError("data.test is not set: the coordinator has no other data, so name its test set").about(
            "data.test", "", "a file of the coordinator"
        )
    paths = [placed(Path(), one, "data.test") for one in test]
    own_toml = _own_toml(paths, config.privacy)
    classes = task.classes(sources.of_one_party(task, paths, "data.test"))
    terms = agreed(config, members)
    loaded = load(terms.model, task, classes.names, terms.federation.seed)
    head = head_of(loaded.model, loaded.head, terms.method.modules_to_save)
    charter = Charter(
        name=name,
        run=uuid.uuid4().hex,
        config=terms,
        labels=classes.values,
        label_names=classes.names,
        model_digest=digest_of(loaded.model, (*head, *loaded.fixed)),
        members=tuple(members),
        coordinator=identity.public,
    )
    _require_worth(charter, paths)
    atomic_write(folder / COORDINATOR, own_toml, private=True)
    for earlier in (BEGUN, ENDED):
        (folder / earlier).unlink(missing_ok=True)
    atomic_write(folder / CHARTER, charter.signed(identity))
    atomic_write(folder / MEMBERS_TOML, members_toml(charter))
    return charter


def notes(charter: Charter) -> Iterator[str]:
    """What the founder has to know: the colluding members and losses that a round withstands, and what nodes may refuse."""
    config = charter.config
    masks, cohort = config.secure_aggregation, cohort_size(config, len(charter.members))
    if masks.enabled:
        most = losses(cohort, corrupt=masks.corrupt, active=masks.active)
        left_out = cohort - surviving(cohort, masks.dropout)
        corrupt = colluding(cohort, masks.corrupt)
        yield f"of a round's {cohort} members {corrupt} may collude with the coordinator, and {left_out} may vanish"
        if not left_out:
            remedy = f"secure_aggregation.dropout = {math.ceil(100 / cohort) / 100:g} lets a round survive a loss"
            if not most:
                passive = losses(cohort, corrupt=masks.corrupt, active=False)
                remedy = "only more members can change that" + (", or active = false" if passive else "")
            yield f"no loss is survived: a round in which one member vanishes is lost, and its charges stay; {remedy}"
    for sentence in objections(Policy(coordinators=(fingerprint(charter.coordinator),)), charter):
        yield f"nodes with the default policy refuse it: {sentence}"


def sizes(cohorts: Iterable[int]) -> str:
    """A table of the losses and colluders that a round of so many members withstands, at the default shares."""
    masks = SecureAggregationConfig()
    head = (
        "members in a round",
        "may collude",
        "may vanish",
        "at most, active",
        "at most, not active",
        "shares of noise",
    )
    rows: list[Sequence[object]] = [head, ["---"] * len(head)]
    for cohort in cohorts:
        if cohort < FEWEST:
            rows.append([cohort, "no masked sum", *[""] * 4])
            continue
        most = [losses(cohort, corrupt=masks.corrupt, active=active) for active in (True, False)]
        vanish, shares = cohort - surviving(cohort, masks.dropout), counted_shares(cohort, masks.corrupt, masks.dropout)
        rows.append([cohort, colluding(cohort, masks.corrupt), vanish, *most, shares])
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def members_toml(charter: Charter) -> str:
    """The line `members` for the policy of each node, to be compared with what the owners know of each other."""
    head = [
        f"# The members of {charter.name}. Compare each fingerprint with its owner, by telephone or on paper, then put these",
        "# lines into [policy] of node.toml: the node then admits no charter with another key.",
        "members = [",
    ]
    return (
        "\n".join([*head, *(f'  "{fingerprint(one.identity)}",  # {one.name}' for one in charter.members), "]"]) + "\n"
    )


def agreed(config: RunConfig, members: Sequence[Member]) -> RunConfig:
    """The settings that all parties share, without those of one machine. Refuses settings that need all data together."""
    audited = config.evaluation.audit_fraction or 0.0  # by default nothing is held out here, as with privacy
    config = decided(config)[0].replace({("evaluation", "audit_fraction"): audited})
    _require_deployable(config, members)
    own = {
        **neutral(),
        ("federation", "clients"): None,
        ("data", "chat_template"): template_of(config.data),  # its text, since a charter names no file
        **dict.fromkeys((("evaluation", tracker) for tracker in ("tensorboard", "wandb", "mlflow")), False),
    }
    return config.replace(own)


def _require_deployable(config: RunConfig, members: Sequence[Member]) -> None:
    for one in faults(config):
        raise ConfigError(f"{one.setting} = {one.value!r} {one.why}: set it to {one.limit}").about(
            one.setting, one.value, one.limit
        )
    require_ranks(config, [member.name for member in members])
    unit, clients = config.privacy.unit, config.federation.clients
    if clients not in (None, len(members)):
        message = f"federation.clients = {clients} differs from the number of cards, {len(members)}: leave it out"
        raise ConfigError(message).about("federation.clients", clients, "not set")
    if counts_on_secrecy(config, len(members)):
        raise ConfigError(
            "federation.sampling = 'fixed' with noise by the server assumes that nobody sees who takes part, but whoever "
            "runs or watches the machines does: set it to 'schedule'"
        ).about("federation.sampling", "fixed", "'schedule' or 'auto'")
    if unit in ("example", "person") and (silent := [one.name for one in members if one.examples is None]):
        raise ConfigError(
            f"privacy.unit = {unit!r} counts each member's units, and the card of {silent[0]!r} declares none: set units in "
            "its node.toml, and write its card anew"
        ).about("privacy.unit", unit, "cards that declare their units")


def _own_toml(test: Sequence[Path], privacy: PrivacyConfig) -> str:
    """The text of coordinator.toml: the settings that stay on the coordinator's machine, with absolute paths.

    A ledger that does not exist is refused.
    """
    budget = budget_of(privacy, Path(), "[privacy]")
    if budget["ledger"]:
        require_made(budget["ledger"])
    own = {"test": list(map(str, test)), **budget}
    return "\n".join(["[coordinator]", *(f"{name} = {json.dumps(value)}" for name, value in own.items())]) + "\n"


def _require_worth(charter: Charter, test: Sequence[Path]) -> None:
    """Refuse a federation that cannot run, or whose noise alone takes the model to chance: each node would pay for it with its
    data's budget.

    The coordinator decides, on its test set. A charter with `privacy.even_if_hopeless` shows the nodes that it was asked to.
    """
    terms = charter.config
    assembly = assemble(terms, build(terms), of_coordinator(charter, terms, test), elsewhere=_elsewhere(charter))
    if terms.privacy.unit == "none" or terms.privacy.even_if_hopeless:
        return
    harm = probe(assembly)
    if harm is not None:
        require_worth(harm.to_dict(), terms, paid=True)


@dataclass(frozen=True)
class Settings:
    """deadline: the seconds that a stage of a round may take. wait: for members, before a round begins. too_few: the action if
    too few members can be reached after that: "wait" ends the run, which can be resumed later; "lose" loses the round and
    continues with the next.
    """

    deadline: float = 600.0
    wait: float = 3600.0
    too_few: str = "wait"


def conduct(folder: Path, carrier: Carrier, settings: Settings, say: Callable[[str], None]) -> tuple[Result, str]:
    """Run the federation whose charter is in this folder, or resume it, to its end.

    Returns the result, and a sentence about the members that may lack the final model; "" if all have it.
    """
    home = CoordinatorHome.load(folder)
    assembly = assembled(home)
    place = folder / RUN
    if assembly.problem.warning:
        say(assembly.problem.warning)
    links = Links(carrier, home.charter, home.identity, settings.deadline, say)
    gate = Gate(assembly, links, settings, folder / BEGUN)
    conducted = replace(assembly, transport=links, server=replace(assembly.server, charge=gate.charge), attendance=None)
    rounds, task = assembly.config.federation.rounds, assembly.config.data.task

    def notify(event: str, *news: Any) -> None:
        if event == "on_promise":
            for sentence in news[0]:
                say(sentence)
        if event == "on_round_end":
            say(line_of(news[0], rounds, task))

    result = run(conducted, place, resume=(place / CONFIG).exists(), notify=notify)
    final = result.state.tensors.without(assembly.server.personal)
    missed = links.end(End(result.state.round, final), settings.wait)
    say(f"report: {write_report(place)}")
    return result, missed


def assembled(home: CoordinatorHome) -> Assembly:
    """The federation of the coordinator's charter, with its test set and nobody's examples."""
    charter = home.charter
    config = home.configured(charter.config)
    problem = of_coordinator(charter, config, home.test)
    assembly = assemble(config, build(config), problem, elsewhere=_elsewhere(charter))
    if assembly.base_digest != charter.model_digest:
        raise ModelError(
            f"the base model {config.model.name} is not the one that the federation was founded with: found it again, with "
            "`secure-fed coordinator found`"
        )
    return assembly


def _elsewhere(charter: Charter) -> Elsewhere:
    return Elsewhere(charter.run, Registry(len(charter.members), charter.identities), Here())


def line_of(record: Record, rounds: int, task: str) -> str:
    """A finished round in one line, with the task's headline metric."""
    found = [f"round {record['round']}/{rounds}"]
    if record.get("lost"):
        return f"{found[0]}: lost, {record['lost']}"
    metric = headline(task)
    found += [shown(metric, record[metric])] if record.get(metric) is not None else []
    found += [f"loss {record['loss']:.3f}"] if record.get("loss") is not None else []
    if "masked" in record and record["masked"].get("survivors") is not None:
        found.append(f"{record['masked']['survivors']} of {record['cohort']} members in the sum")
    return ", ".join([*found, f"{record['bytes_up'] / 1e6:.1f} MB of content up", f"{record['seconds']:.0f} s"])


@dataclass
class Gate:
    """Lets each round begin only once: when enough members can be reached, and if no earlier process has begun it.

    file: stores the number of rounds begun, durably, before any request to a member. Without it a coordinator that is killed in
    a round would repeat that round. The members refuse this, and if some did not, two sums over different members would reveal
    their contributions.
    """

    assembly: Assembly
    links: Links
    settings: Settings
    file: Path
    _own: int = -1

    def charge(self, round_: int, pass_name: str) -> None:
        """`Server.charge`, after the gate's checks. TurnPassed if the round cannot begin and is lost."""
        if round_ != self._own:
            if round_ < self._begun():
                raise TurnPassed(
                    f"round {round_ + 1} was interrupted, and members may have trained for it: it is not repeated"
                )
            self._wait(round_)
        self.assembly.server.charge(round_, pass_name)
        if round_ != self._own:
            atomic_write(self.file, struct.pack("<I", round_ + 1), private=True)
            self._own = round_

    def _begun(self) -> int:
        return int(struct.unpack("<I", self.file.read_bytes())[0]) if self.file.exists() else 0

    def _wait(self, round_: int) -> None:
        server = self.assembly.server
        wanted = server.without_dummies(server.draw(round_))
        least = self.assembly.masks.sums.terms.least(len(wanted)) if self.assembly.masks else 1
        settings = self.settings
        if self.links.await_members(wanted, least, settings.wait):
            return
        few = f"fewer than {least} of the {len(wanted)} members of round {round_ + 1} were connected after {settings.wait:g} s"
        if settings.too_few == "lose":
            raise TurnPassed(few)
        raise TrainingError(
            f"{few}: run again once they are, which resumes here; or raise wait, or set too-few to lose"
        )


class Carrier(Protocol):
    """Carries envelopes to nodes, which it identifies by numbers, and their answers back."""

    def nodes(self) -> set[int]:
        """The nodes that can be reached now."""

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope] | None]:
        """The answers as they arrive, until all have arrived or the time is over; None now and then while none arrives."""


@dataclass
class Links:
    """`Transport` over a carrier: the members that can be reached.

    The coordinator offers its charter to every new node, and again to every member whose last request got no usable answer: its
    node may have been started anew, under the same number. A node that accepts proves by a signature over a fresh nonce that it
    has a member's key. So members are identified by their keys, not by machine or node number, and a node that returns takes
    part from the next round on.

    A node's signature proves that the answer is from that member, to this very request; nothing more is assumed. Anything else
    (no answer before the deadline, a refusal, an unreadable answer) makes the member absent, and is reported in one line.

    A request whose answer is late is sent again, since an answer can be lost (`_sent`). A silent member costs one deadline, in
    the stage in which it falls silent, and one `_OFFER` before the next round. Then the
    rounds go on without it: offers are answered while rounds run, and are repeated after pauses that double, as does the time
    in which an offer may be answered: a node of a busy machine may need minutes to start Flower's process. A member that
    returns and falls silent again is offered the charter after pauses of deadlines that double, until it has ended a round.
    Nodes that are nobody's are offered the charter in the same way, and nothing waits for them.

    deadline: the seconds that a stage may take. say: gets each problem, and each wait, in one line.
    """

    carrier: Carrier
    charter: Charter
    identity: Identity
    deadline: float
    say: Callable[[str], None]
    _node: dict[int, int] = field(default_factory=dict)
    _offers: list[tuple[Iterator[Any], dict[int, Offer]]] = field(default_factory=list)  # under way
    # of a node: when it gets an offer, and its last pause
    _later: dict[int, tuple[float, float]] = field(default_factory=dict)
    _unsure: set[int] = field(default_factory=set)  # members whose last request got no usable answer
    _silences: dict[int, int] = field(default_factory=dict)  # of a member, since it ended a round
    _absent: set[int] = field(default_factory=set)  # members for which no round waits any more
    _told: dict[int, str] = field(default_factory=dict)  # of a node: the last line about it
    _begun: bool = False

    @property
    def present(self) -> frozenset[int]:
        """The members that can be reached, after `greet`."""
        return frozenset(self._node)

    def greet(self) -> None:
        """Offer the charter to new nodes, and to members that gave no usable answer, and read the answers so far. Waits for
        nobody.
        """
        there, now = self.carrier.nodes(), time.monotonic()
        known = {member: node for member, node in self._node.items() if member not in self._unsure}
        self._node = {member: node for member, node in known.items() if node in there}
        self._unsure.clear()
        asked = {node for _, offers in self._offers for node in offers}
        resting = {node for node, (until, _) in self._later.items() if now < until}
        if new := there - set(self._node.values()) - asked - resting:
            text = self.charter.signed(self.identity)
            for pause, nodes in groupby(sorted(new, key=self._next_pause), self._next_pause):
                offers = {node: Offer(text, node, secrets.token_bytes(32)) for node in nodes}
                sent = {node: self._sealed(messages.encode(offer)) for node, offer in offers.items()}
                self._offers.append((self.carrier.exchange(sent, min(pause, self.deadline)), offers))
        self._welcome_all()

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        """The answers that members give before the deadline."""
        member_of = {self._node[member]: member for member in requests if member in self._node}
        self._unsure.update(member_of.values())
        asked = {node: self._sealed(messages.encode(requests[member])) for node, member in member_of.items()}
        late, begun = False, time.monotonic()
        for found in self._sent(asked):
            if found is None:
                self._welcome_all()
                if not late and (late := time.monotonic() - begun > _OFFER):
                    self.say(f"waiting for {self._names(member_of.values())}, at most {self.deadline:g} s in all")
                continue
            node, envelope = found
            if (member := member_of.pop(node, None)) is not None:
                answer = self._answer(member, asked[node], envelope)
                if fits(answer, requests[member]) and may_count(self.charter, member, answer):
                    self._unsure.discard(member)
                    if not isinstance(requests[member], Stage) or requests[member].name == "unmask":
                        self._silences.pop(member, None)
                    yield answer
                elif answer is not None:
                    self.say(f"{self._names([member])} refuses: its answer does not fit the request")
        for node, member in member_of.items():
            self.say(f"{self._names([member])} did not answer in {self.deadline:g} s")
            self._silences[member] = silences = self._silences.get(member, 0) + 1
            if silences > 1:
                self._absent.add(member)
                self._later[node] = time.monotonic() + self.deadline * 2.0 ** (silences - 2), _OFFER
            if node not in self.carrier.nodes():
                self._node.pop(member, None)

    def _sent(self, asked: Mapping[int, Envelope]) -> Iterator[tuple[int, Envelope] | None]:
        """As the carrier's `exchange` until the deadline, and a request whose answer is late is sent once more.

        Late is an answer after twice the time in which half of the nodes answered, and at least a quarter of the deadline: slow
        nodes get few requests twice. A node gives the same answer again, so a member whose answer was lost stays in the sum. A
        report of an intermediary ends the wait for a node only if no other request to it is under way.
        """
        waiting, begun, late, under_way = dict(asked), time.monotonic(), math.inf, Counter(asked.keys())
        streams = [self.carrier.exchange(asked, self.deadline)]
        while waiting and streams:
            passed = time.monotonic() - begun
            if late == math.inf and 2 * len(waiting) <= len(asked):
                late = max(2 * passed, self.deadline / 4)
            if late < passed < self.deadline and len(streams) == 1:
                late = self.deadline
                under_way.update(waiting.keys())
                streams.append(self.carrier.exchange(dict(waiting), self.deadline - passed))
            for stream in tuple(streams):
                for found in stream:
                    if found is None:
                        break
                    node, envelope = found
                    under_way[node] -= 1
                    if (SIGNATURE in envelope.arrays or not under_way[node]) and waiting.pop(node, None) is not None:
                        yield found
                else:
                    streams.remove(stream)
            if waiting and streams:
                yield None

    def end(self, message: End, wait: float) -> str:
        """Send the final model to all members. A member that is not there misses it, until the coordinator's next start: the
        sentence that is returned names it.

        wait: the seconds to wait for members that no round has missed, at most those of an offer. A node that measures the
        model on its data may confirm later than this waits for.
        """
        until = time.monotonic() + min(wait, self._patience)
        everybody = set(range(len(self.charter.members)))
        self.greet()
        while everybody - self.present - self._absent and time.monotonic() < until:
            time.sleep(_PAUSE)
            self.greet()
        member_of = {node: member for member, node in self._node.items()}
        asked = {node: self._sealed(messages.encode(message)) for node in member_of}
        for found in self.carrier.exchange(asked, min(self.deadline, _GOODBYE)):
            if found is not None and found[0] in asked:
                node, envelope = found
                if isinstance(self._answer(member_of[node], asked[node], envelope), Ended):
                    everybody.discard(member_of[node])
        if not everybody:
            return ""
        self.say(missed := f"{self._names(everybody)} did not confirm the final model; the next start sends it again")
        return missed

    def await_members(self, members: Iterable[int], least: int, seconds: float) -> bool:
        """Wait until all of these members can be reached, or `least` of them while the others are late. Returns whether `least`
        can be reached after at most `seconds`.

        Late is a member that is missing after `_OFFER`; a deadline, before the first round, since its node may be loading the
        model. No later round waits for it, until it is back.
        """
        wanted, begun = set(members), time.monotonic()
        patience, self._begun, said = min(seconds, self._patience if self._begun else self.deadline), True, ""
        while True:
            self.greet()
            missing, passed = wanted - self.present, time.monotonic() - begun
            enough = len(wanted) - len(missing) >= least
            if enough and not missing - self._absent:
                return True
            if passed >= patience and missing - self._absent:
                self._absent |= missing
                if enough:
                    self.say(f"going on without {self._names(missing)}")
                    return True
            if passed >= seconds:
                return enough
            waits = f"waiting for {self._names(missing)}: {least} of {len(wanted)} are enough"
            if waits != said:
                self.say(waits)
                said = waits
            time.sleep(_PAUSE)

    @property
    def _patience(self) -> float:
        return min(self.deadline, _OFFER)

    def _welcome_all(self) -> None:
        """Read the answers to offers that have arrived. Also during a stage, since they expire."""
        self._offers = [one for one in self._offers if self._arriving(*one)]

    def _arriving(self, answers: Iterator[Any], offers: dict[int, Offer]) -> bool:
        """Read the answers to these offers that have arrived. Returns whether more may come."""
        for found in answers:
            if found is None:
                return True
            node, envelope = found
            if (offer := offers.pop(node, None)) is not None:
                self._welcome(node, offer, envelope)
        for node in offers:  # no answer in time
            pause = self._next_pause(node)
            self._later[node] = time.monotonic() + pause, pause
        return False

    def _next_pause(self, node: int) -> float:
        """The seconds that the next offer to a node is open, and then those until another one: twice the last pause."""
        return min(2 * self._later.get(node, (0.0, _OFFER / 2))[1], _LONGEST)

    def _sealed(self, envelope: Envelope) -> Envelope:
        return sealed(envelope, self.identity, REQUEST, self.charter.digest)

    def _welcome(self, node: int, offer: Offer, envelope: Envelope) -> None:
        """Note which member a node is, if its answer proves it."""
        try:
            found = messages.decode(unsealed(envelope))
        except SecureFedError as error:
            found = Refusal(type(error).__name__, str(error))
        if isinstance(found, Accepted) and 0 <= found.member < len(self.charter.members):
            if offer.accepted_by(self.charter.members[found.member].identity, self.charter.digest, found):
                if found.member not in self._node:
                    self.say(f"{self._names([found.member])} is connected")
                self._node[found.member] = node
                self._absent.discard(found.member)
                self._later.pop(node, None)
                self._told.pop(node, None)
                return
            found = Refusal(
                "Forged", f"it says that it is {self._names([found.member])}, and does not have that member's key"
            )
        self._later[node] = time.monotonic() + _AGAIN, _OFFER / 2
        sentence = found.sentence if isinstance(found, Refusal) else "its message does not answer the charter"
        if self._told.get(node) != sentence:
            self._told[node] = sentence
            self.say(f"node {node} does not take part: {sentence}")

    def _answer(self, member: int, asked: Envelope, envelope: Envelope) -> Any:
        """The member's answer; None if there is no readable answer."""
        public = self.charter.members[member].identity
        try:
            if SIGNATURE in envelope.arrays:
                envelope = opened(envelope, public, ANSWER, self.charter.digest, digest(asked))
                found = messages.decode(envelope, member)
            else:  # from an intermediary, such as the node's relay: it can only report an error
                found = messages.decode(envelope)
                found = found if isinstance(found, Refusal) else Refusal("Forged", "its answer is not signed")
        except SecureFedError as error:
            found = Refusal(type(error).__name__, str(error))
        if isinstance(found, Staged | Reply | Ended):
            return found
        if isinstance(found, Left):
            self.say(
                f"{self._names([member])} left the round: too few other members were left to hide its contribution"
            )
        else:
            why = found.sentence if isinstance(found, Refusal) else "its answer does not fit the request"
            self.say(f"{self._names([member])} refuses: {why}")
        return None

    def _names(self, members: Iterable[int]) -> str:
        """The names of these members, of many the first ones."""
        names = [self.charter.members[member].name for member in sorted(members)]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if names[8:] else "")


def fits(answer: Any, asked: Any) -> bool:
    """Whether an answer is of the requested kind; without masks, whether it can be added to the others."""
    if not isinstance(asked, Request):
        return isinstance(answer, Staged)
    if not isinstance(answer, Reply):
        return False
    parts = answer.contribution.parts().values()
    return all(part.is_floating_point() for part in parts) and Layout.of(answer.contribution).digest == asked.layout


def may_count(charter: Charter, member: int, answer: Staged | Reply) -> bool:
    """Whether a member's contribution may have its weight: none or one, or at most its declared number of examples."""
    if not isinstance(answer, Reply):
        return True
    if charter.config.federation.weighting != "examples":
        return answer.weight in (0.0, 1.0)
    return 0 <= answer.weight <= (charter.members[member].examples or _MOST_EXAMPLES)
