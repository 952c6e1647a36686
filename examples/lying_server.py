"""A lying server: what it learns from one client's update, and which defences stop it. One minute.

    python examples/lying_server.py

The client fine-tunes a LoRA adapter and a head on eight notes. The server sends it a crafted head, identifies the notes among a
thousand candidates, and counts their labels. `secure-fed audit lying CONFIG.toml` does the same for a configuration of your
own.
"""

from attacks.adversary.lying_server import LyingServer
from attacks.lying import lies
from attacks.lying.trials import Table, audited
from secure_fed import Federation, RunConfig, heartbeat

SETTINGS = ["federation.clients=40", "data.examples=320", "data.test_examples=2000", "method.name=fedlora"]
NOISE = ["privacy.unit=client", "privacy.noise=local", "privacy.epsilon=8", "evaluation.dummies=0"]


def server(*settings: str) -> LyingServer:
    """A server that lies in the second round, to clients that check its requests."""
    return LyingServer(Federation(RunConfig.load(None, [*SETTINGS, *settings])).assembly)


with heartbeat():  # says on a terminal what it is doing
    # One attack by hand: traps in the head, and the notes that the update points at.
    table = Table.laid(server(), each=8, seed=0)
    held = table.deal()
    answer, _ = table.answer(lies.traps(table.head, table.public_inputs, table.server.limit), held)
    named = lies.named(table.head, answer, table.inputs, most=8, signs=table.adamw)
    print(f"of 8 notes, {len(set(named) & set(held))} are named among {len(table.candidates)}")

    # The label counts of the same notes, from another crafted head.
    answer, _ = table.answer(lies.flat(table.head, "adamw"), held)
    print("labels:", lies.counts(table.head, answer, "adamw", table.server.lr, steps=1, examples=8).tolist())

    # Three attacks, with and without noise added by the client.
    for settings in ([], NOISE):
        for cell in audited(server(*settings), ["traps", "membership", "replay"], trials=10)["cells"]:
            print(
                f"{'with noise' if settings else 'plain':10} {cell['attack']:12} {cell['hits']} of {cell['of']} trials"
            )
