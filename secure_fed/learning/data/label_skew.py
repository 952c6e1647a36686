"""The partitions that skew labels or languages over clients, and classes for examples that have no single label.

Each partition names the paper that uses it. All give each example to exactly one client, leave no client empty, and give the
same parts for the same arguments and `rng` state. A part is a sorted array of example indices; `owner[i]` is the client of
example i.

`label_sets` and `clusters` return one class number for each example, from 0 without gaps. FeDeRA (appendix A.2) skews entity
recognition by the entities of a sentence and question answering by k-means over the texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from secure_fed.errors import ConfigError, DataError

Indices = NDArray[np.int64]
_ROUNDING = 1e-6
_SMALLEST_CONCENTRATION = 1e-290  # below this a logarithm of a Gamma draw overflows
_COLUMNS = 4096
_STEPS = 50
_WORD = re.compile(r"\w+")


def dirichlet(labels: Sequence[int], clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Label-skewed parts after FeDeRA (appendix A.3): X_i ~ Dir(alpha m), m the class shares of the data.

    `alpha` -> infinity gives every client the class shares of the data, `alpha` -> 0 a single class each.

    A.3 leaves open how examples follow from the X_i when classes run out. Here one multinomial draw assigns all
    examples of a class c, to client i with probability X_ic / sum_k X_kc. As E[X_ic] = m_c, client i's expected
    counts are near (examples / clients) X_ic, no example is left over, and the order of clients does not matter.
    Sizes vary more for smaller `alpha`. An empty client gets one random example of the client with most, one
    client after the other.
    """
    require_enough(len(labels), clients)
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    shares = log_shares(counts / counts.sum(), clients, alpha, rng)  # (clients, classes)
    chances = np.exp(shares - shares.max(axis=0))
    return by_chance(labels, chances / chances.sum(axis=0), rng)


def label_dirichlet(labels: Sequence[int], clients: int, beta: float, rng: np.random.Generator) -> list[Indices]:
    """Every class c is divided over the clients by its own draw p_c ~ Dir(beta 1), after C2A (section 4.2).

    A client's share of a class is a Beta(beta, beta (clients - 1)) variable: `beta` -> infinity gives every client the class
    shares of the data, `beta` -> 0 each class to a single client. Unlike in FeDeRA's split (`dirichlet`), clients' sizes vary
    as much as their labels. An empty client gets one random example of the client with most, one client after the other.
    """
    require_enough(len(labels), clients)
    classes = len(np.unique(np.asarray(labels)))
    chances = np.exp(log_shares(np.ones(clients), classes, beta, rng)).T  # (clients, classes)
    return by_chance(labels, chances / chances.sum(axis=0), rng)


def by_language(
    labels: Sequence[int], languages: Sequence[str], clients: int, beta: float, rng: np.random.Generator
) -> list[Indices]:
    """C2A's language split (section 4.2): each client has one language, and `label_dirichlet` divides a language's examples
    over its clients.

    Clients are divided at random into groups whose sizes differ by at most one, a group for each language, however many
    examples it has.
    """
    require_enough(len(labels), clients)
    spoken = sorted(set(languages))
    if clients < len(spoken):
        raise ConfigError(
            f"federation.clients is {clients}, fewer than the {len(spoken)} languages of data.language; "
            f"set it to at least {len(spoken)}"
        )
    divided: list[Indices] = [np.empty(0, dtype=np.int64)] * clients
    groups = np.array_split(rng.permutation(clients), len(spoken))
    for language, group in zip(spoken, groups, strict=True):
        members = np.array([index for index, own in enumerate(languages) if own == language])
        if len(members) < len(group):
            raise DataError(
                f"the language {language!r} has {len(members)} training examples for {len(group)} clients; "
                f"set federation.clients to at most {len(members) * len(spoken)} or give more data"
            )
        within = label_dirichlet([labels[int(index)] for index in members], len(group), beta, rng)
        for client, part in zip(group, within, strict=True):
            divided[int(client)] = members[part]
    return divided


