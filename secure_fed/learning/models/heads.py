"""Which parameters train in full beside the adapter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from secure_fed.errors import MethodError


def head_of(model: nn.Module, found: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """The parameters that train in full: the head that was found, and the modules asked for beside it."""
    names = [name for name, _ in model.named_parameters()]
    places = dict(model.named_parameters(remove_duplicate=False))
    for module in modules:
        inside = [name for name in places if _inside(name, module)]
        if not inside:
            some = ", ".join(name for name, _ in list(model.named_children())[:5])
            raise MethodError(
                f"method.modules_to_save names {module!r}, but the model has no such module with parameters; "
                f"it has {some}, ..."
            )
        for name in inside:
            first = next(other for other in names if places[other] is places[name])
            if first != name:
                raise MethodError(
                    f"method.modules_to_save names {module!r}, whose {name} is {first} too: "
                    f"leave it out, or name {first.rpartition('.')[0]!r}, which trains both"
                )
    return tuple(name for name in names if name in found or any(_inside(name, module) for module in modules))


def _inside(parameter: str, module: str) -> bool:
    """Whether a parameter belongs to the module of that (ending of a) name, as PEFT matches them."""
    owner = f".{parameter}".rpartition(".")[0] + "."
    return f".{module}." in owner
