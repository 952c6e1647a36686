"""EleutherAI's lm-eval on a language model in memory: tasks by name, and their figures.

lm-eval's own class for models of transformers (`HFLM`) computes everything, around the model object that it is given. Three
things are different here: what is going on is an activity, a model with virtual tokens generates without a cache, and prompts
that lm-eval shortens are counted.

`datasets` keeps an Arrow copy of every file that it reads. Copies of local data, which may be private, go to a temporary folder
that is deleted with the tasks; data sets of the Hub stay in the user's cache, so that they are downloaded once.
"""

from __future__ import annotations

import difflib
import importlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from logging import ERROR, getLogger
from numbers import Real
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from secure_fed.activity import Activity, activity
from secure_fed.errors import DataError, ModelError, SecureFedError, UsageError
from secure_fed.learning.generation import keeps_cache
from secure_fed.learning.models.adapters.virtual_tokens import positions_left
from secure_fed.learning.models.loading import quiet

_NEEDED = ("lm_eval", "accelerate")
_NOT_HERE = {"UNSAFE_CODE": "runs code that the model writes", "MULTIMODAL": "has pictures or sounds in its prompts"}
_UNASKED: dict[str, Any] = {  # additions to lm-eval's results that run `pip list` and `git`, for seconds
    "add_env_info": lambda results: None,
    "get_git_commit_hash": lambda: None,
}
_NEAR = 3  # names that are suggested


@dataclass(frozen=True)
class Tasks:
    """Tasks with their data. `roots` are lm-eval's objects: the groups that were named, and the tasks outside them."""

    manager: Any
    roots: Sequence[Any]
    leaves: Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """Rows of {task, metric, filter, value, stderr, n, higher_is_better, num_fewshot, version}, in lm-eval's order.

    value, stderr: None where lm-eval has no finite number. n: the number of documents. shortened: the number of prompts that
    lost their beginning, because prompt and answer need more than `room` positions, the model's.
    """

    rows: Sequence[dict[str, Any]]
    shortened: int
    room: int