def pathological(labels: Sequence[int], clients: int, each: int, rng: np.random.Generator) -> list[Indices]:
    """Exactly `each` labels per client, after FedARA (section V), which follows FedAvg's shards.

    FedAvg cuts the sorted examples into clients x `each` equal shards, some of which have two labels. Here a shard has one
    label: every label gets shards in proportion to its examples, at least one and at most the number of clients, and its
    examples are divided equally over them. Clients get shards of different labels at random.
    """
    require_enough(len(labels), clients)
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    shards = _shards(counts, clients, each)
    owner = np.empty(len(labels), dtype=np.int64)
    class_of = np.unique(np.asarray(labels), return_inverse=True)[1]
    for label, holders in _holders(shards, clients, rng).items():
        members = rng.permutation(np.flatnonzero(class_of == label))
        for holder, shard in zip(holders, np.array_split(members, len(holders)), strict=True):
            owner[shard] = holder
    return parts_of(owner, clients)


def _shards(counts: Indices, clients: int, each: int) -> Indices:
    """The number of shards of each label, clients x `each` in all; no shard is empty, and no label comes twice at a client."""
    most = np.minimum(counts, clients)
    wanted, labels = clients * each, len(counts)
    if each > labels:
        raise ConfigError(
            f"data.labels_per_client is {each} and the data have {labels} labels; set it to at most {labels}"
        )
    if wanted < labels:
        raise ConfigError(
            f"{clients} clients with {each} labels each cannot hold all {labels} labels; "
            f"set data.labels_per_client to at least {-(-labels // clients)} or raise federation.clients"
        )
    if wanted > most.sum():
        raise DataError(
            f"{counts.sum()} training examples are too few for {clients} clients with {each} labels each; "
            "lower data.labels_per_client or federation.clients"
        )
    shards = np.ones(labels, dtype=np.int64)
    for _ in range(wanted - labels):
        shards[np.where(shards < most, counts / shards, 0).argmax()] += 1
    return shards


def _holders(shards: Indices, clients: int, rng: np.random.Generator) -> dict[int, list[int]]:
    """The clients of each label's shards: every client has equally many, and no client has a label twice.

    Shards are in a row, label after label in random order, and of every `clients` shards each client takes one. Only a label
    that crosses the border of two such turns could come to a client twice; its rest goes to other clients first.
    """
    order = rng.permutation(len(shards))
    row = np.repeat(order, shards[order])
    holders: dict[int, list[int]] = {int(label): [] for label in order}
    for start in range(0, len(row), clients):
        turn = row[start : start + clients]
        waiting = rng.permutation(clients)
        held = holders[int(turn[0])]
        across = int((turn == turn[0]).sum())
        free = waiting[~np.isin(waiting, held)][:across]
        others = waiting[~np.isin(waiting, free)]
        for label, client in zip(turn, [*free, *others], strict=True):
            holders[int(label)].append(int(client))
    return holders


def by_matrix(
    labels: Sequence[int], shares: Sequence[Sequence[float]], rng: np.random.Generator, clients: int | None = None
) -> list[Indices]:
    """Client k gets the share `shares[c][k]` of the examples of label c, after FRA-LoRA (tables II and IV).

    Sizes are rounded by largest remainders; examples are assigned at random.
    """
    table, classes = np.asarray(shares, dtype=np.float64), max(labels, default=-1) + 1  # (labels, clients)
    if len(table) < classes:
        raise ConfigError(
            f"data.matrix has {len(table)} rows and the data {classes} labels; give one row for each, in their order"
        )
    if clients not in (None, table.shape[1]):
        raise ConfigError(
            f"federation.clients is {clients} and data.matrix has {table.shape[1]} columns, one for each client; "
            "leave federation.clients out"
        )
    require_enough(len(labels), table.shape[1])
    array, owner = np.asarray(labels), np.empty(len(labels), dtype=np.int64)
    for label, row in enumerate(table):
        members = rng.permutation(np.flatnonzero(array == label))
        owner[members] = np.repeat(np.arange(len(row)), by_share(len(members), row))
    return parts_of(fill_empty(owner, table.shape[1], rng), table.shape[1])


