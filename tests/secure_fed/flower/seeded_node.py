"""A node for tests: Flower's SuperNode, and an agent with seeded noise, so that a simulation can repeat the run.

    python -m tests.secure_fed.flower.seeded_node HOME SEED DIES COMMAND ...

DIES: the stage in which all of the node's processes are killed before they answer, such as "1 mask" (of the second round). ""
kills none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from privacy.entropy import SeededEntropy
from secure_fed.deployment import envelope, messages
from secure_fed.deployment.agent import serve
from secure_fed.deployment.envelope import Envelope
from secure_fed.deployment.node import Node
from secure_fed.rounds.transport import Stage


def main() -> None:
    home, seed, dies, *command = sys.argv[1:]
    node = Node(Path(home), SeededEntropy(int(seed)))

    def answer(asked: Envelope) -> Envelope:
        if messages.kind(asked) == "stage":
            stage = messages.decode(envelope.unsealed(asked))
            if isinstance(stage, Stage) and f"{stage.round} {stage.name}" == dies:
                os.killpg(0, signal.SIGKILL)
        return node.answer(asked)

    subprocess.Popen(command)  # in this process's group
    serve(Path(home), answer)


if __name__ == "__main__":
    main()
