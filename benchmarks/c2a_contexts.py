"""The inputs of C2A's prediction compared: the context of a batch or of each text, and different class shares.

    python benchmarks/c2a_contexts.py DATA [--seeds 2]

The C2A runs of `claims.py` (MiniLM on AG News, 50 clients, twenty rounds) are repeated. Their last states predict the test
texts in several ways:

    own, uniform       each text's context and uniform shares, as in secure-fed
    batch, uniform     the largest context of eight texts, as in training (eq. 4), and uniform shares, as in the paper
    own, client        a client's own shares, on test texts drawn by these shares; the mean over clients
    own, no client     uniform shares on the same draws
    commonest          always the client's commonest label, on the same draws: a prediction without any text

C2A trains with the context of the batch and the client's shares. The difference of the first two rows is the cost of the other
context; the difference of the next two is the gain from personal shares for a client that predicts for itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claims import configured, encoder, texts
from claims_made import CLAIMS, SIZES
from timing import machine
from torch import Tensor

from secure_fed import Federation
from secure_fed.learning.models.adapters.hypernetwork import NAME, SHARES, shares

BATCH, DRAWN, CLIENTS = 8, 100, 20


class Predictor:
    """A trained model, and its test set in batches of eight."""

    def __init__(self, federation: Federation, state: Any) -> None:
        self._problem = federation.assembly.problem
        self.model = federation.load(state).eval()
        self.labels = np.array([int(one["labels"]) for one in self._items(self._problem.test)])
        self.uniform = self.model.get_parameter(SHARES).detach().clone()

    @torch.no_grad()
    def right(self, own: Tensor, *, batch: bool) -> np.ndarray[Any, Any]:
        """(texts,) whether each text is predicted right with these class shares. batch: one context for eight texts."""
        self.model.get_parameter(SHARES).copy_(own)
        self.model.get_submodule(NAME).train(batch)
        found, items = [], self._items(self._problem.test)
        for at in range(0, len(items), BATCH):
            given = self._problem.collate(items[at : at + BATCH])
            found.append(self.model(**{k: v for k, v in given.items() if k != "labels"}).logits.argmax(1).numpy())
        return np.concatenate(found) == self.labels

    def of_clients(self, rng: np.random.Generator) -> dict[str, float]:
        """The accuracy on texts drawn by each client's shares: with these shares, uniform ones, and without a model."""
        general, told = self.right(self.uniform, batch=False), []
        for client in self._problem.train[:CLIENTS]:
            own = shares([int(one["labels"]) for one in self._items(client)], len(self.uniform))
            weights = own.double().numpy()[self.labels] / np.bincount(self.labels)[self.labels]
            drawn = rng.choice(len(self.labels), DRAWN, p=weights / weights.sum())
            always = self.labels[drawn] == int(own.argmax())
            told.append((self.right(own, batch=False)[drawn].mean(), general[drawn].mean(), always.mean()))
        return dict(zip(("own, client", "own, no client", "commonest"), np.mean(told, axis=0).tolist(), strict=True))

    @staticmethod
    def _items(examples: Any) -> list[Any]:
        return [examples[i] for i in range(len(examples))]


def measured(arm: str, seed: int, data: Path, cache: Path) -> dict[str, Any]:
    claim = next(one for one in CLAIMS if one.name == "c2a")
    files = {f"data.{split}": str(place) for split, place in texts(claim.data, SIZES["reduced"], data, cache).items()}
    own = claim.configurations(SIZES["reduced"])[arm]
    common = {
        "model.name": str(encoder()),
        "model.pooling": "model",
        **files,
        **SIZES["reduced"].settings(),
        **own,
        "federation.seed": seed,
    }
    federation = Federation(configured(common))
    result = federation.run()
    predictor = Predictor(federation, result.state)
    return {
        "arm": arm,
        "seed": seed,
        "own, uniform": float(predictor.right(predictor.uniform, batch=False).mean()),
        "batch, uniform": float(predictor.right(predictor.uniform, batch=True).mean()),
        **predictor.of_clients(np.random.default_rng(seed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "claims_cache" / "reduced")
    given = parser.parse_args()
    print(machine("torch", "transformers"))
    for seed in range(given.seeds):
        for arm in ("c2a-beta-5", "c2a-beta-0.1"):
            print(json.dumps(measured(arm, seed, given.data, given.cache)), flush=True)


if __name__ == "__main__":
    main()
