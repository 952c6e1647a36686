"""`secure-fed node run` whose agent notes every noise that it draws for a step, and which a test holds in the middle of a step.

    python -m tests.secure_fed.flower.counted_node_run run node run HOME ...

HOME/drawn gets a line for each draw, before it is made: the round, and the process. HOME/agent.pid names the agent.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from privacy.entropy import Floats, OwnStream, Stream, SystemEntropy
from secure_fed.commands.cli import main
from secure_fed.deployment import agent
from tests.secure_fed.flower import held

DRAWN, PID = "drawn", "agent.pid"


class CountedStream(OwnStream):
    def __init__(self, home: Path, round_: int) -> None:
        super().__init__(os.urandom(32))
        self.home, self.round, self.draws = home, round_, 0

    def normal(self, shape: tuple[int, ...]) -> Floats:
        with (self.home / DRAWN).open("a") as file:
            file.write(f"{self.round} {os.getpid()}\n")
        self.draws += 1
        if self.draws == 2:
            held.at(f"{self.home.name} {self.round}")
        return super().normal(shape)


@dataclass(frozen=True)
class CountedEntropy(SystemEntropy):
    home: Path

    def stream(self, *label: str | int) -> Stream:
        return CountedStream(self.home, int(label[1])) if label[0] == "gradients" else super().stream(*label)


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "agent":
        from secure_fed.deployment import node  # it loads torch, which the other role does not need

        home = Path(given[0])
        (home / PID).write_text(str(os.getpid()))
        node.Node = partial(node.Node, entropy=CountedEntropy(home))  # type: ignore[misc,assignment]
        sys.argv = ["agent", *given]
        sys.exit(agent.main())
    agent.AGENT = (sys.executable, "-m", "tests.secure_fed.flower.counted_node_run", "agent")
    sys.exit(main(given))
