"""Revisions of models and data sets of the Hub, looked up before anything is loaded: in the user's cache, and on the Hub.

Needs no torch, so that a wrong revision is reported at once.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from secure_fed.activity import activity
from secure_fed.errors import ConfigError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PATIENCE = 10.0  # seconds for the Hub's answer


@cache
def commit(kind: str, repository: str, revision: str) -> str:
    """The commit that a revision names; "" if only loading can tell. kind: "model" or "dataset", of one id of the Hub.

    ConfigError for a revision that the Hub does not have or, offline, that the cache does not have.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        found = _named(kind, repository, revision)
        if not found or not _is_cached(kind, repository, found):
            raise refused(
                kind, repository, revision, "is not in the cache, and the Hub cannot be asked (HF_HUB_OFFLINE)"
            )
        return found
    with activity(f"asking the Hub for revision {revision} of {repository}"):
        try:
            return HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=_PATIENCE).sha or ""
        except RevisionNotFoundError as error:
            raise refused(kind, repository, revision, "does not exist on the Hub") from error
        except Exception:  # no network, no such repository, no access: loading says which, or finds it in the cache
            return _named(kind, repository, revision)


def require_read(kind: str, repository: str, revision: str, files: list[Path]) -> None:
    """Refuse files of the cache that belong to another commit: `datasets` reads its newest copy if the Hub is out of reach."""
    wanted = commit(kind, repository, revision)
    others = {path.parent.name for path in files if _COMMIT.fullmatch(path.parent.name)} - {wanted}
    if wanted and others:
        raise refused(kind, repository, revision, f"was not read, but the newest copy in the cache, {min(others)}")


def refused(kind: str, repository: str, revision: str, why: str) -> ConfigError:
    setting = f"{'model' if kind == 'model' else 'data'}.revision"
    return ConfigError(
        f"{setting} is {revision!r}, which {why}: set it to a commit, tag or branch of {repository!r}, or go online"
    ).about(setting, revision, f"a revision of {repository}")


def _named(kind: str, repository: str, revision: str) -> str:
    """The commit of a revision by the cache's own notes; "" if there are none."""
    from huggingface_hub import constants

    note = Path(constants.HF_HUB_CACHE, f"{kind}s--{repository.replace('/', '--')}", "refs", revision)
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    return revision if _COMMIT.fullmatch(revision) else ""


def _is_cached(kind: str, repository: str, wanted: str) -> bool:
    """Whether the cache has this commit: a model's files, or the rows that `datasets` prepared from a data set's files."""
    if kind == "model":
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "snapshots", wanted).is_dir()
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, name = repository.rpartition("/")
    folder = "___".join(filter(None, (owner, camelcase_to_snakecase(name))))
    return any(Path(config.HF_DATASETS_CACHE, folder).glob(f"*/*/{wanted}"))
