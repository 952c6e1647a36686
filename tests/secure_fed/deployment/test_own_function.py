"""A node whose owner's function trains in place of the charter's steps, which no charter chooses or sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy.entropy import SeededEntropy
from secure_fed.config import RunConfig
from secure_fed.deployment import home, messages
from secure_fed.deployment.charter import Charter, CharterError
from secure_fed.deployment.envelope import REQUEST, sealed, unsealed
from secure_fed.deployment.home import Home, HomeError, Journal
from secure_fed.deployment.node import Node
from secure_fed.errors import ConfigError
from tests.secure_fed.deployment.parties import Deployed, founded, rows_of

USUAL: dict[str, dict[str, Any]] = {
    "data": {"train": "of each member"},
    "federation": {"rounds": 2, "cohort": 4, "sampling": "fixed"},
    "training": {"batch_size": 4},
    "method": {"name": "bitfit"},
}
SHARES: dict[str, dict[str, Any]] = {
    "secure_aggregation": {"enabled": True, "dropout": 0.25},
    "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"},
}
EXAMPLE: dict[str, dict[str, Any]] = {"privacy": {"unit": "example", "epsilon": 50.0, "clip_norm": 0.1}}
MINE = """
from pathlib import Path
import torch

def train(model, examples, round):
    with Path(__file__).with_name("called").open("a") as file:
        print(round, len(examples), file=file)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(0.25)
    return 1.5

def spoil(model, examples, round):
    with torch.no_grad():
        next(one for one in model.parameters() if not one.requires_grad).add_(1.0)

def nothing(model, examples, round):
    pass

NUMBER = 3
"""


def deployed(tmp: Path, table: dict[str, dict[str, Any]], nodes: int, name: str = "train") -> Deployed:
    """Four nodes, of which the first ones have the function `name` of their own file."""
    config = RunConfig.from_dict({**USUAL, **table})
    party = founded(tmp, config, [rows_of(8, seed) for seed in range(4)], lambda number: SeededEntropy(5))
    for number, place in enumerate(party.homes[:nodes]):
        owned(place, f"mine.py:{name}")
        party.carrier.nodes_[100 + number] = Node(place, SeededEntropy(5))
    return party


def owned(place: Path, local: str, text: str = MINE) -> None:
    (place / "mine.py").write_text(text, encoding="utf-8")
    toml = (place / home.NODE).read_text(encoding="utf-8")
    (place / home.NODE).write_text(toml.replace("[node]\n", f"[node]\nlocal = {json.dumps(local)}\n"), encoding="utf-8")


def test_the_function_of_each_node_trains_its_model(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "still").mkdir()
    party = deployed(tmp_path / "moved", {}, nodes=4)
    end = party.conduct().state.tensors.dense().parts()
    start = deployed(tmp_path / "still", {}, nodes=4, name="nothing").conduct().state.tensors.dense().parts()
    assert all(torch.allclose(end[name] - start[name], torch.tensor(0.5), atol=1e-5) for name in start)
    assert [(place / "called").read_text() for place in party.homes] == ["1 8\n2 8\n"] * 4


@pytest.mark.parametrize("table", [{}, SHARES], ids=["open", "shares"])
def test_a_node_with_a_function_takes_part_beside_nodes_without(tmp_path: Path, table: dict[str, Any]) -> None:
    party = deployed(tmp_path, table, nodes=1)
    result = party.conduct()
    assert result.state.round == 2
    assert result.state.tensors.is_finite()
    assert (party.homes[0] / "called").read_text() == "1 8\n2 8\n"
    assert not [line for line in party.said if "refuses" in line or "lost" in line]
    assert [Journal(place).last(9, refused=True) for place in party.homes] == [[]] * 4


def test_a_node_with_a_function_refuses_a_charter_that_protects_examples(tmp_path: Path) -> None:
    """Nobody sees whether the function clips each example's gradient, and the other members count on it."""
    party = deployed(tmp_path, EXAMPLE, nodes=1)
    key = home.CoordinatorHome.load(party.folder).identity
    offer = messages.Offer(party.charter.signed(key), 100, bytes(32))
    asked = sealed(messages.encode(offer), key, REQUEST, party.charter.digest)
    answers = [messages.decode(unsealed(party.carrier.nodes_[node].answer(asked))) for node in (100, 101)]
    assert [isinstance(answer, messages.Refusal) for answer in answers] == [True, False]
    assert "privacy.unit" in answers[0].sentence  # type: ignore[union-attr]
    assert "privacy.unit" in Journal(party.homes[0]).last(9, refused=True)[0]["what"]
    assert not (party.homes[0] / "called").exists()


def test_a_function_that_changes_the_base_model_is_refused_and_told_to_the_owner_alone(tmp_path: Path) -> None:
    party = deployed(tmp_path, {}, nodes=1, name="spoil")
    party.conduct()
    refused = Journal(party.homes[0]).last(9, refused=True)
    assert refused
    assert "frozen" in refused[0]["what"]
    assert not [line for line in party.said if "frozen" in line]


def test_no_setting_of_a_charter_names_a_function(tmp_path: Path) -> None:
    charter = deployed(tmp_path, {}, nodes=0).charter
    fields = json.loads(charter.text)
    for section in fields["config"]:
        with pytest.raises(ConfigError):
            RunConfig.from_dict({section: {"local": "mine.py:train"}})
        named = json.loads(charter.text)
        named["config"][section]["local"] = "mine.py:train"
        with pytest.raises(CharterError, match="local"):
            Charter.verified(json.dumps({"charter": named, "signature": ""}).encode())


@pytest.mark.parametrize(
    ("local", "text"),
    [
        ("mine.py", MINE),
        ("mine.py:", MINE),
        ("other.py:train", MINE),
        ("mine.py:learn", MINE),
        ("mine.py:NUMBER", MINE),
        ("mine.py:train", "def train(model): ..."),
        ("mine.py:train", "this is no Python"),
        ("mine.py:train", "raise SystemError"),
    ],
)
def test_a_node_does_not_start_without_its_function(tmp_path: Path, local: str, text: str) -> None:
    place = deployed(tmp_path, {}, nodes=0).homes[0]
    owned(place, local, text)
    with pytest.raises((HomeError, ConfigError)) as refused:
        Node(place)
    assert refused.value.setting == "local"
    assert Home.load(place).local == local  # other commands execute no file
