"""Many small cases in one test: for cases of microseconds, a pytest item for each costs more than the test."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_MOST_SHOWN = 20
_OF_ONE_CASE = {"tmp_path", "monkeypatch", "capsys", "capfd"}


def every(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: runs the test with every case, as `pytest.mark.parametrize` does, and reports all failures together.

    Fixtures are made once for all cases: if each case needs a folder or a patch of its own, use `pytest.mark.parametrize`.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    listed = [tuple(case) if len(wanted) > 1 else (case,) for case in cases]
    assert listed, "no case: nothing would be tested"
    assert all(len(case) == len(wanted) for case in listed)

    def looped(test: Callable[..., None]) -> Callable[..., None]:
        def over_all(*itself: Any, **fixtures: Any) -> None:
            failed: list[tuple[tuple[Any, ...], BaseException]] = []
            for case in listed:
                try:
                    test(*itself, **fixtures, **dict(zip(wanted, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # the second: an expected exception was not raised
                    failed.append((case, error))
            if failed:
                raise AssertionError(_told(wanted, failed, len(listed))) from failed[0][1]

        over_all.__name__, over_all.__doc__, over_all.__module__ = test.__name__, test.__doc__, test.__module__
        over_all.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in wanted]
        assert not _OF_ONE_CASE & {one.name for one in left}, "what one case leaves behind would be there in the next"
        over_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return over_all

    return looped


def _told(names: list[str], failed: list[tuple[tuple[Any, ...], BaseException]], count: int) -> str:
    lines = [f"{len(failed)} of {count} cases failed"]
    for case, error in itertools.islice(failed, _MOST_SHOWN):
        given = ", ".join(f"{name}={value!r:.80}" for name, value in zip(names, case, strict=True))
        lines.append(f"{given}\n    {type(error).__name__}: {str(error)[:600]}")
    return "\n".join(lines)


def chosen(
    cases: Iterable[Any],
    quick: Iterable[Any],
    *,
    whole: bool = False,
    others: str = "nightly",
    nightly: Iterable[Any] | None = None,
) -> list[Any]:
    """All cases for `pytest.mark.parametrize`: the `quick` ones run on every change, the others get the mark `others`.

    nightly: if given, the other cases in it get the mark `nightly` and the rest `weekly`. whole: each case is the value of one
    name, even if it is a tuple.
    """
    listed, now, night = list(cases), list(quick), None if nightly is None else list(nightly)
    assert now, "something is left for every change"
    assert all(case in listed for case in now), [case for case in now if case not in listed]

    def mark(case: Any) -> str:
        return others if night is None else "nightly" if case in night else "weekly"

    return [case if case in now else _marked(case, whole, mark(case)) for case in listed]


def _marked(case: Any, whole: bool, mark: str) -> Any:
    values = case if isinstance(case, tuple) and not whole else (case,)
    return pytest.param(*values, marks=getattr(pytest.mark, mark))
