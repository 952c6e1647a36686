"""The whole run by secure-fed, from the same model, token ids and settings.   python ours.py FOLDER"""

from __future__ import annotations

import sys
from typing import Any

from common import Clock, Work


def run(work: Work) -> None:
    from transformers import AutoModelForSequenceClassification, logging

    from secure_fed import Federation, RunConfig

    logging.disable_progress_bar()
    settings, clock = work.settings, Clock()

    class Rounds:
        def on_round_end(self, record: Any, state: Any) -> None:
            clock.tick(record["accuracy"])

    tables: dict[str, dict[str, Any]] = {
        "federation": {"cohort": settings["cohort"], "rounds": settings["rounds"], "sampling": "fixed"},
        "method": {
            "name": "fedlora",
            "rank": settings["rank"],
            "alpha": float(settings["alpha"]),
            "target_modules": ["query", "value"],
        },
        "training": {"lr": settings["lr"], "lr_schedule": "constant", "batch_size": settings["batch"]},
        "evaluation": {"audit_fraction": 0.0},
    }
    if settings["noise"]:
        tables["privacy"] = {
            "unit": "example",
            "noise_multiplier": settings["noise"],
            "clip_norm": settings["clip"],
            "delta": 1e-5,
        }
        tables["evaluation"] = {"dummies": 0}
    federation = Federation(
        RunConfig.from_dict(tables),
        model=AutoModelForSequenceClassification.from_pretrained(work.folder / "model"),
        train=[items(own) for own in work.clients],
        test=items(work.test),
        callbacks=[Rounds()],
    )
    clock.tick()
    result = federation.run()
    clock.report(work, result.summary["trainable"])


def items(examples: list[Any]) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": label} for ids, label in examples]


if __name__ == "__main__":
    run(Work.read(sys.argv[1]))
