"""Models that differ between clients: personal tensors (`method.personal`), which never leave their client, and fewer ranks
(`method.ranks`).

Ranks by client: a client with a smaller machine trains a part of the global adapter's ranks.

The global adapter has rank r, with A (r, n) and B (m, r) beside every adapted matrix. The model of a client of rank k <= r has
the first k rows of A and the first k columns of B alone (HetLoRA: Cho et al., 2024, arXiv 2401.06432):

    W + s B[:, :k] A[:k]

The other ranks are left out, so the client has gradients and optimiser states of its own ranks alone. The scale s is that of
rank r at every client, alpha / r or alpha / sqrt(r): with alpha / k, the same factors would mean another change of W at another
client, and their mean would mean nothing.

What is sent has the layout of rank r at every client: masked sums and noise need one layout for all. So `method.ranks` saves
memory and time of local training, and no bytes. Let c_i be the weights of the clients and R their sum (under privacy, the
expected cohort). The change of a rank that client i does not train is exactly zero, so

    mean change of rank j  =  sum of c_i (change of rank j at client i), over the clients that train j  /  R.

A rank that few clients train therefore learns more slowly, by the share of these clients. R is never replaced by the weights of
the clients that train rank j: which of them were drawn may be secret, and noise is calibrated for one public divisor. With
B_i and A_i the factors that client i ends with, in all ranks, and dB_i and dA_i their changes:

    ffa_lora    mean(dB_i) A is the mean of the clients' changes dB_i A, exactly.
    fra_lora    mean(B_i A_i - B A) is the mean of the clients' changes, exactly, until it is split at rank r. The split orders
                ranks by singular values: a client of rank k receives the best approximation of rank k.
    fedlora     the server's change is mean(dB_i) A + B mean(dA_i) + mean(dB_i) mean(dA_i). The mean of the clients' changes has
                mean(dB_i dA_i) as its last term: the averaging error that fedlora also has at equal ranks.

Privacy. Ranks are settings, which everybody knows. Contributions, and gradients of private steps, are clipped over the numbers
that the client trains, so a unit moves a sum by the clip norm at most, whatever the rank. Noise on contributions and sums has
the full layout. Noise in a client's steps is on its own ranks: its other ranks are as the server sent them.

Deviations from HetLoRA: it pads factors with zeros, which pulls the ranks that few clients train towards zero; changes padded
with zeros do not. Its weights by the norms of clients' updates, and its pruning of clients' ranks, are left out: both are
functions of private data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods.method import Method, Rewriting, State
from secure_fed.tensors.tensors import Tensors


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


def require_ranks(config: RunConfig, names: Sequence[str]) -> None:
    """Refuse `method.ranks` that leave out one of the clients `names`, or that name another client."""
    given = config.method.ranks_by_name
    if missing := [name for name in names if given and name not in given]:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = f"method.ranks has no rank for client {missing[0]!r}{others}: add NAME=RANK for every client"
        raise ConfigError(message).about("method.ranks", config.method.ranks, "a rank for every client")
    if unknown := sorted(given.keys() - set(names)):
        shown = ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])])
        message = f"method.ranks names {unknown[0]!r}, but the clients are {shown}: leave it out"
        raise ConfigError(message).about("method.ranks", config.method.ranks, f"names among {shown}")


def require_shared_factors(config: RunConfig, tensors: Tensors, personal: Collection[str]) -> None:
    """Refuse personal factors beside `method.ranks`.

    A client of few ranks would have predictions from ranks of its own that it never trained.
    """
    factors = {name for pair in pairs(tensors) for name in (pair.a, pair.b)}
    if config.method.ranks and (own := sorted(factors & set(personal))):
        raise ConfigError(
            f"method.personal keeps {own[0]} on each client, which method.ranks excludes: name only tensors of the head"
        ).about("method.personal", config.method.personal, "tensors of the head")


def part(tensors: Tensors, rank: int) -> Tensors:
    """The tensors of a client of this rank: the first rows of every A and the first columns of every B, the rest unchanged."""
    cut: dict[str, Tensor] = {}
    for pair in pairs(tensors):
        cut[pair.a] = tensors.tensor(pair.a)[:rank].contiguous()
        cut[pair.b] = tensors.tensor(pair.b)[:, :rank].contiguous()
    return tensors | cut


def whole(trained: Tensors, before: Tensors) -> Tensors:
    """Trained tensors in the shapes of `before`, with the numbers of `before` in the ranks that the client did not train."""
    return Tensors((name, _filled(trained.tensor(name), before.tensor(name))) for name in trained)


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(pattern + ".")


def _filled(trained: Tensor, before: Tensor) -> Tensor:
    if trained.shape == before.shape:
        return trained
    found = before.clone()
    found[tuple(map(slice, trained.shape))] = trained
    return found
