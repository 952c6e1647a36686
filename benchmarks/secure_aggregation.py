"""The cost of secure aggregation for a client and the server, compared with the bare masks and with Flower's SecAgg+.

    OMP_NUM_THREADS=1 python benchmarks/secure_aggregation.py [--dim 300000 ...] [--clients 50 ...] [--plot FILE.png]

n clients with k neighbours each sum vectors of d numbers in 32-bit words, on one thread. k and the threshold t are chosen for
10 % corrupt and 20 % dropped clients; with up to 50 clients, all are neighbours of each other. Ways in one table alternate;
medians over the turns are printed.

    AES, ChaCha  the lower limit: k keystreams of AES-256-CTR or ChaCha20, and k additions in place, in blocks that stay in
                 cache. A client makes k + 1, including its own mask
    masks        k + 1 keystreams and additions with our code
    ours         a whole stage, from the server's message to the bytes of the answer: for a mask, also opening k shares, k
                 agreements and key derivations. `encode` is the fixed-point encoding before it, which the limit excludes
    Flower       the same stage with Flower's own functions (`flower_secagg.py`), including quantisation; same number of
                 neighbours, same threshold. Flower / ours includes our encoding

A client's mask depends only on its neighbours, so it is timed in a session of k + 1 clients; its share stage is timed in a
session of all n, with vectors of one number. The server is timed in a session of all n, unless its clients would make more than
--budget GB of masks: then with as many as fit (`on`), with the same k and t. Flower's server is slow, so it is timed only with
--flower-server clients, a tenth of them dropped, at d = 300,000.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from functools import partial
from pathlib import Path
from types import ModuleType

from growth_fit import Panel, Point, plot, spread
from secure_aggregation_ours import (
    Session,
    aes,
    chacha,
    chosen,
    dropouts,
    expanded,
    keystreams,
    served,
    update,
)
from timing import Limit, at_least, at_most, machine, medians, show, timed, turns

from protocols.thresholds import Choice

STATED = 300_000  # vector size of the limits for shares and the server
LIMIT, FASTER, MUCH_FASTER, WORD = 1.5, 5, 50, 4.01  # bytes a number: 4, and a header
GB = 1e9


def flower() -> ModuleType | None:
    try:
        return importlib.import_module("flower_secagg")
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "flwr":
            raise
        print('Flower is left out; it is installed by   pip install -e ".[flower]"')
        return None


def cell(value: float | None, width: int, places: int = 1) -> str:
    return f"{'-' if value is None else f'{value:,.{places}f}':>{width}}"


def masks(
    dims: list[int], choices: list[Choice], peer: ModuleType | None, repeats: int, limits: list[Limit]
) -> list[Point]:
    print("\nOne client's masked vector, ms; bytes a number")
    print(f"{'d':>11}{'n':>6}{'k':>5}{'AES':>9}{'ChaCha':>9}{'masks':>9}{'/ AES':>7}{'ours':>9}{'/ AES':>7}", end="")
    print(f"{'bytes':>8}{'encode':>8}{'Flower':>10}{'/ ours':>7}{'bytes':>8}")
    once = {choice.neighbours: choice for choice in reversed(choices)}  # equally many neighbours mean the same work
    return [masked(dim, choice, peer, repeats, limits) for dim in dims for choice in reversed(once.values())]


def masked(dim: int, choice: Choice, peer: ModuleType | None, repeats: int, limits: list[Limit]) -> Point:
    k = choice.neighbours
    session = Session(choice, k + 1, dim)
    session.share_all()
    ways = {"AES": keystreams(aes, dim, k), "ChaCha": keystreams(chacha, dim, k)}
    ways |= {"masks": expanded(dim, k + 1), "ours": session.mask_one, "encode": timed(session.encode)}
    sizes: list[int] = []
    if peer:
        theirs = peer.masking(update(dim), k)
        ways["Flower"] = timed(lambda: sizes.append(theirs()))
    found = medians(turns(ways, min(repeats, k + 1)))
    size, where = session.sent / dim, f"d = {dim:,}, k = {k}"
    for way, name in (("masks", "masks alone"), ("ours", "whole stage")) if dim >= STATED else ():
        over = found[way] / found["AES"]
        limits.append(at_most(f"{name} over bare masks, {where}", over, LIMIT))
    limits.append(at_most(f"bytes a number, {where}", size, WORD))
    print(f"{dim:11,}{choice.clients:6}{k:5}{cell(1e3 * found['AES'], 9)}{cell(1e3 * found['ChaCha'], 9)}", end="")
    for way in ("masks", "ours"):
        print(cell(1e3 * found[way], 9) + cell(found[way] / found["AES"], 7, 2), end="")
    print(cell(size, 8, 3) + cell(1e3 * found["encode"], 8), end="", flush=True)
    if peer:
        gain = found["Flower"] / (found["ours"] + found["encode"])
        limits.append(at_least(f"whole stage, Flower over ours, {where}", gain, FASTER))
        print(cell(1e3 * found["Flower"], 10) + cell(gain, 7) + cell(sizes[0] / dim, 8, 3), end="")
    print(flush=True)
    return Point(k * dim, found["ours"], f"k = {k}")


def shares(choices: list[Choice], peer: ModuleType | None, repeats: int, limits: list[Limit]) -> None:
    print("\nOne client's share stage: agreements, shares of two secrets, sealing")
    print(f"{'n':>11}{'k':>6}{'t':>5}{'ours ms':>10}{'Flower ms':>11}{'/ ours':>8}   bytes")
    for choice in choices:
        shared(choice, peer, repeats, limits)


def shared(choice: Choice, peer: ModuleType | None, repeats: int, limits: list[Limit]) -> None:
    session = Session(choice, choice.clients, 1)
    ways, sizes = {"ours": session.share_one}, list[int]()
    if peer:
        theirs = peer.sharing(choice.neighbours, choice.threshold)
        ways["Flower"] = timed(lambda: sizes.append(theirs()))
    found = medians(turns(ways, repeats))
    print(f"{choice.clients:11}{choice.neighbours:6}{choice.threshold:5}" + cell(1e3 * found["ours"], 10, 2), end="")
    if peer:
        gain = found["Flower"] / found["ours"]
        print(cell(1e3 * found["Flower"], 11) + cell(gain, 8) + f"   {session.sent:,}, Flower {sizes[0]:,}", flush=True)
        if choice.clients == 50:
            limits.append(at_least("shares, Flower over ours, n = 50", gain, MUCH_FASTER))
    else:
        print(cell(None, 11) + cell(None, 8) + f"   {session.sent:,}", flush=True)


def unmasked(choice: Choice, drops: int) -> float:
    return served(choice, choice.clients, STATED, drops).unmask


def against_flower(choices: list[Choice], peer: ModuleType, repeats: int, limits: list[Limit]) -> None:
    print(f"\nThe server's unmasking, a tenth dropped, d = {STATED:,}")
    print(f"{'n':>11}{'dropped':>9}{'ours ms':>10}{'Flower ms':>11}{'/ ours':>8}")
    for choice in choices:
        n, drops = choice.clients, dropouts(choice.clients, 0.1)
        driven = peer.Round([update(STATED)] * n, choice.threshold, drops)
        ours = partial(unmasked, choice, drops)
        found = medians(turns({"ours": ours, "Flower": driven.unmask}, repeats))
        if abs(driven.mean() - update(STATED)).max() > 2 * peer.STEP:  # all clients have this vector
            raise RuntimeError("Flower's mean is not the clients' mean, so what was timed is not its protocol.")
        gain = found["Flower"] / found["ours"]
        print(
            f"{n:11}{drops:9}" + cell(1e3 * found["ours"], 10) + cell(1e3 * found["Flower"], 11) + cell(gain, 8),
            flush=True,
        )
        if n == 50:
            limits.append(at_least("unmasking, Flower over ours, n = 50", gain, MUCH_FASTER))


def servers(dims: list[int], choices: list[Choice], given: argparse.Namespace) -> list[Point]:
    print("\nThe server: adding up masked vectors, unmasking their sum; every sum was checked")
    print(f"{'d':>11}{'n':>6}{'k':>5}{'on':>6}{'dropped':>9}{'add ms':>10}{'unmask ms':>11}   bytes that a client sent")
    points = []
    for dim in dims:
        for choice in choices:
            k = choice.neighbours
            members = min(choice.clients, int(given.budget * GB / (4 * k * dim)))
            print(f"{dim:11,}{choice.clients:6}{k:5}", end="")
            if members <= k:
                print(f"  left out: {k + 1} clients would make more than {given.budget:g} GB of masks")
                continue
            named = {dropouts(members, share): f"{share:.0%} dropped" for share in reversed(given.dropout)}
            for row, drops in enumerate(sorted(named)):
                runs = [served(choice, members, dim, drops) for _ in range(given.server_repeats)]
                add, unmask = (statistics.median(getattr(run, part) for run in runs) for part in ("collect", "unmask"))
                print(f"{members:{28 if row else 6}}{drops:9}{cell(1e3 * add, 10)}{cell(1e3 * unmask, 11)}", end="")
                print(f"   {runs[0].uploaded:,}", flush=True)
                points.append(Point(members * dim + drops * k * dim, add + unmask, named[drops]))
    return points


def growth(of_clients: list[Point], of_servers: list[Point], place: Path | None) -> None:
    """Print the fits, and plot them if there are enough sizes."""
    panels = [
        Panel("One client's masking", "k d: neighbours x words", of_clients),
        Panel("The server: adding up and unmasking", "n d + drops k d: words", of_servers),
    ]
    print("\nGrowth, against the documented cost")
    for panel in panels:
        print(panel)
    if place and all(spread(panel.points) for panel in panels):
        plot(panels, place)
        print(f"    drawn in {place.name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[100_000, STATED, 1_200_000, 10_000_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50, 200, 1000])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.05, 0.2])
    parser.add_argument("--flower-server", type=int, nargs="*", default=[10, 50], metavar="CLIENTS")
    parser.add_argument("--no-flower", action="store_true")
    parser.add_argument("--repeats", type=int, default=5, help="turns of a client's stage")
    parser.add_argument("--server-repeats", type=int, default=3, help="turns of the server, for which all clients work")
    parser.add_argument("--budget", type=float, default=100.0, help="GB of masks that a session's clients may make")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    peer = None if given.no_flower else flower()
    print(machine("numpy", "cryptography", "flwr"))
    choices = [chosen(n) for n in given.clients]
    limits: list[Limit] = []
    of_clients = masks(given.dim, choices, peer, given.repeats, limits)
    shares(choices, peer, given.repeats, limits)
    if peer and given.flower_server:
        against_flower([chosen(n) for n in given.flower_server], peer, given.server_repeats, limits)
    of_servers = servers(given.dim, choices, given)
    growth(of_clients, of_servers, given.plot)
    show(limits)


if __name__ == "__main__":
    main()
