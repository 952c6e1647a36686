"""The coordinator: a run without anybody's data, whose rounds are sent to the nodes.

It is the same run as in a simulation, with the same engine, directory, budget and report. Differences:

- its transport is `links.Links`;
- before a round begins it waits until enough members can be reached (`Settings.wait`);
- a round that was begun and not finished is lost, whatever interrupted it, and never repeated: its members have trained for it
  and refuse a second time. So a killed coordinator resumes with the next round.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protocols.client import Here
from secure_fed.deployment.home import BEGUN, RUN, CoordinatorHome
from secure_fed.deployment.links import Carrier, Links
from secure_fed.deployment.problem import of_coordinator
from secure_fed.errors import ModelError, TrainingError
from secure_fed.learning.tasks.headline import headline, shown
from secure_fed.methods import build
from secure_fed.report.page import write_report
from secure_fed.rounds.engine import TurnPassed
from secure_fed.rounds.masked.terms import Registry
from secure_fed.rounds.masked.wiring import Elsewhere
from secure_fed.rounds.sums import Record
from secure_fed.runs.assembly import Assembly, assemble
from secure_fed.runs.directory import CONFIG
from secure_fed.runs.durable import atomic_write
from secure_fed.runs.run import Result, run


@dataclass(frozen=True)
class Settings:
    """deadline: the seconds that a stage of a round may take. wait: for members, before a round begins. too_few: the action if
    too few members can be reached after that: "wait" ends the run, which can be resumed later; "lose" loses the round and
    continues with the next.
    """

    deadline: float = 600.0
    wait: float = 3600.0
    too_few: str = "wait"


def assembled(home: CoordinatorHome) -> Assembly:
    """The federation of the coordinator's charter, with its test set and nobody's examples."""
    charter = home.charter
    config = home.configured(charter.config)
    registry = Registry(len(charter.members), charter.identities)
    problem = of_coordinator(charter, config, home.test)
    assembly = assemble(config, build(config), problem, elsewhere=Elsewhere(charter.run, registry, Here()))
    if assembly.base_digest != charter.model_digest:
        raise ModelError(
            f"the base model {config.model.name} is not the one that the federation was founded with: found it again, with "
            "`secure-fed coordinator found`"
        )
    return assembly


def conduct(folder: Path, carrier: Carrier, settings: Settings, say: Callable[[str], None]) -> Result:
    """Run the federation whose charter is in this folder, or resume it, to its end."""
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
    links.end()
    say(f"report: {write_report(place)}")
    return result


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
                raise TurnPassed(f"round {round_ + 1} was interrupted, and its members have trained for it")
            self._wait(round_)
        self.assembly.server.charge(round_, pass_name)
        if round_ != self._own:
            atomic_write(self.file, struct.pack("<I", round_ + 1), private=True)
            self._own = round_

    def _begun(self) -> int:
        return int(struct.unpack("<I", self.file.read_bytes())[0]) if self.file.exists() else 0

    def _wait(self, round_: int) -> None:
        wanted = self.assembly.server.draw(round_)
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
    return ", ".join([*found, f"{record['bytes_up'] / 1e6:.1f} MB up", f"{record['seconds']:.0f} s"])
