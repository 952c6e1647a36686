"""The torch devices that `model.device` names."""

from __future__ import annotations

import torch

from secure_fed.errors import ConfigError


def find_devices(names: str) -> list[torch.device]:
    """The devices of a list with commas, the first of which evaluates; `auto` is the GPU if there is one.

    Several must be different devices of one kind: other kinds round sums differently, so a client's tensors would reveal the
    device that trained it, which depends on the other participants.
    """
    devices = [_found(name.strip(), names) for name in names.split(",")]
    if len({(device.type, device.index or 0) for device in devices}) < len(devices):
        raise ConfigError(f"model.device is {names!r}, which names a device twice; name each device once")
    kinds = sorted({_kind(device) for device in devices})
    if len(kinds) > 1:
        raise ConfigError(
            f"model.device is {names!r}, which are devices of different kinds ({', '.join(kinds)}); name devices of one kind"
        )
    return devices


def idle_gpu(names: str) -> str:
    """A note if there is a GPU and the run leaves it idle, as it does by default; else ""."""
    if names.strip() != "cpu" or not torch.cuda.is_available():
        return ""
    return f"model.device is 'cpu', and {torch.cuda.get_device_name()} is not used; set model.device = 'auto' to use it"


def _found(name: str, names: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.device is {names!r}, which cannot be used here ({reason}); try cpu or auto"
        ) from error
    return device


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