def require_installed() -> None:
    """Refuse to evaluate without the extra."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UsageError(
            f"evaluating on tasks needs {missing[0].replace('_', '-')}, which is not installed: "
            "pip install 'secure-fed[evaluate]'"
        )


@contextmanager
def loaded(names: Sequence[str], include_path: Path | None, num_fewshot: int | None) -> Iterator[Tasks]:
    """The tasks, groups or tags with these names, and their data; include_path: a folder with task files of one's own.

    Local data are read through a temporary folder, which lasts as long as the block.
    """
    with activity("loading lm-eval"):
        importlib.import_module("lm_eval.tasks")
    with tempfile.TemporaryDirectory(prefix="secure-fed-tasks-") as copies, _quietly(), _apart(copies):
        manager = _manager(names, include_path)
        with activity(f"reading the data of {', '.join(names)}"):
            try:
                found = manager.load(list(names))
            except Exception as error:  # of any kind: a task file may do anything, also download
                raise DataError(
                    f"lm-eval cannot read the data of {', '.join(names)} ({_first_line(error)}): correct the task's file, or "
                    "fetch its data set while the Hub can be reached"
                ) from error
        tasks = dict(found["tasks"])
        _require_possible(tasks, num_fewshot)
        inner = {name for children in found["group_map"].values() for name in children}
        groups = [group for name, group in found["groups"].items() if name not in inner]
        in_groups = {task.task_name for group in groups for task in group.get_all_tasks()}
        yield Tasks(manager, [*groups, *(task for name, task in tasks.items() if name not in in_groups)], tasks)


def measured(
    tasks: Tasks,
    model: nn.Module,
    tokenizer: Any,
    *,
    batch_size: int,
    limit: int | None,
    num_fewshot: int | None,
    chat: bool,
    stops: Sequence[int] = (),
) -> Figures:
    """The figures of a model. chat: whether prompts are turns of the tokenizer's chat template.

    stops: tokens that end a generated text, besides the tokenizer's end token and those of the model's own `generation_config`.
    """
    from lm_eval import evaluator

    names = ", ".join(tasks.leaves)
    with _quietly(), patch.multiple(evaluator, **_UNASKED), activity("evaluating"):
        wrapped = _wrapper()(model, tokenizer, batch_size, stops)
        try:
            found = evaluator.simple_evaluate(
                model=wrapped,
                tasks=list(tasks.roots),
                task_manager=tasks.manager,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                log_samples=False,
                batch_size=batch_size,
            )
        except (SecureFedError, RuntimeError, MemoryError):  # no fault of the tasks
            raise
        except Exception as error:  # of any kind, from lm-eval or from a task's file
            raise ModelError(
                f"lm-eval stopped in {names} ({_first_line(error)}): correct the task's file, or leave the task out"
            ) from error
    return Figures(list(_rows(found)), wrapped.shortened, wrapped.max_length)


def _manager(names: Sequence[str], include_path: Path | None) -> Any:
    """lm-eval's index, of the folder alone if it has all the names: to read lm-eval's own 15,000 files takes a while."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= {*own.all_subtasks, *own.all_tags}:
            return own
    with activity("reading lm-eval's list of tasks"):
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=_NEAR, cutoff=0.6)
            some = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm-eval ls tasks` lists them"
            where = "" if include_path is None else f", nor is it in {include_path}"
            raise UsageError(f"--tasks names {name!r}, which lm-eval does not know{where}; {some}").about(
                "--tasks", name, "a task, group or tag"
            )
    return manager


def _require_possible(tasks: Mapping[str, Any], num_fewshot: int | None) -> None:
    for name, task in tasks.items():
        for flag, what in _NOT_HERE.items():
            if getattr(task, flag, False):
                raise UsageError(
                    f"the task {name!r} {what}, which is not done here: export the run, and use lm-eval's own command"
                ).about("--tasks", name, "tasks of text")
        if num_fewshot and task.get_config("num_fewshot") == 0:
            raise UsageError(
                f"--num-fewshot {num_fewshot} has no effect on {name!r}, whose file sets num_fewshot: 0; leave it out"
            ).about("--num-fewshot", num_fewshot, "unset for this task")


def _rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr"):
                continue
            yield {
                "task": task,
                "metric": metric,
                "filter": chosen,
                "value": _finite(value),
                "stderr": _finite(figures.get(f"{metric}_stderr,{chosen}")),
                "n": figures["sample_len"],
                "higher_is_better": found["higher_is_better"].get(task, {}).get(metric),
                "num_fewshot": found["n-shot"].get(task),
                "version": found["versions"].get(task),
            }


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _wrapper() -> type[Any]:
    """The class of the model for lm-eval, which is imported with it."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import stop_sequences_criteria

    class Shown(HFLM):  # type: ignore[misc]
        def __init__(self, model: nn.Module, tokenizer: Any, batch_size: int, stops: Sequence[int]) -> None:
            room = positions_left(model)  # None: lm-eval's own limit
            super().__init__(model, tokenizer=tokenizer, batch_size=batch_size, max_length=room, backend="causal")
            self.shortened = 0
            self._caches, self._now = keeps_cache(model), Activity("")
            own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
            listed = own if isinstance(own, list) else [own]
            self._stops = sorted({one for one in (*listed, tokenizer.eos_token_id, *stops) if one is not None})

        def _loglikelihood_tokens(self, requests: list[Any], *rest: Any, **named: Any) -> Any:
            self.shortened += sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
            with activity("scoring answers in batches", -(-len(requests) // self.batch_size)) as self._now:
                return super()._loglikelihood_tokens(requests, *rest, **named)

        def _model_call(self, *given: Any, **named: Any) -> Any:
            self._now.step()
            return super()._model_call(*given, **named)

        def generate_until(self, requests: list[Any], *rest: Any, **named: Any) -> Any:
            with activity("generating answers in batches", -(-len(requests) // self.batch_size)) as self._now:
                return super().generate_until(requests, *rest, **named)

        @torch.no_grad()
        def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
            self._now.step()
            if not settings.get("temperature"):
                settings = {"do_sample": False} | {
                    name: value for name, value in settings.items() if name != "temperature"
                }
            return self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self._stops or None,
                use_cache=self._caches,
                **settings,
            )

        def tok_batch_encode(
            self,
            strings: list[str],
            padding_side: str = "left",
            left_truncate_len: int | None = None,
            truncation: bool = False,
        ) -> tuple[Any, Any]:
            ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
            if left_truncate_len is None:
                return ids, mask
            self.shortened += int((mask.sum(1) > left_truncate_len).sum())
            return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    return Shown


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the messages and progress bars of lm-eval, datasets and transformers."""
    from lm_eval.api.task import tqdm

    theirs, draws = getLogger("lm_eval"), tqdm.__init__
    level = theirs.level

    def undrawn(bar: Any, *given: Any, **named: Any) -> None:
        draws(bar, *given, **named | {"disable": True})

    theirs.setLevel(ERROR)
    try:
        with quiet(), patch.object(tqdm, "__init__", undrawn):
            yield
    finally:
        theirs.setLevel(level)


@contextmanager
def _apart(folder: str) -> Iterator[None]:
    """Let `datasets` put its copies of local data into this folder."""
    import datasets

    read = datasets.load_dataset

    def load_dataset(path: str, *given: Any, **named: Any) -> Any:
        of_files = bool(named.get("data_files") or named.get("data_dir")) and "/" not in path
        if of_files or Path(path).exists():
            named.setdefault("cache_dir", folder)
        return read(path, *given, **named)

    with patch.object(datasets, "load_dataset", load_dataset):
        yield


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"[:300]
