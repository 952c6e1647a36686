"""Founding a federation: the coordinator puts a configuration and the members' cards into one charter, and signs it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path

from protocols.client import Here
from secure_fed.config import PrivacyConfig, RunConfig
from secure_fed.deployment.charter import Charter, Member
from secure_fed.deployment.deployable import faults
from secure_fed.deployment.home import BEGUN, CHARTER, COORDINATOR, RUN, budget_of, load_coordinator_key
from secure_fed.deployment.home_files import HomeError, placed
from secure_fed.deployment.own_settings import neutral
from secure_fed.deployment.problem import of_coordinator
from secure_fed.errors import ConfigError
from secure_fed.learning import tasks
from secure_fed.learning.data import sources
from secure_fed.learning.data.chats import template_of
from secure_fed.learning.models.loading import digest_of, head_of, load
from secure_fed.methods import build
from secure_fed.rounds.cohort import counts_on_secrecy
from secure_fed.rounds.masked.terms import Registry
from secure_fed.rounds.masked.wiring import Elsewhere
from secure_fed.rounds.ranks import require_ranks
from secure_fed.runs.assembly import assemble
from secure_fed.runs.budget import require_made
from secure_fed.runs.durable import atomic_write
from secure_fed.runs.probe import probe, require_worth


def found(folder: Path, config: RunConfig, members: Sequence[Member], name: str) -> Charter:
    """Write and sign the charter of a new federation in the coordinator's folder. An earlier run there is refused.

    config: as for a simulation. The coordinator has the test set, which also determines the classes; each member has its own
    training data.
    """
    identity = load_coordinator_key(folder)
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
    (folder / BEGUN).unlink(missing_ok=True)
    atomic_write(folder / CHARTER, charter.signed(identity))
    return charter


def _require_worth(charter: Charter, test: Sequence[Path]) -> None:
    """Refuse a federation whose noise alone takes the model to chance: each node would pay for it with its data's budget.

    The coordinator decides, on its test set. A charter with `privacy.even_if_hopeless` shows the nodes that it was asked to.
    """
    terms = charter.config
    if terms.privacy.unit == "none" or terms.privacy.even_if_hopeless:
        return
    elsewhere = Elsewhere(charter.run, Registry(len(charter.members), charter.identities), Here())
    found = probe(assemble(terms, build(terms), of_coordinator(charter, terms, test), elsewhere=elsewhere))
    if found is not None:
        require_worth(found.to_dict(), terms, paid=True)


def _own_toml(test: Sequence[Path], privacy: PrivacyConfig) -> str:
    """The text of coordinator.toml: the settings that stay on the coordinator's machine, with absolute paths.

    A ledger that does not exist is refused.
    """
    budget = budget_of(privacy, Path(), "[privacy]")
    if budget["ledger"]:
        require_made(budget["ledger"])
    own = {"test": list(map(str, test)), **budget}
    return "\n".join(["[coordinator]", *(f"{name} = {json.dumps(value)}" for name, value in own.items())]) + "\n"


def agreed(config: RunConfig, members: Sequence[Member]) -> RunConfig:
    """The settings that all parties share, without those of one machine. Refuses settings that need all data together."""
    audited = config.evaluation.audit_fraction or 0.0  # by default nothing is held out here, as with privacy
    config = config.replace({("evaluation", "audit_fraction"): audited})
    _require_deployable(config, members)
    own = {
        **neutral(),
        ("federation", "clients"): None,
        ("data", "chat_template"): template_of(config.data),  # its text, since a charter names no file
        ("evaluation", "phantoms"): None if config.privacy.unit == "none" else 0,
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
            "federation.sampling = 'fixed' with noise by the server assumes that nobody sees who takes part, but everybody who "
            "runs or watches the machines does: set it to 'schedule'"
        ).about("federation.sampling", "fixed", "'schedule' or 'auto'")
    if unit in ("example", "group") and (silent := [one.name for one in members if one.examples is None]):
        raise ConfigError(
            f"privacy.unit = {unit!r} counts each member's units, and the card of {silent[0]!r} declares none: set units in "
            "its node.toml, and write its card anew"
        ).about("privacy.unit", unit, "cards that declare their units")
