"""`secure-fed audit RUN_DIR --share WORD`: the share of a client's texts that contain a word, guessed from its update."""

from __future__ import annotations

import argparse
import json
import sys

from attacks.limits import ABOVE_LIMIT, limit_of
from secure_fed.errors import UsageError


def add_share(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to `audit`."""
    own = parser.add_argument_group("a share of a client's texts")
    what = (
        "guess which share of a client's texts contain this word, from an update that each of at most 60 clients of RUN_DIR "
        "makes from the final model"
    )
    own.add_argument("--share", metavar="WORD", help=what)


def run_share(chosen: argparse.Namespace) -> int:
    """Make the audit and print it; the exit status shows whether the gain is above the limit."""
    if chosen.run_dir is None:
        raise UsageError("--share is for the audit of a run: name its RUN_DIR")
    limit = limit_of(chosen.fail_above, "gain", "with --share give gain= and a number from 0 to 1")
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
