"""The clients and the server of a federation, each with what it needs of the rest and no more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from secure_fed.canaries import canary_benches
from secure_fed.client import Client, Workbench
from secure_fed.run_budget import charges_nothing
from secure_fed.server import Server
from secure_fed.server_optimizer import ServerOptimizer
from secure_fed.summation import PlainSum

if TYPE_CHECKING:
    from secure_fed.federation import Federation


def clients(federation: Federation, personal: tuple[str, ...]) -> list[Client]:
    """One for each part of the data, all on one bench; personal: names of tensors that stay with them."""
    config, parts, watch = federation.config, federation.parts, federation.watch
    bench = Workbench(
        objective=federation.objective,
        method=federation.method,
        protection=federation.protection,
        training=config.training,
        collate=parts.collate,
        initial=federation.initial.tensors,
        personal=personal,
        by_examples=config.federation.weighting == "examples",
        seed=config.federation.seed,
        group_examples=config.privacy.group_examples,
        allowance=federation.purse.allowance,
        watch=watch.see if watch and watch.local else None,
    )
    groups: Sequence[Sequence[str] | None] = parts.groups or [None] * len(parts.train)
    named = zip(parts.names, parts.train, groups, strict=True)
    benches = canary_benches(config, federation.held, bench)
    return [Client(index, name, own, benches.get(name, bench), group) for index, (name, own, group) in enumerate(named)]


def server(federation: Federation, personal: tuple[str, ...]) -> Server:
    """The one that sums; it is given no example, and of a masked sum no summand."""
    settings, protection = federation.config.federation, federation.protection
    return Server(
        method=federation.method,
        protection=protection,
        sampler=federation.sampler,
        optimizer=ServerOptimizer.of(settings),
        names=federation.parts.names,
        personal=personal,
        skip_nonfinite=settings.nonfinite == "skip",
        seed=settings.seed,
        charge=federation.purse.charge if protection.place in ("sum", "shares") else charges_nothing,
        open_sum=partial(PlainSum, precise=protection.place == "sum"),
        masked=federation.masks.sums if federation.masks else None,
    )
