"""Write synthetic data for trying secure-fed: letters to the eight offices of a bank, and the team that answers each.

    python examples/tickets.py FOLDER

tickets.csv has the columns message, team and office; held_out.csv has letters that belong to no office, for testing;
tickets.toml is a configuration for both.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

ABOUT = {
    "cards": ["my card was refused", "the card is worn out", "a payment by card is unknown to me", "my card is lost"],
    "loans": ["I would like a loan", "the rate of my loan rose", "may I repay my loan early", "my loan was refused"],
    "transfers": [
        "a transfer is late",
        "the transfer went to the wrong account",
        "a transfer came twice",
        "no transfer arrived",
    ],
}
OPENINGS = ["Hello,", "Good morning,", "Dear team,", "To whom it may concern:", ""]
TIMES = ["since Monday", "for two weeks", "after my holiday", "as of today", "once again", ""]
ENDS = ["Please call me.", "What can I do?", "I need help soon.", "Thank you.", "I am not pleased."]
CONFIG = """\
[data]
train = "tickets.csv"
test = "held_out.csv"
text = "message"
label = "team"
client = "office"

[federation]
rounds = 8

[method]
name = "ffa_lora"
"""


def letter(chance: random.Random) -> tuple[str, str]:
    """A message and its team."""
    team = chance.choice(list(ABOUT))
    parts = [chance.choice(OPENINGS), chance.choice(ABOUT[team]), chance.choice(TIMES)]
    return " ".join(part for part in parts if part) + ". " + chance.choice(ENDS), team


def main(folder: Path) -> None:
    chance = random.Random(0)
    (folder / "tickets.toml").write_text(CONFIG, encoding="utf-8")
    for name, count, offices in (("tickets.csv", 1600, 8), ("held_out.csv", 400, 0)):
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["message", "team", *(["office"] if offices else [])])
            for _ in range(count):
                writer.writerow([*letter(chance), *([f"office-{chance.randrange(offices)}"] if offices else [])])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
