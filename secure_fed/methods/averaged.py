"""Averaged parameters: a client contributes its change of them, and the server adds the mean change.

This is federated averaging (McMahan et al., 2017) written in changes: with every client starting from the same
parameters p, p + mean(p_i - p) = mean(p_i).

`Averaged` is the method, and every other method is built on it. `TABLE` has the methods that only average, a row for each: what
they differ in is the adapter, and the text above a row has its paper, its guarantee and its deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.inserted import Bottlenecks, Compacters, Scales
from secure_fed.learning.models.adapters.lora import LORA_OPTIONS, LoraAdapter, LoraForm, Pair, pairs
from secure_fed.learning.models.adapters.parameters import Biases, Everything, HeadAlone, read
from secure_fed.learning.models.adapters.triplet import TripletAdapter
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens, Prefix, PromptTokens
from secure_fed.methods.method import CHANGE, Card, RoundPlan, State
from secure_fed.tensors.low_rank import Svd, balanced, truncated
from secure_fed.tensors.tensors import Layout, LowRank, Member, Tensors


class Adapter(Protocol):
    """Modules that are put into a model. Implementations are frozen dataclasses of settings."""

    def inject(self, model: nn.Module, head: Sequence[str], seed: int) -> Sequence[str]:
        """Put the adapter into `model` in place and return the names of its parameters, which need not all train.

        Only the parameters of the adapter and of the head remain trainable. A pure function of its arguments.
        """


@dataclass(frozen=True)
class Averaged:
    """A method that averages the trained tensors of its adapter and the head: by default all of them."""

    adapter: Adapter
    card: Card

    def prepare(self, model: nn.Module, head: Sequence[str], seed: int) -> Tensors:
        names = self.adapter.inject(model, head, seed)
        return read(model, dict.fromkeys([*names, *head]))

    def trained(self, state: State) -> Tensors:
        """The tensors that clients train in the round and send."""
        return state.tensors

    def plan(self, state: State) -> RoundPlan:
        names = tuple(self.trained(state))
        return RoundPlan(trainable=names, down=names)

    def layout(self, state: State, pass_name: str) -> Layout:
        return Layout.of(self.trained(state))

    def contribute(self, pass_name: str, before: Tensors, after: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        return change(before, after)

    def apply(self, state: State, means: Mapping[str, Tensors], noise_std: float = 0.0) -> State:
        return next_state(state, moved(state.tensors, means[CHANGE]))


@dataclass(frozen=True)
class AveragedLora(Averaged):
    """An `Averaged` method whose adapter is LoRA's, so that PEFT can load its exports."""

    adapter: LoraAdapter

    def blended(self, mean: Tensors, latest: Tensors, weight: float) -> Tensors:
        """The best rank-r approximation of the weighted mean of the products B A; the rest entry by entry.

        The mean factors would not give the mean product, and are meaningless where a method refactors products in every round.
        If one factor is the same, the other is averaged, exactly. So is A if B is personal: the server's own B never changes.
        """
        found = mean + (latest - mean) * weight
        for pair in pairs(mean):
            (a, b), (a_2, b_2) = ((side.tensor(pair.a), side.tensor(pair.b)) for side in (mean, latest))
            if torch.equal(a, a_2) or torch.equal(b, b_2):
                continue
            product = LowRank(b * (1 - weight), a) + LowRank(b_2 * weight, a_2)
            found |= factored(pair, product, a, b, self.factors)
        return found

    def factors(self, product: Svd) -> tuple[Tensor, Tensor]:
        """B and A of a mean product, split as in the method's own rounds."""
        return balanced(product)

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """A and B, or their change if they started as parts of W."""
        return self.adapter.form(initial, tensors)


@dataclass(frozen=True)
class AveragedTriplet(Averaged):
    """An `Averaged` method whose adapter changes a matrix by B E A with diagonal E."""

    adapter: TripletAdapter

    def as_lora(self, initial: Tensors, tensors: Tensors) -> LoraForm:
        """LoRA factors: A unchanged, and B E in place of B; modules without a rank are left out."""
        return self.adapter.form(tensors)


@dataclass(frozen=True, kw_only=True)
class Row(Card):
    """A method of the table: its card. adapter: makes its adapter. kind: the class that averages the tensors of the adapter and
    of the head.
    """

    adapter: Callable[[RunConfig], Any]
    kind: type[Averaged] = Averaged

    def build(self, run: RunConfig) -> Averaged:
        return self.kind(self.adapter(run), self)


