"""The torch devices that `model.device` names, and base models that are larger than one device.

The layers of a large model are divided over devices, host memory and the disk by accelerate. A layer on a device stays there. A
layer in host memory beside an accelerator, or on the disk, is offloaded: its parameters have shapes and no values (torch's meta
device), and each call of the layer reads them onto the device on which it computes, and leaves them afterwards. The graph of a
forward pass keeps what its backward pass needs, so offloading saves memory in training only together with gradient
checkpointing, which reads a layer again in the backward pass.

accelerate decides where a layer is (`model.device_map`, `model.max_memory`) and keeps the values; `adopt` replaces its rule for
the call of an offloaded layer. Parameters that train, or whose place other tensors take (`Objective.holding`), have values at
all times (`keep`), and a call leaves them alone. A layer may end early, by an exception or when a checkpoint has all it needs,
and still leaves its values.

Whoever reads a parameter of a model that may be offloaded reads `value_of` or `Values`, and `place_of` in place of its device.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.config import ModelConfig
from secure_fed.errors import ConfigError, ModelError


def find_devices(names: str) -> list[torch.device]:
    """The devices of a list with commas, the first of which evaluates; `auto` is the GPU if there is one.

    Several must be different devices of one kind: other kinds round sums differently, so a client's tensors would reveal the
    device that trained it, which depends on the other participants.
    """
    devices = [_found(name.strip(), names) for name in names.split(",")]
    if len({(device.type, device.index or 0) for device in devices}) < len(devices):
        message = f"model.device is {names!r}, which names a device twice; name each device once"
        raise ConfigError(message).about("model.device", names, "different devices")
    kinds = sorted({torch.cuda.get_device_name(device) if device.type == "cuda" else device.type for device in devices})
    if len(kinds) > 1:
        raise ConfigError(
            f"model.device is {names!r}, which are devices of different kinds ({', '.join(kinds)}); name devices of one kind"
        ).about("model.device", names, "devices of one kind")
    return devices


def _found(name: str, names: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.device is {names!r}, which cannot be used here ({reason}); try cpu or auto").about(
            "model.device", names, "a device of this machine"
        ) from error
    return device


def idle_gpu(names: str) -> str:
    """A note if there is a GPU and the run leaves it idle, as it does by default; else ""."""
    if names.strip() != "cpu" or not torch.cuda.is_available():
        return ""
    return f"model.device is 'cpu', and {torch.cuda.get_device_name()} is not used; set model.device = 'auto' to use it"


class Folder:
    """A private folder for weights on the disk that no file of the model holds. It exists as long as this object."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="secure-fed-offload-")
        weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)


def device_map_settings(
    config: ModelConfig, whole: nn.Module | None, new: Iterable[str], folder: Folder
) -> dict[str, Any]:
    """The arguments of `from_pretrained` for `model.device_map`.

    whole: the model on the meta device; None leaves the map to transformers. new: its modules without stored weights, which
    cannot be offloaded, since nothing holds their values.
    """
    memory = config.memory or None
    chosen: dict[str, Any] = {"device_map": config.device_map, "max_memory": memory}
    if whole is not None:
        chosen = {"device_map": _apart(whole, _map(config, whole, memory), new)}
    return chosen | {"offload_folder": folder.name}


def _map(config: ModelConfig, whole: nn.Module, memory: Any) -> dict[str, Any]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    kinds = list(getattr(whole, "_no_split_modules", None) or ())
    shown: dict[str, Any] = {"no_split_module_classes": kinds, "dtype": getattr(torch, config.dtype)}
    whole.tie_weights()  # type: ignore[operator]  # so that a tied weight counts once
    most = (
        get_max_memory(memory)
        if config.device_map == "sequential"
        else get_balanced_memory(whole, max_memory=memory, **shown)
    )
    return dict(infer_auto_device_map(whole, max_memory=most, **shown))


def _apart(whole: nn.Module, found: dict[str, Any], new: Iterable[str]) -> dict[str, Any]:
    """The same map with these modules on the first accelerator of the map, or else the CPU."""

    def covering(name: str) -> Any:
        """The entry of the map that places the module of this name."""
        return next((entry for entry in found if entry in ("", name) or name.startswith(f"{entry}.")), None)

    first = next((device for device in found.values() if device not in ("cpu", "disk")), "cpu")
    for name in new:
        while (entry := covering(name)) not in (None, name):
            device, module = found.pop(entry), whole.get_submodule(entry)
            parts = [*module._modules, *module._parameters, *module._buffers]
            found |= {f"{entry}.{part}" if entry else part: device for part in parts}
        found[name] = first
    return found


def is_divided(model: nn.Module) -> bool:
    """Whether accelerate has divided the model: its layers are on several devices, or offloaded."""
    return any(hasattr(layer, "_hf_hook") for layer in model.modules())


def is_offloaded(model: nn.Module) -> bool:
    return any(_hook(layer) is not None for layer in model.modules())


