"""A deployed federation in one process: its real nodes and coordinator, with envelopes passed in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from privacy.entropy import Entropy
from secure_fed.config import RunConfig
from secure_fed.deployment import coordinator, home, messages
from secure_fed.deployment.charter import Charter, fingerprint
from secure_fed.deployment.coordinator import found
from secure_fed.deployment.envelope import REQUEST, Envelope, sealed, unsealed
from secure_fed.deployment.node import Node
from secure_fed.learning.data import notes


def rows_of(count: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    """`count` of the built-in notes, as rows of a file."""
    rows = notes.generate(count, seed=seed, split=split)
    return [{"text": text, "label": rows.label_names[label]} for text, label in zip(rows.text, rows.label, strict=True)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def new_node(folder: Path) -> Path:
    """A node's folder in this one, beside its data, as `secure-fed node init` leaves them."""
    (folder / "own.csv").write_text("text,label\na,b\n", encoding="utf-8")
    own = {"train": [str(folder / "own.csv")], "coordinator": "-".join(["abcd"] * 10)}
    return home.new_node(folder / "n", name="n", **own).folder  # type: ignore[arg-type]


def copied(envelope: Envelope) -> Envelope:
    """A copy of the envelope, as another machine receives it."""
    return Envelope(bytes(envelope.header), {name: np.array(array) for name, array in envelope.arrays.items()})


@dataclass
class InMemory:
    """A carrier that passes envelopes in memory.

    touch: from (node, asked, answer), the answer that arrives; None: it is lost. deaf: nodes that are not connected.
    """

    nodes_: dict[int, Node]
    touch: Callable[[int, Envelope, Envelope], Envelope | None] = lambda node, asked, answer: answer
    seen: list[tuple[int, Envelope, Envelope]] = field(default_factory=list)
    deaf: set[int] = field(default_factory=set)

    def nodes(self) -> set[int]:
        return set(self.nodes_) - self.deaf

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope]]:
        for node, asked in envelopes.items():
            if node in self.deaf or node not in self.nodes_:
                continue
            answer = self.nodes_[node].answer(copied(asked))
            self.seen.append((node, asked, answer))
            if (touched := self.touch(node, asked, answer)) is not None:
                yield node, copied(touched)


@dataclass
class Deployed:
    """A founded federation: its folders, its nodes, and the lines that the coordinator printed."""

    folder: Path
    homes: list[Path]
    charter: Charter
    carrier: InMemory
    said: list[str] = field(default_factory=list)

    def conduct(self, **settings: Any) -> Any:
        chosen = coordinator.Settings(**{"deadline": 60.0, "wait": 0.0} | settings)
        return coordinator.conduct(self.folder, self.carrier, chosen, self.said.append)[0]

    def told(self, node: Node, message: Any = None, charter: Charter | None = None, number: int = 100) -> Any:
        """The node's answer to a message of the coordinator, by default to an offer of the charter."""
        identity, charter = home.CoordinatorHome.load(self.folder).identity, charter or self.charter
        message = message or messages.Offer(charter.signed(identity), number, bytes(32))
        return messages.decode(
            unsealed(node.answer(sealed(messages.encode(message), identity, REQUEST, charter.digest)))
        )


def founded(
    tmp: Path,
    config: RunConfig,
    parts: list[list[dict[str, Any]]],
    entropy: Callable[[int], Entropy | None],
    tested: list[dict[str, Any]] | None = None,
    **own: Any,
) -> Deployed:
    """A federation of a node for each part, under policies that admit everything, and a coordinator with the rows `tested`, or
    40 test notes.

    own: settings of [policy] that differ from these.
    """
    folder = tmp / "coordinator"
    home.new_folder(folder, "coordinator init")
    key = home.write_key(folder / home.COORDINATOR_KEY)
    policy = {
        "coordinators": [fingerprint(key.public)],
        "privacy": False,
        "secure_aggregation": False,
        "active": False,
        "least_corrupt": 0.0,
        "most_epsilon": 1e6,
    }
    homes = []
    for number, rows in enumerate(parts):
        place = tmp / f"node-{number}"
        home.new_folder(place, "node init")
        home.write_key(place / home.IDENTITY)
        written(place / "train.jsonl", rows)
        lines = ["[node]", f'name = "c{number}"', 'train = "train.jsonl"', f"units = {len(rows)}", "[policy]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in (policy | own).items()]
        (place / home.NODE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        (place / home.CARD).write_text(home.Home.load(place).card, encoding="utf-8")
        homes.append(place)
    test = written(tmp / "test.jsonl", rows_of(40, 5, "test") if tested is None else tested)
    small = {("privacy", "even_if_hopeless"): True} if config.privacy.unit != "none" else {}
    whole = config.replace({("data", "test"): str(test), **small})
    charter = found(folder, whole, [home.read_card(place / home.CARD) for place in homes], "hospitals")
    nodes = {100 + number: Node(place, entropy(number)) for number, place in enumerate(homes)}
    return Deployed(folder, homes, charter, InMemory(nodes))
