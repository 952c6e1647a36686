"""A dishonest member's node for tests: Flower's SuperNode, and an agent whose answers follow a script.

python -m tests.secure_fed.flower.hostile_node HOME SCRIPT COMMAND ...
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from secure_fed.deployment.agent import serve
from secure_fed.deployment.node import Node
from tests.secure_fed.deployment.hostile import SCRIPTS, Member

if __name__ == "__main__":
    folder, name, *command = sys.argv[1:]
    subprocess.Popen(command)  # in this process's group
    serve(Path(folder), Member(Node(Path(folder)), SCRIPTS[name]).answer)
