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
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privacy.errors import TurnPassed
from protocols.client import Here
from protocols.thresholds import colluding, losses, surviving
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.deployment.charter import Charter, Member, faults, fingerprint, neutral
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
from secure_fed.deployment.links import Carrier, Links
from secure_fed.deployment.messages import End
from secure_fed.deployment.policy import Policy, objections
from secure_fed.deployment.problem import of_coordinator
from secure_fed.errors import ConfigError, ModelError, TrainingError
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
from secure_fed.rounds.masked.terms import Registry
from secure_fed.rounds.masked.wiring import Elsewhere
from secure_fed.rounds.sums import Record
from secure_fed.runs.assembly import Assembly, assemble
from secure_fed.runs.budget import require_made
from secure_fed.runs.directory import CONFIG
from secure_fed.runs.durable import atomic_write
from secure_fed.runs.hopeless import probe, require_worth
from secure_fed.runs.run import Result, run


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
