"""Personal tensors, which never leave their client: their names, and the model of one client with its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from secure_fed.errors import ConfigError, MethodError
from secure_fed.methods.method import Method, Rewriting, State
from secure_fed.tensors.tensors import Tensors


def completed(
    tensors: Tensors, patterns: Sequence[str], client: str | None, names: Sequence[str], kept: Mapping[int, Tensors]
) -> Tensors:
    """`tensors` with the personal tensors of `client` in place of their initial values in the global state.

    patterns: `method.personal`. names, kept: every client's name, and by its index its personal tensors. Refuses to choose a
    client itself, and refuses a client that has not trained, whose model would be partly untrained.
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


def personal_names(method: Method, initial: Tensors, patterns: Sequence[str], rounds: int) -> tuple[str, ...]:
    """The trained tensors, of any round, that match a pattern.

    Refuses a pattern without a match, a tensor that the method sends, in some round, only inside a product, and a tensor that
    the server rewrites for all clients.
    """
    trained: dict[str, None] = {}
    rewritten = method.rewritten(initial) if isinstance(method, Rewriting) else ()
    for pattern in patterns:
        if shared := [name for name in rewritten if _names(pattern, name)]:
            raise MethodError(
                f"method.personal names {pattern!r}, but the server of {method.card.name} rewrites {shared[0]} for all "
                "clients: name only tensors of the head"
            )
    for round_ in range(rounds if patterns else 1):
        state = State(initial, round=round_)
        plan = method.plan(state)
        trained |= dict.fromkeys(plan.trainable)
        sent = {name for pass_name in plan.passes for name, _ in method.layout(state, pass_name).entries}
        for pattern in patterns:
            bound = [name for name in plan.trainable if _names(pattern, name) and name not in sent]
            if bound:
                raise MethodError(
                    f"method.personal names {pattern!r}, but {method.card.name} sends {bound[0]} only inside a product"
                )
    for pattern in patterns:
        if not any(_names(pattern, name) for name in trained):
            shown = ", ".join(list(trained)[:3])
            raise MethodError(
                f"method.personal names {pattern!r}, but no trained tensor is called so; there are {shown}, ..."
            )
    return tuple(name for name in trained if any(_names(pattern, name) for pattern in patterns))


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(pattern + ".")