def matrix_of(text: str) -> list[list[float]]:
    """ "0.9 0.1; 0.1 0.9" as rows of numbers of equal length, one row for each label."""
    rows = [row.split() for row in text.split(";")]
    try:
        table = [[float(entry) for entry in row] for row in rows]
    except ValueError as error:
        raise ConfigError(
            f"data.matrix is {text!r:.80}; write a row of numbers for each label, separated by ';': '0.9 0.1; 0.1 0.9'"
        ) from error
    for index, row in enumerate(table):
        if not row or len(row) != len(table[0]):
            raise ConfigError(
                f"row {index + 1} of data.matrix has {len(row)} numbers and the first {len(table[0])}; "
                "give each label one for every client"
            )
        if not all(0 <= entry <= 1 for entry in row) or abs(sum(row) - 1) > _ROUNDING:
            raise ConfigError(
                f"row {index + 1} of data.matrix is {row!r:.80}; its numbers must be shares that add up to 1"
            )
    if idle := [client for client in range(len(table[0])) if not any(row[client] for row in table)]:
        raise ConfigError(f"column {idle[0] + 1} of data.matrix is all zeros; leave out the client without examples")
    return table


def require_enough(count: int, clients: int) -> None:
    """Refuse to divide fewer examples than there are clients."""
    if count < clients:
        raise DataError(
            f"{count} training examples cannot be divided over {clients} clients with one each; "
            f"set federation.clients to at most {count} or give more data"
        )