def adopt(model: nn.Module, folder: Folder | None = None) -> None:
    """Prepare a divided model for training. folder: of its weights on the disk, deleted with the model.

    ModelError for an offloaded parameter whose values nothing holds.
    """
    if folder is not None:
        model._offload_folder = folder  # type: ignore[assignment]  # which lives as long as the model
    for name, layer in model.named_modules():
        if (hook := _hook(layer)) is None:
            continue
        if lost := [own for own in _away(layer) if own not in hook.weights_map]:
            raise ModelError(
                f"{name}.{lost[0]} of the model is new, and model.device_map would offload it, where nothing holds its values: "
                "raise model.max_memory"
            ).about("model.max_memory", None, "room for all new parameters")
        layer.forward = partial(_computed, layer, hook)
    # Offloaded parameters that share their values are one object again, so that they count once, as in other models.
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        layer, own = _place(model, name)
        other = model.get_parameter(source)
        if other.is_meta and layer._parameters[own] is not other:
            layer._parameters[own] = other
    hooks = [hook for layer in model.modules() if (hook := layer.__dict__.get("_hf_hook")) is not None]
    places = {str(one.execution_device) for hook in hooks for one in getattr(hook, "hooks", (hook,))}
    if getattr(model, "_hf_hook", None) is not None and _hook(model) is None and len(places) == 1:
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model)  # it only moves outputs, and the model's parts could not be called apart


def _computed(layer: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an offloaded layer."""
    from accelerate.utils import send_to_device

    args, kwargs = (send_to_device(part, hook.execution_device) for part in (args, kwargs))
    with present(layer):
        return layer._old_forward(*args, **kwargs)  # type: ignore[operator]


@torch.no_grad()
def require_called(model: nn.Module, name: str, output: Callable[[], Tensor]) -> None:
    """ModelError if a pass reads a parameter of an offloaded layer without calling the layer. output: of a pass."""
    if not is_offloaded(model):
        return
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            complete = not output().is_meta
    except (RuntimeError, NotImplementedError) as error:
        complete = "meta" not in str(error)
    if not complete:
        raise ModelError(
            f"{name} reads weights of a layer without calling it, and model.device_map has offloaded that layer: raise "
            "model.max_memory until all of the model is on devices, or leave model.device_map out"
        ).about("model.device_map", "offloaded layers", "a model that calls its layers")


@contextmanager
def present(layer: nn.Module) -> Iterator[None]:
    """Within the block, an offloaded layer's parameters have their values."""
    away = {name: layer._parameters[name] for name in _away(layer)} if (hook := _hook(layer)) is not None else {}
    try:
        layer._parameters.update({name: _read(layer, hook, name) for name in away})
        yield
    finally:
        layer._parameters.update(away)


def place_of(layer: nn.Module, name: str = "weight") -> torch.device:
    """The device of the layer's parameter of this name while the layer computes."""
    hook, parameter = _hook(layer), layer.get_parameter(name)
    return torch.device(hook.execution_device) if hook is not None and parameter.is_meta else parameter.device


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's inputs, and of its outputs."""
    return next(
        place_of(layer, name) for layer in model.modules() for name, one in layer._parameters.items() if one is not None
    )


def value_of(layer: nn.Module, name: str = "weight") -> Tensor:
    """The layer's parameter of this name, read if it is offloaded; without values on the meta device alone."""
    hook, parameter = _hook(layer), layer.get_parameter(name)
    return _read(layer, hook, name) if hook is not None and parameter.is_meta else parameter


class Values(Mapping[str, Tensor]):
    """The model's parameters by name, `named`; an offloaded one is read at each access, and not kept."""

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor] | None = None) -> None:
        self._model, self._names = model, dict(model.named_parameters()) if named is None else named

    def __getitem__(self, name: str) -> Tensor:
        return value_of(*_place(self._model, name)) if self._names[name].is_meta else self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def keep(model: nn.Module, names: Iterable[str]) -> None:
    """Give these parameters values at all times, on the device on which their layer computes."""
    for name in names:
        layer, own = _place(model, name)
        if (hook := _hook(layer)) is not None and (away := layer.get_parameter(own)).is_meta:
            kept = _read(layer, hook, own)
            kept.requires_grad = away.requires_grad
            for other in model.modules():  # tied layers too
                other._parameters.update({one: kept for one, there in other._parameters.items() if there is away})


def _hook(layer: nn.Module) -> Any:
    """accelerate's record of an offloaded layer; None for others."""
    hook: Any = layer.__dict__.get("_hf_hook")
    kept = (one for one in getattr(hook, "hooks", (hook,)) if getattr(one, "offload", False))
    return next((one for one in kept if one.weights_map is not None), None)


def _away(layer: nn.Module) -> list[str]:
    return [name for name, one in layer._parameters.items() if one is not None and one.is_meta]


def _read(layer: nn.Module, hook: Any, name: str) -> nn.Parameter:
    return nn.Parameter(hook.weights_map[name].to(place_of(layer, name)), requires_grad=False)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, own = name.rpartition(".")
    return model.get_submodule(owner), own
