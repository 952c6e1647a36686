"""IA3 against PEFT's own layers."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import IA3Config, inject_adapter_in_model
from torch import Tensor, nn

from secure_fed.learning.models.adapters.inserted import Scales, scaled_layers
from tests.secure_fed import small_models
from tests.secure_fed.adapters.behind import adapted, counted, lively

PEFTS = [name for name in small_models.ARCHITECTURES if name != "distilbert"]  # PEFT has no default layers for it


def by_peft(architecture: str) -> nn.Module:
    model = lively(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about Conv1D, which it handles
        inject_adapter_in_model(IA3Config(), model)
    return model.double()


@pytest.mark.parametrize("architecture", PEFTS)
def test_forward_is_that_of_pefts_layers(architecture: str) -> None:
    ours, names = adapted(architecture, Scales())
    theirs = by_peft(architecture)
    vectors = {name.partition(".ia3_l.")[0]: p for name, p in theirs.named_parameters() if ".ia3_l." in name}
    assert {name.removesuffix(".adapter.weight") for name in names} == set(vectors)
    with torch.no_grad():
        for layer, vector in vectors.items():
            vector.copy_(ours.get_parameter(f"{layer}.adapter.weight").view_as(vector))
        for name in small_models.head_of(ours):
            theirs.get_parameter(name).copy_(ours.get_parameter(name))
    found = small_models.logits(ours)
    torch.testing.assert_close(found, small_models.logits(theirs))
    for name in names:
        with torch.no_grad():
            ours.get_parameter(name).fill_(1)
        assert not torch.allclose(small_models.logits(ours), found, rtol=0, atol=1e-4), name
        found = small_models.logits(ours)


def test_distilbert_scales_keys_values_and_the_feed_forward() -> None:
    """Against merged weights: scaling an output scales the weight's rows and the bias, scaling an input its columns."""
    model, names = adapted("distilbert", Scales())
    merged = lively("distilbert")
    with torch.no_grad():
        for name in small_models.head_of(model):
            merged.get_parameter(name).copy_(model.get_parameter(name))
        for layer in (0, 1):
            at = f"distilbert.transformer.layer.{layer}"
            for end in ("attention.k_lin", "attention.v_lin", "ffn.lin2"):
                scale: Tensor = model.get_parameter(f"{at}.{end}.adapter.weight")
                linear = merged.get_submodule(f"{at}.{end}")
                if end == "ffn.lin2":
                    linear.get_parameter("weight").mul_(scale)
                else:
                    linear.get_parameter("weight").mul_(scale[:, None])
                    linear.get_parameter("bias").mul_(scale)
    assert len(names) == 6
    torch.testing.assert_close(small_models.logits(model), small_models.logits(merged))


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_parameter_count(architecture: str) -> None:
    adapter = Scales()
    widths = [width for _, width in scaled_layers(small_models.make(architecture), ()).values()]
    model, names = adapted(architecture, adapter)
    assert counted(model, names) == sum(widths)
    assert counted(model, names) == 2 * {
        "llama": 8 + 8 + 24,
        "distilbert": 16 + 16 + 24,
        "gpt2": 48 + 64,
        "deberta": 48 + 16 + 24,
    }.get(architecture, 16 + 16 + 16 + 24)


def test_a_layer_of_the_head_gets_none() -> None:
    model = small_models.make("bert")
    key = "bert.encoder.layer.1.attention.self.key"
    names = Scales().inject(model, [f"{key}.weight", f"{key}.bias"], 0)
    assert f"{key}.adapter.weight" not in names
    assert len(names) == 7
    assert model.get_parameter(f"{key}.weight").requires_grad


def test_vectors_start_at_one() -> None:
    model = small_models.make("bert")
    assert all((model.get_parameter(name) == 1).all() for name in Scales().inject(model, [], 0))