def factored(
    pair: Pair, product: Member, a: Tensor, b: Tensor, split: Callable[[Svd], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The factors of the best rank-r approximation of a product, by name, of the shapes and types of A (r, n) and B (m, r)."""
    new_b, new_a = split(truncated(product, a.shape[0]))
    return {pair.a: new_a.to(a.dtype).contiguous(), pair.b: new_b.to(b.dtype).contiguous()}


def change(before: Tensors, after: Tensors) -> Tensors:
    """after - before, for the names in `after`."""
    return after - before.select(after)


def moved(tensors: Tensors, mean: Tensors) -> Tensors:
    """`tensors` with the mean change added to those that it names; the others are the same objects."""
    return tensors | (tensors.select(mean) + mean)


def next_state(state: State, tensors: Tensors) -> State:
    """The state one round later, with these tensors."""
    return replace(state, tensors=tensors, round=state.round + 1)


def _everything(run: RunConfig) -> Everything:
    """The whole model, which has to be stored as weights that can train."""
    if run.model.quantization != "none":
        raise ConfigError(
            f"method.name is 'fedft', which trains every weight, and model.quantization = {run.model.quantization!r} stores "
            "weights that cannot train: leave it out, or choose a method on LoRA"
        ).about("model.quantization", run.model.quantization, "none with fedft")
    if run.model.device_map:
        raise ConfigError(
            f"method.name is 'fedft', which trains every weight, and model.device_map = {run.model.device_map!r} keeps weights "
            "where they cannot train: leave it out, or choose a method on LoRA"
        ).about("model.device_map", run.model.device_map, "left out with fedft")
    return Everything()


_ROWS = (
    # FedFT: the whole model trains and is sent. Federated averaging as McMahan et al. (2017) have it, the baseline of FeDeRA
    # (Yan et al., arXiv 2404.18848, section 5.1) without parameter-efficient tuning.
    #
    #     w' = w + mean(w_i - w)   over every parameter w of the model.
    #
    # Guarantee: the mean is exact. With privacy every parameter is noised, so it takes very many clients (or examples) until a
    # change exceeds the noise; a method that trains fewer parameters is the better choice there.
    Row(
        name="fedft",
        paper="McMahan et al., arXiv 1602.05629; FedFT in Yan et al., arXiv 2404.18848",
        travels="the whole model",
        mean_exact=True,
        lr=1.5e-4,
        from_nothing=3e-3,
        adapter=_everything,
    ),
    # The classification layer alone: the frozen encoder's features are classified, and nothing of the encoder moves. A linear
    # probe, federated.
    #
    #     h' = h + mean(h_i - h)   over every parameter h of the head, and of the modules that `method.modules_to_save` names.
    #
    # The baseline that an adapter has to beat. Under privacy only a few thousand numbers are noised, so with an encoder that
    # fits the texts it is often the best choice (docs/private_silos.md).
    #
    # Guarantee: the mean is exact. A model without a task head, which generates text, is refused unless modules are named.
    Row(
        name="head",
        paper="the baseline of training no adapter",
        travels="head",
        mean_exact=True,
        head_factor=1.0,
        lr=1.5e-2,  # between the best rates for MiniLM, 0.03 at its width of 384, and for the built-in model, 0.005
        adapter=lambda run: HeadAlone(),
    ),
    # BitFit (Ben Zaken et al., 2022, arXiv 2106.10199, section 3): the model's biases train, and the head. FeDeRA (Yan et al.,
    # arXiv 2404.18848, section 5.1) calls it FedBF.
    #
    #     b' = b + mean(b_i - b)   over every bias b, of linear layers and of normalisations.
    #
    # Guarantee: the mean is exact. A model without biases (LLaMA) is refused.
    Row(
        name="bitfit",
        paper="Ben Zaken et al., arXiv 2106.10199; FedBF in Yan et al., arXiv 2404.18848",
        travels="biases, head",
        mean_exact=True,
        adapter=lambda run: Biases(),
    ),
    # Houlsby's adapters (Houlsby et al., 2019, arXiv 1902.00751, section 2.1): a bottleneck behind the attention and one behind
    # the feed-forward of every layer, before the residual connection. FeDeRA (Yan et al., arXiv 2404.18848, section 5.1) calls
    # it FedAP.
    #
    #     y -> y + U gelu(D y + b_D) + b_U,    and every one of D, b_D, U, b_U is averaged.
    #
    # Guarantee: the mean of the parameters is exact (the mean of the functions is not, since a function contains U times D).
    #
    # Deviations. The model's LayerNorms stay frozen, where Houlsby et al. train new ones: the adapters library, with which
    # FeDeRA and C2A ran it, freezes them too, and only then do their counts of parameters come out. U starts at zero instead of
    # near it, so that the adapted model starts equal to the original; D can then be as large as a linear layer's usual weights.
    Row(
        name="adapter_houlsby",
        paper="Houlsby et al., arXiv 1902.00751; FedAP in Yan et al., arXiv 2404.18848",
        travels="down, up, head",
        mean_exact=True,
        options=("bottleneck",),
        lr=1.5e-3,
        adapter=lambda run: Bottlenecks(run.method.bottleneck or 64, ("attention", "feed_forward")),
    ),
    # Pfeiffer's adapters (Pfeiffer et al., 2021, arXiv 2005.00247): one bottleneck a layer, behind its feed-forward.
    #
    #     y -> y + U relu(D y + b_D) + b_U,    and every one of D, b_D, U, b_U is averaged.
    #
    # Guarantee: the mean of the parameters is exact (the mean of the functions is not, since a function contains U times D).
    #
    # Deviations. The bottleneck stands at Houlsby's second place, before the residual connection and its LayerNorm; Pfeiffer et
    # al. have it behind both. So the two methods differ only in the number of places and in the activation, and models that
    # normalise in front of their blocks need no separate case. U starts at zero, so that the adapted model starts equal to the
    # original.
    Row(
        name="adapter_pfeiffer",
        paper="Pfeiffer et al., arXiv 2005.00247",
        travels="down, up, head",
        mean_exact=True,
        options=("bottleneck",),
        adapter=lambda run: Bottlenecks(run.method.bottleneck or 64, ("feed_forward",), "relu"),
    ),
    # Prompt tuning: the embeddings of virtual tokens in front of the text train and are averaged.
    #
    # Lester, Al-Rfou and Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning" (EMNLP 2021, arXiv 2104.08691),
    # section 2: [P ; X] is read in place of X, with P (p, H) trained and X the text's embeddings. P starts as embeddings of
    # tokens drawn from the vocabulary (section 3.2), which the paper finds better than random numbers.
    #
    # Deviations: the head trains too, while the paper's model answers in words. Tokens are drawn from the whole vocabulary, not
    # from the paper's 5000 most frequent, since a tokenizer need not order its tokens by frequency.
    Row(
        name="prompt_tuning",
        paper="Lester et al., EMNLP 2021, arXiv 2104.08691",
        travels="embeddings of virtual tokens, head",
        mean_exact=True,
        options=("prompt_length",),
        lr=1.5e-2,
        adapter=lambda run: PromptTokens(run.method.prompt_length, run.model.max_length),
    ),
    # Prefix tuning: keys and values in front of the text's, in every layer, train and are averaged.
    #
    # Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation" (ACL 2021, arXiv 2101.00190), eq. (3): the
    # activations of p positions before the text are parameters P_theta, in all layers. On encoders for classification this is
    # P-tuning v2 (Liu et al., arXiv 2110.07602).
    #
    # Deviations: the parameters are the keys and values themselves, as in P-tuning v2 and PEFT's default; in section 4.3 an MLP
    # makes them during training (`Prefix(projected=True)`). The head trains too.
    Row(
        name="prefix_tuning",
        paper="Li and Liang, ACL 2021, arXiv 2101.00190; P-tuning v2, Liu et al., arXiv 2110.07602",
        travels="keys and values of virtual tokens, head",
        mean_exact=True,
        options=("prompt_length",),
        lr=1.5e-2,
        adapter=lambda run: Prefix(run.method.prompt_length, run.model.max_length),
    ),
    # P-tuning: a small network makes the embeddings of virtual tokens; the network trains and is averaged.
    #
    # Liu et al., "GPT Understands, Too" (arXiv 2103.10385): a network computes each of the embeddings h_1 .. h_p in front of
    # the text from a trained embedding. The network is PEFT's default, an MLP of three layers as wide as the model. Its
    # parameters are averaged, as in FedAvg: the mean is exact in them, though the mean network's prompt is not the mean of the
    # clients' prompts.
    #
    # Deviations: the paper's network is an LSTM and an MLP (`EncodedPromptTokens(network="LSTM")`); all virtual tokens stand in
    # front of the text, where the paper's templates also put some behind it; the head trains too.
    Row(
        name="p_tuning",
        paper="Liu et al., arXiv 2103.10385",
        travels="the network that makes virtual tokens, head",
        mean_exact=True,
        options=("prompt_length",),
        adapter=lambda run: EncodedPromptTokens(run.method.prompt_length, run.model.max_length),
    ),
    # IA3 (Liu et al., 2022, arXiv 2205.05638, section 3.3): vectors that scale keys, values and the feed-forward's activations.
    #
    #     l' = l + mean(l_i - l)   over every vector l, and the head.
    #
    # Guarantee: the mean of the vectors is exact.
    #
    # Deviations. The scaled layers are those of PEFT's table, with DistilBERT's added (`adapters/inserted.py`). The head trains
    # too; Liu et al. have no head, since their model answers in text.
    Row(
        name="ia3",
        paper="Liu et al., arXiv 2205.05638",
        travels="scaling vectors, head",
        mean_exact=True,
        lr=1.5e-2,
        adapter=lambda run: Scales(),
    ),
    # Compacter (Mahabadi et al., 2021, arXiv 2106.04647): bottlenecks whose matrices are sums of Kronecker products with
    # rank-one second factors, behind the attention and the feed-forward of every layer.
    #
    #     W = sum_i A_i (x) s_i t_i^T,   and every one of A_i, s_i, t_i and the biases is averaged; all layers share the A_i.
    #
    # The mean parameters do not give the mean matrices, whose entries are products of three parameters: the gap is the
    # covariance of the factors over clients, as with LoRA's A and B, and noise on the factors is multiplied too.
    #
    # Deviation: the s_i of the upper layers start at zero instead of near it, so that the adapted model starts equal to the
    # original.
    Row(
        name="compacter",
        paper="Mahabadi et al., arXiv 2106.04647",
        travels="Kronecker factors, biases, head",
        mean_exact=False,
        options=("bottleneck", "kronecker"),
        adapter=lambda run: Compacters(run.method.bottleneck or 16, run.method.kronecker),
    ),
    # FedLoRA: A and B averaged separately, the common baseline.
    #
    # Trautmann, Hales and Volk, "Aggregating Low Rank Adapters in Federated Fine-tuning" (2025), section III.A, call it vanilla
    # federated averaging; FeDeRA (Yan et al., arXiv 2404.18848) calls it FedLR. It releases, per adapted matrix, the mean
    # change of A and the mean change of B, so that eq. (1) without its tilde holds:
    #
    #     A' = A + mean(A_i - A),   B' = B + mean(B_i - B),   but   B' A' != mean(B_i A_i).
    #
    # The gap is the covariance over clients of B_i and A_i. Under noise it contains a product of two noises (eq. 2, 3).
    #
    # Deviation: any number of clients and any weights, where the paper writes two clients of weight one half each.
    Row(
        name="fedlora",
        paper="Trautmann et al., 2025, section III.A; FedLR in Yan et al., arXiv 2404.18848",
        travels="A, B, head",
        mean_exact=False,
        options=(*LORA_OPTIONS, "ranks", "ranks_column"),
        adapter=lambda run: LoraAdapter.of(run.method),
        kind=AveragedLora,
    ),
    # SVD adaptation: B, E and A of a change B E A with diagonal E, each averaged.
    #
    # Wu, Hu, Min and Wang, "Adaptive Rank Allocation for Federated Parameter-Efficient Fine-Tuning of Language Models" (arXiv
    # 2501.14406), section IV-A and eq. (2): W = W_pre + B E A. The paper uses it as an ablation of FedARA and calls it FedSVD;
    # it is not the FedSVD of arXiv 2505.12805 (`fedsvd.py`). A and B are Gaussian and E is zero, so that the change starts at
    # zero with nonzero A and B, and each rank has a trainable size. A and B are not required to be orthogonal. The product of
    # the mean factors is not the mean product: the gap of `fedlora`, with three factors.
    #
    # Settled here: the change is scaled by alpha / rank as in LoRA (the paper fixes alpha = 16, the usual value), and the
    # Gaussians have the standard deviation 0.02 of AdaLoRA (Zhang et al., 2023), which the paper extends. With E zero between
    # factors of 0.02 the change grows with the third power of rate times steps, so that a short run needs a higher rate than
    # LoRA (`reach`, docs/learning_rates.md).
    Row(
        name="svd_adaptation",
        paper="Wu et al., arXiv 2501.14406, section IV-A (FedSVD there)",
        travels="B, E, A, head",
        mean_exact=False,
        options=LORA_OPTIONS,
        reach=0.8,
        adapter=lambda run: TripletAdapter(LoraAdapter.of(run.method)),
        kind=AveragedTriplet,
    ),
)
TABLE = {row.name: row for row in _ROWS}
