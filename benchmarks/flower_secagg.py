"""Flower's SecAgg+, driven in one process without a network: every number comes from Flower's own functions.

    python benchmarks/flower_secagg.py [--clients 10]      is a driven round's sum right?

`secure_aggregation.py` times these stages beside ours. `Round` runs the four stages of Flower's `SecAggPlusWorkflow` against
clients that answer through Flower's own client modifier; `masking` and `sharing` call the modifier's stage functions for one
client. All parameters are the workflow's defaults: values of at most 8 in steps of 2^-18, sums modulo 2^32 in 64-bit words.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import cast

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.typing import ConfigRecordValues
from flwr.client.mod.secure_aggregation.secaggplus_mod import (
    SecAggPlusState,
    _collect_masked_vectors,
    _setup,
    _share_keys,
    secaggplus_mod,
)
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp.grid import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

RUN = 1
DEFAULTS = SecAggPlusWorkflow(1.0, 1.0)
EXAMPLES = round(DEFAULTS.max_weight)  # at this number a client's weight is one
STEP = 2.0**-18  # of Flower's quantisation: range 2 * 8 in 2^22 steps

logging.getLogger("flwr").setLevel(logging.ERROR)

Upload = Callable[[], int]  # performs one client's stage once; returns the bytes that it uploads


class EveryClient(FedAvg):
    """A strategy without cost: it selects all clients, and passes on the mean that the workflow puts into every result."""

    def __init__(self, proxies: list[ClientProxy]) -> None:
        super().__init__()
        self.proxies = proxies

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        return [(proxy, FitIns(parameters, {})) for proxy in self.proxies]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        return results[0][1].parameters, {}


class Loopback(Grid):
    """Clients in this process. `dropped` ones send nothing from the masked vectors on. seconds: the clients' time so far."""

    def __init__(self, vectors: dict[int, NDArray[np.float32]], dropped: frozenset[int]) -> None:
        self.vectors, self.dropped, self.seconds = vectors, dropped, 0.0
        self.contexts = {node: Context(RUN, node, {}, RecordDict(), {}) for node in vectors}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        started = time.perf_counter()
        replies = [reply for message in messages if (reply := self.answer(message))]
        self.seconds += time.perf_counter() - started
        return replies

    def answer(self, message: Message) -> Message | None:
        message.content = copy.deepcopy(message.content)  # the clients' stages modify their instructions
        node = message.metadata.dst_node_id
        masked = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE] == Stage.COLLECT_MASKED_VECTORS
        if masked and node in self.dropped:
            return None
        return secaggplus_mod(message, self.contexts[node], self.train)

    def train(self, message: Message, context: Context) -> Message:
        trained = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([self.vectors[context.node_id]]), EXAMPLES, {})
        return Message(compat.fitres_to_recorddict(trained, False), reply_to=message)

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return self.vectors

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


class Round:
    """A round up to the masked vectors; `unmask` may then be repeated. All clients are neighbours of each other."""

    def __init__(self, vectors: list[NDArray[np.float32]], threshold: int, drops: int) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 0, 0
        nodes = range(1, len(vectors) + 1)
        self.grid = Loopback(dict(zip(nodes, vectors, strict=True)), frozenset(nodes[:drops]))
        proxies: list[ClientProxy] = [GridClientProxy(node, self.grid, RUN) for node in nodes]
        records = RecordDict(
            {
                MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1}),
                MAIN_PARAMS_RECORD: compat.parameters_to_arrayrecord(ndarrays_to_parameters([]), False),
            }
        )
        self.context = LegacyContext(Context(RUN, 0, {}, records, {}), strategy=EveryClient(proxies))
        self.workflow, self.state = SecAggPlusWorkflow(1.0, threshold), WorkflowState()
        for stage in (
            self.workflow.setup_stage,
            self.workflow.share_keys_stage,
            self.workflow.collect_masked_vectors_stage,
        ):
            finished(stage(self.grid, self.context, self.state))
        self.contexts = copy.deepcopy(self.grid.contexts)

    def unmask(self) -> float:
        """The server's seconds after the clients' answers: combining shares, making masks and subtracting them."""
        self.grid.contexts = copy.deepcopy(self.contexts)
        state = copy.copy(self.state)
        state.nid_to_neighbours = copy.deepcopy(self.state.nid_to_neighbours)
        started, asked = time.perf_counter(), self.grid.seconds
        finished(self.workflow.unmask_stage(self.grid, self.context, state))
        return time.perf_counter() - started - (self.grid.seconds - asked)

    def mean(self) -> NDArray[np.float64]:
        record = self.context.state.array_records[MAIN_PARAMS_RECORD]
        return cast(NDArray[np.float64], parameters_to_ndarrays(compat.arrayrecord_to_parameters(record, True))[0])