def log_shares(prior: NDArray[np.float64], clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of `clients` draws from Dir(alpha prior), one in each row: (clients, classes).

    In logarithms, because at small `alpha` the shares themselves round to zero, and a class of which every
    client has share zero could not be divided. Gamma(a) is drawn as Gamma(a + 1) U^(1/a).
    """
    concentration = np.maximum(alpha * prior, _SMALLEST_CONCENTRATION)
    shape = (clients, len(prior))
    log_gamma = np.log(rng.standard_gamma(concentration + 1, size=shape))
    log_gamma += np.log1p(-rng.random(shape)) / concentration
    log_gamma -= log_gamma.max(axis=1, keepdims=True)
    return np.asarray(log_gamma - np.log(np.exp(log_gamma).sum(axis=1, keepdims=True)))


def by_chance(labels: Sequence[int], chances: NDArray[np.float64], rng: np.random.Generator) -> list[Indices]:
    """Each class is divided by one multinomial draw with `chances` (clients, classes), for the present classes in order.

    An empty client gets one random example of the client with most, one client after the other.
    """
    class_of = np.unique(np.asarray(labels), return_inverse=True)[1]
    clients = len(chances)
    owner = np.empty(len(labels), dtype=np.int64)
    for index in range(chances.shape[1]):
        members = np.flatnonzero(class_of == index)
        sizes = rng.multinomial(len(members), chances[:, index])
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), sizes)
    return parts_of(fill_empty(owner, clients, rng), clients)


def by_share(count: int, shares: NDArray[np.float64]) -> Indices:
    """`count` divided in proportion to `shares`, rounded by largest remainders (the first of equal ones): the sum is exact."""
    quota = count * shares / shares.sum()
    sizes: Indices = np.floor(quota).astype(np.int64)
    largest = np.argsort(sizes - quota, kind="stable")[: count - int(sizes.sum())]
    sizes[largest] += 1
    return sizes


def fill_empty(owner: Indices, clients: int, rng: np.random.Generator) -> Indices:
    """Give each client without an example a random example of the client that has most at that moment."""
    sizes = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        owner[rng.choice(np.flatnonzero(owner == largest))] = empty
        sizes[largest] -= 1
        sizes[empty] = 1
    return owner


def parts_of(owner: Indices, clients: int) -> list[Indices]:
    """The examples of each client, in their order."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def label_sets(sets: Sequence[Collection[str]], sources: Sequence[str] | None = None) -> list[int]:
    """A class for every present combination of a set of entity types and a source: `sets[i]` is example i's set.

    Order and repetition in a set are ignored, and classes are numbered by source and then by types, so the numbers depend only
    on the present combinations. The empty set is a class. Rare sets are separate classes: the Dirichlet prior weights a class
    by its share, so a rare class neither crowds out another nor leaves a client empty.
    """
    origins = [""] * len(sets) if sources is None else sources
    found = [(origin, tuple(sorted(set(types)))) for origin, types in zip(origins, sets, strict=True)]
    number = {one: index for index, one in enumerate(sorted(set(found)))}
    return [number[one] for one in found]


def clusters(texts: Sequence[str], count: int = 30, seed: int = 0) -> list[int]:
    """The k-means cluster of each text, at most `count` clusters, fewer if there are fewer different texts.

    A text is a vector of its words' frequencies, hashed to 4,096 columns, weighted by inverse document frequency, and scaled to
    length one; similarity is then the cosine. Centres start as in k-means++: each next centre is a text drawn with a
    probability proportional to its squared distance from the centres so far. The steps end when no text changes its cluster,
    or after 50 steps. The same arguments give the same clusters.
    """
    if not len(texts):
        return []
    points = _weighed(texts)
    centres = _spread(points, count, np.random.default_rng(seed))
    nearest = np.full(len(texts), -1)
    for _ in range(_STEPS):
        before, nearest = nearest, np.asarray((points @ centres.T).argmax(axis=1))
        if np.array_equal(before, nearest):
            break
        centres = _means(points, nearest, centres)
    return [int(index) for index in np.unique(nearest, return_inverse=True)[1]]


def _weighed(texts: Sequence[str]) -> csr_array:
    """(texts, columns), every row of length one, or zero for a text without words."""
    column: dict[str, int] = {}
    found: list[int] = []
    ends = [0]
    for text in texts:
        for word in _WORD.findall(text.lower()):
            if word not in column:
                column[word] = crc32(word.encode("utf-8", "replace")) % _COLUMNS
            found.append(column[word])
        ends.append(len(found))
    counts = csr_array((np.ones(len(found)), np.array(found, dtype=np.int32), ends), shape=(len(texts), _COLUMNS))
    counts.sum_duplicates()
    documents = np.bincount(counts.indices, minlength=_COLUMNS)
    values = (1 + np.log(counts.data)) * np.log((1 + len(texts)) / (1 + documents))[counts.indices]
    rows = np.repeat(np.arange(len(texts)), np.diff(counts.indptr))
    lengths = np.sqrt(np.bincount(rows, weights=values**2, minlength=len(texts)))
    values = values / np.where(lengths > 0, lengths, 1)[rows]
    return csr_array((values, counts.indices, counts.indptr), shape=counts.shape)


def _spread(points: csr_array, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The initial centres, (at most `count`, columns), all different."""
    squares = np.asarray((points * points).sum(axis=1), dtype=np.float64)
    chosen = [points[[int(rng.integers(points.shape[0]))]].toarray()[0]]
    distance = _squared(points, squares, chosen[0])
    while len(chosen) < count and distance.max() > 1e-9:  # below is rounding: every text equals a centre
        drawn = int(rng.choice(len(distance), p=distance / distance.sum()))
        chosen.append(points[[drawn]].toarray()[0])
        distance = np.minimum(distance, _squared(points, squares, chosen[-1]))
    return np.array(chosen)


def _squared(points: csr_array, squares: NDArray[np.float64], centre: NDArray[np.float64]) -> NDArray[np.float64]:
    """|x - c|^2 of every point x, (points,)."""
    distance: NDArray[np.float64] = squares - 2 * (points @ centre) + centre @ centre
    return np.where(distance > 1e-9, distance, 0.0)


def _means(points: csr_array, nearest: NDArray[np.int64], centres: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every cluster's mean direction; a cluster without points keeps its centre."""
    members = csr_array((np.ones(len(nearest)), (nearest, np.arange(len(nearest)))), shape=(len(centres), len(nearest)))
    sums = (members @ points).toarray()
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(lengths > 0, sums / np.where(lengths > 0, lengths, 1), centres)
