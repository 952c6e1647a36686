"""Coverage-guided fuzzing of every decoder, of a server and of a client: the targets of `tests/protocols/test_fuzz.py`.

    pip install atheris                            # not among the project's dependencies
    python tests/fuzz/decoders.py -max_total_time=600 -rss_limit_mb=1024 -timeout=20

All options are libFuzzer's, the limits of memory and of time per message among them; a folder as an argument keeps the corpus.
The fuzzer stops with a traceback and a file `crash-...` where a target fails. To reproduce a failure, pass the file as the
argument.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["protocols"]):
    from tests.protocols.test_fuzz import CASTS, TARGETS, recorded

RECORDED = [recorded(name) for name in CASTS]
OFTEN = (TARGETS[0], *TARGETS)  # decoders are the quickest


def one(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    scene, target = (some[provider.ConsumeIntInRange(0, len(some) - 1)] for some in (RECORDED, OFTEN))
    target(scene, provider.ConsumeIntInRange, provider.ConsumeBytes)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
