"""`secure-fed node run` for tests, with seeded noise in the agent, so that a simulation can repeat the run.

python -m tests.secure_fed.flower.seeded_node_run run SEED node run HOME ...
"""

from __future__ import annotations

import sys
from functools import partial

from privacy.entropy import SeededEntropy
from secure_fed.commands.cli import main
from secure_fed.deployment import agent, node

if __name__ == "__main__":
    role, seed, *given = sys.argv[1:]
    if role == "agent":
        node.Node = partial(node.Node, entropy=SeededEntropy(int(seed)))  # type: ignore[misc,assignment]
        sys.argv = ["agent", *given]
        sys.exit(agent.main())
    agent.AGENT = (sys.executable, "-m", "tests.secure_fed.flower.seeded_node_run", "agent", seed)
    sys.exit(main(given))
