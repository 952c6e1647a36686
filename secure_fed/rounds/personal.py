"""The model of one client: the global state with that client's personal tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from secure_fed.errors import ConfigError
from secure_fed.tensors.tensors import Tensors


def completed(
    tensors: Tensors, patterns: Sequence[str], client: str | None, names: Sequence[str], kept: Mapping[int, Tensors]
) -> Tensors:
    """`tensors` with the personal ones of `client` in place of the initial values that the global state has for them.

    patterns: `method.personal`. names, kept: every client's name, and by its index what it keeps. Refuses to choose a
    client by itself, and a client that has not trained, whose model would be partly untrained.
    """
    if not patterns:
        if client is not None:
            message = f"no tensor of this run is personal, so client {client!r} has no model of its own: leave it out"
            raise ConfigError(message).about("--client", client, "method.personal")
        return tensors
    shown = ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])])
    if client is None:
        raise ConfigError(
            f"method.personal keeps {', '.join(patterns)} on each client, so each has a model of its own: "
            f"choose one with --client NAME (in Python, client=NAME) among {shown}"
        ).about("--client", None, f"one of {shown}")
    if client not in names:
        message = f"--client is {client!r}, but the clients of this run are {shown}"
        raise ConfigError(message).about("--client", client, f"one of {shown}")
    own = kept.get(names.index(client))
    if own is None:
        message = f"--client is {client!r}, which took part in no round yet: choose another, or train on"
        raise ConfigError(message).about("--client", client, "a client that took part")
    return tensors | own
