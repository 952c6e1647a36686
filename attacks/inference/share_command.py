"""`secure-fed audit RUN_DIR --share WORD`: how many of a client's texts say a word, guessed from its answer."""

from __future__ import annotations

import argparse
import json
import sys

from attacks.any_model.command import ABOVE_LIMIT
from secure_fed.errors import ConfigError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `audit`."""
    own = parser.add_argument_group("a share of a client's texts")
    what = "guess from each client's answer which share of its texts say this word, in the last round of RUN_DIR"
    own.add_argument("--share", metavar="WORD", help=what)


def run(chosen: argparse.Namespace) -> int:
    """Make the audit, print it, and say by the exit status whether the gain is above the limit."""
    if chosen.run_dir is None:
        raise UsageError("--share is of a run: name its RUN_DIR")
    limit = _limit(chosen.fail_above)
    from attacks.adversary.case import Inapplicable
    from attacks.inference.share_audit import audited

    try:
        found = audited(chosen.run_dir, chosen.share, lambda what: print(f"secure-fed: {what}", file=sys.stderr))
    except Inapplicable as error:
        raise UsageError(f"--share does not apply: {error}") from error
    if chosen.json:
        print(json.dumps(found))
    else:
        heads = {"leak": "LEAK", "nothing": "nothing found"}
        print(f"verdict on the share of {found['word']!r} in {found['clients']} clients: {heads[found['verdict']]}")
        print("\n".join(found["sentences"]))
    if found["gain"] <= limit or found["verdict"] == "nothing":
        return 0
    print(f"secure-fed: a gain of {found['gain']:.3f} is above --fail-above gain={limit:g}", file=sys.stderr)
    return ABOVE_LIMIT


def _limit(written: str | None) -> float:
    name, _, value = (written or "gain=1").partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name != "gain" or not 0 <= limit <= 1:
        raise ConfigError(f"--fail-above is {written!r:.40}: with --share give gain= and a number from 0 to 1")
    return limit
