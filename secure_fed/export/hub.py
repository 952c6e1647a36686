"""An exported folder as a repository of the Hugging Face Hub, private unless `public` is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from secure_fed.errors import SecureFedError, UsageError


class Api(Protocol):
    """The part of `huggingface_hub.HfApi` that a push uses."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...
    def model_info(self, repo_id: str) -> Any: ...
    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any: ...


def require_pushable(repository: str, base_model: str, *, merged: bool) -> None:
    """Refuse, before anything is written, a push that must fail or that nobody else could load."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub is {repository!r}, which is no name on the Hub: give USER/NAME") from error
    if not merged and (base_model.startswith("builtin/") or Path(base_model).is_absolute()):
        raise UsageError(
            f"the adapter's base model is {base_model!r}, which is not on the Hub, so others could not load it: push the whole "
            "model with --merged, or train with the Hub id of a base model as model.name"
        )
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub needs the network, and HF_HUB_OFFLINE switches it off: unset HF_HUB_OFFLINE")
    if huggingface_hub.get_token() is None:
        raise UsageError("--push-to-hub needs a token that may write: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str, *, public: bool = False, api: Api | None = None) -> str:
    """Upload the folder, its README as the model card, and return the repository's address.

    A new repository is private, or public with `public`; without `public`, an existing public repository is refused.
    """
    try:
        hub = api or _hub()
        hub.create_repo(repository, private=not public, exist_ok=True)
        if not public and not hub.model_info(repository).private:
            raise UsageError(
                f"{repository} is a public repository: add --public to publish there, or name another; {folder} is written"
            )
        uploaded = hub.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message="Exported by secure-fed"
        )
    except UsageError:
        raise
    except Exception as error:  # of any kind: the user can only check the name, the token and the network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise SecureFedError(
            f"{folder} is written, but it could not be pushed to {repository} ({reason}): check the name, the token "
            f"(`hf auth whoami`) and the network, then run `hf upload {repository} {folder}`"
        ) from error
    return str(getattr(uploaded, "repo_url", f"https://huggingface.co/{repository}"))


def _hub() -> Api:
    import huggingface_hub

    hub: Api = huggingface_hub.HfApi()
    return hub
