"""The results of trials, kept in memory, beside a run and per user, so that resumes, nodes and the next run repeat none.

Whether examples can share a pass is a matter of rounding, so the key of a result holds everything that could change a bit
(`surroundings`). A key that differs in any part is tried anew. A file holds digests of keys and pass sizes, and nothing else.
Texts of what length occur decides which results it holds, so it is as private as the data: only its owner can read it.

Model, loss and collate function are told apart by the text of their code and their values. Where those cannot be read, as with
hooks or a `forward` that was put on one object, results stay in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import platform
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import nn

Sizes = tuple[int, ...]
PASS_SIZES = "pass_sizes.json"
_LIBRARIES = ("torch", "transformers", "peft", "numpy", "accelerate", "bitsandbytes", "secure-fed")
_VARIABLES = (
    *("OMP_", "MKL_", "OPENBLAS", "ONEDNN", "DNNL", "ATEN_"),
    *("TORCH_", "PYTORCH_", "CUBLAS", "CUDA_", "NVIDIA_", "KMP_"),
)
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)
_SHORT = 64


class Kept:
    """Results by key. files: where they are kept beyond this process; unreadable files count as empty."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.results: dict[Hashable, Any] = {}
        self._lock = RLock()  # trials draw from torch's one generator, and devices share their results

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self  # copies of a model compute the same bits

    @contextmanager
    def beside(self, file: Path) -> Iterator[None]:
        """Keep results in this file too, within the block."""
        self.files.append(file)
        try:
            yield
        finally:
            self.files.remove(file)

    def sizes(self, key: Hashable, around: Callable[[], Mapping[str, str] | None], find: Callable[[], Sizes]) -> Sizes:
        """The result of this key, from memory, a file or `find()`. around: its surroundings; None keeps it in memory alone."""
        with self._lock:
            if key in self.results:
                found: Sizes = self.results[key]
                return found
            surroundings = around()
            if surroundings is None:
                return self.results.setdefault(key, find())  # type: ignore[no-any-return]
            name = _digest(repr(key), *(f"{part}={value}" for part, value in sorted(surroundings.items())))
            known = [_read(file) for file in self.files]
            stored = next((own[name] for own in known if name in own), None)
            self.results[key] = tuple(stored) if stored else find()
            for file, own in zip(self.files, known, strict=True):
                if name not in own:
                    _write(file, name, self.results[key])
            return self.results[key]  # type: ignore[no-any-return]


def user_file() -> Path | None:
    """The file per user: in $XDG_CACHE_HOME, or ~/.cache; None if no folder can be made there."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "secure-fed"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder / PASS_SIZES


def _read(file: Path) -> dict[str, list[int]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(found, dict) and all(
        isinstance(sizes, list) and sizes and all(type(size) is int and size > 0 for size in sizes)
        for sizes in found.values()
    )
    return found if sound else {}


def _write(file: Path, name: str, sizes: Sizes) -> None:
    """Add a result in one step. A file that cannot be written is left: the result is found again."""
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    with suppress(OSError):
        try:
            with open(part, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as opened:
                json.dump(_read(file) | {name: list(sizes)}, opened)
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)


def surroundings(
    model: nn.Module, task: tuple[Any, ...], weights: Mapping[str, int], device: torch.device
) -> dict[str, str] | None:
    """Everything that could change a bit of a pass, by part; None if some of it cannot be told.

    task: the loss and the collate function. weights: checksums of the model's frozen parameters.
    """
    try:
        for layer in model.modules():
            own = vars(layer)
            registered = [own[name] for name in own if name.endswith("_hooks") and isinstance(own[name], dict)]
            hooks = [hook for found in registered for hook in found.values()]
            functions = [*hooks, *([own["forward"]] if "forward" in own else [])]
            modules = [str(getattr(getattr(one, "func", one), "__module__", "")) for one in functions]
            if not all(module.startswith("secure_fed.") for module in modules):  # whose code is part of the key
                raise UnknownError
        if any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS):
            raise UnknownError
        code = sorted({_code(kind) for kind in set[Any](map(type, model.modules()))})
        of_task = _text_of(task)
    except UnknownError:
        return None
    config = getattr(model, "config", None)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(one.shape), one.stride(), str(one.dtype)) for name, one in tensors]
    return {
        "model": _digest(str(model), str(code), str(sorted(weights.items())), str(config)),
        "tensors": _digest(str(shapes)),
        "task": _digest(of_task),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "quantisation": str(getattr(config, "quantization_config", "")),
        "checkpointing": str(
            [name for name, one in model.named_modules() if getattr(one, "gradient_checkpointing", 0)]
        ),
        "training": str(model.training),
        **environment(device),
    }


def environment(device: torch.device) -> dict[str, str]:
    """The libraries, their settings and the machine, by part."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = (
        *(torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        *(torch.backends.mkldnn.enabled, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        *(matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction),
        matmul.allow_bf16_reduced_precision_reduction,
        *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
        *(torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()),
        torch.is_autocast_enabled(device.type),
    )
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    there = device.type == "cuda"
    return {
        "libraries": str([(name, _version(name)) for name in _LIBRARIES]) + _own_code(),
        "build": _digest(torch.__config__.show()),
        "flags": str(flags),
        "variables": str(sorted(variables.items())),
        "device": f"{device} {torch.cuda.get_device_properties(device)}" if there else str(device),
        "processor": _digest(platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()),
        "threads": str(torch.get_num_threads()),
    }


class UnknownError(Exception):
    """Something whose code or values cannot be told."""


def _text_of(thing: Any) -> str:
    """A text that differs for functions and values that compute something else."""
    if thing is None or isinstance(thing, str | int | float | bool | bytes | torch.dtype):
        return repr(thing)
    if isinstance(thing, tuple | list):
        return f"{type(thing).__name__}{[_text_of(one) for one in thing]}"
    if isinstance(thing, Mapping):
        return f"{type(thing).__name__}{[(_text_of(key), _text_of(value)) for key, value in thing.items()]}"
    if isinstance(thing, torch.Tensor | np.ndarray):
        return f"{thing.dtype}{thing.tolist()}" if np.prod(thing.shape) <= _SHORT else _digest(str(thing.tolist()))
    if isinstance(thing, partial):
        return f"partial{_text_of((thing.func, thing.args, thing.keywords))}"
    if inspect.ismethod(thing):
        return f"method{_text_of((thing.__func__, thing.__self__))}"
    if inspect.isfunction(thing):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return f"{thing.__qualname__}{_code(thing)}{_text_of((cells, thing.__defaults__, thing.__kwdefaults__))}"
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        values = [(field.name, getattr(thing, field.name)) for field in dataclasses.fields(thing)]
        return f"{type(thing).__qualname__}{_code(type(thing))}{_text_of(values)}"
    raise UnknownError


@cache
def _code(thing: Any) -> str:
    """A digest of the file that defines a class or a function."""
    try:
        file = inspect.getsourcefile(thing)
        return f"{thing.__module__}.{thing.__qualname__}:{_digest(Path(file or '').read_text(encoding='utf-8'))}"
    except (OSError, TypeError, ValueError) as error:
        raise UnknownError from error


@cache
def _own_code() -> str:
    """A digest of this project's code of one machine's work."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest(*(file.read_text(encoding="utf-8") for file in files))


@cache
def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _processor() -> str:
    """Model and features of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        line for line in lines if not line.startswith(("cpu MHz", "bogomips", "processor", "core id", "apicid"))
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