def finished(stage: bool) -> None:
    if not stage:
        raise RuntimeError("Flower's secure aggregation halted: too few clients are left for this threshold.")


def advertised(node: int, holders: int, threshold: int) -> tuple[SecAggPlusState, tuple[bytes, bytes]]:
    """A client after its setup stage, and its public keys."""
    state = SecAggPlusState(nid=node)
    settings: dict[str, ConfigRecordValues] = {
        Key.SAMPLE_NUMBER: holders,
        Key.SHARE_NUMBER: holders,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: DEFAULTS.clipping_range,
        Key.TARGET_RANGE: DEFAULTS.quantization_range,
        Key.MOD_RANGE: DEFAULTS.modulus_range,
        Key.MAX_WEIGHT: DEFAULTS.max_weight,
    }
    keys = _setup(state, ConfigRecord(settings))
    return state, (cast(bytes, keys[Key.PUBLIC_KEY_1]), cast(bytes, keys[Key.PUBLIC_KEY_2]))


def shared(state: SecAggPlusState, keys: dict[int, tuple[bytes, bytes]]) -> dict[int, bytes]:
    """The share-keys stage of one client: sealed shares by receiver."""
    reply = _share_keys(state, ConfigRecord({str(node): list(pair) for node, pair in keys.items()}))
    return dict(
        zip(cast(list[int], reply[Key.DESTINATION_LIST]), cast(list[bytes], reply[Key.CIPHERTEXT_LIST]), strict=True)
    )


def sharing(neighbours: int, threshold: int) -> Upload:
    """One client's share-keys stage: it and its neighbours hold the shares."""
    holders = neighbours + 1
    state, own = advertised(1, holders, threshold)
    keys = {1: own} | {node: advertised(node, holders, threshold)[1] for node in range(2, holders + 1)}
    return lambda: sum(len(sealed) for sealed in shared(state, keys).values())


def masking(vector: NDArray[np.float32], neighbours: int) -> Upload:
    """One client's masked vector: opens shares, quantises the vector, and adds its own mask and one for each neighbour.

    The threshold does not enter this stage; neighbours make only the two shares that this client needs.
    """
    me, own = advertised(0, neighbours + 1, 2)
    others = {node: advertised(node, 2, 2) for node in range(1, neighbours + 1)}
    shared(me, {0: own} | {node: keys for node, (_, keys) in others.items()})
    sealed = {node: shared(state, {0: own, node: keys})[0] for node, (state, keys) in others.items()}
    delivered = ConfigRecord({Key.CIPHERTEXT_LIST: list(sealed.values()), Key.SOURCE_LIST: list(sealed)})
    trained = ndarrays_to_parameters([vector])

    def mask() -> int:
        reply = _collect_masked_vectors(me, delivered, EXAMPLES, trained)
        return sum(map(len, cast(list[bytes], reply[Key.MASKED_PARAMETERS])))

    return mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    clients = parser.parse_args().clients
    drops, dim = clients // 5, 1000
    steps = np.random.default_rng(0).integers(
        -(2**20), 2**20, (clients, dim)
    )  # whole steps are quantised without rounding
    driven = Round([(row * STEP).astype(np.float32) for row in steps], clients - drops - 1, drops)
    seconds = [driven.unmask() for _ in range(2)]
    right = np.array_equal(np.rint(driven.mean() * (clients - drops) / STEP), steps[drops:].sum(0))
    print(
        f"{clients} clients, {drops} dropped, {dim} values: the sum is {'right, bit for bit' if right else 'WRONG'}",
        end="",
    )
    print(f"; unmasking took {min(seconds):.2f} s")


if __name__ == "__main__":
    main()
