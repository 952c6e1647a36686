"""`secure-fed evaluate`: figures of a run's language model on tasks of EleutherAI's lm-eval, and of its base model beside."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, UsageError

_BATCH = 8  # prompts; their scores of all tokens are in memory together
_AT_LEAST = {"limit": 1, "batch_size": 1, "num_fewshot": 0}
_COVERED = "The figures are measured without noise: where a task's data are the members' own, no privacy guarantee covers them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `secure-fed evaluate` besides the run."""
    names = "tasks, groups or tags of lm-eval (`lm-eval ls tasks`)"
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME", help=names)
    own = "a folder with task files of your own (YAML)"
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help=own)
    parser.add_argument("--merged", action="store_true", help="the model that `export --merged` writes")
    parser.add_argument("--base", action="store_true", help="the base model beside it, without the adapter")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples in a prompt (default: the task's)")
    together = f"prompts that are read together (default: {_BATCH})"
    parser.add_argument("--batch-size", type=int, default=_BATCH, metavar="N", help=together)
    chat = "prompts as turns of the chat template (default: if data.task is chat)"
    parser.add_argument("--apply-chat-template", action=argparse.BooleanOptionalAction, help=chat)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to this .json file too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(chosen: argparse.Namespace) -> None:
    """Options, run, tasks and their data are checked before the model is loaded."""
    from secure_fed.runs.directory import read_config, read_facts
    from secure_fed.runs.durable import require_new

    for option, least in _AT_LEAST.items():
        value = getattr(chosen, option)
        if value is not None and value < least:
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} is {value}, but it must be at least {least}").about(name, value, f">= {least}")
    folder = chosen.include_path
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path is {folder}, which is no folder: name the one with the task files").about(
            "--include-path", folder, "a folder"
        )
    require_new(chosen.out, "figures", (".json",))
    read_facts(chosen.run_dir)
    config = read_config(chosen.run_dir)
    from secure_fed.export import lm_eval_tasks, trained
    from secure_fed.export.adapter_folder import base_model

    trained.require_trained(chosen.run_dir, best=chosen.best)
    _require_language_model(config)
    lm_eval_tasks.require_installed()
    names, fewshot = list(dict.fromkeys(chosen.tasks)), chosen.num_fewshot
    chat = config.data.task == "chat" if chosen.apply_chat_template is None else chosen.apply_chat_template
    with lm_eval_tasks.loaded(names, folder, fewshot) as found:
        loaded = trained.load_run(chosen.run_dir, chosen.client, best=chosen.best)
        if chat and not loaded.tokenizer.chat_template:
            raise UsageError(
                f"--apply-chat-template needs a template, and the tokenizer of {config.model.name!r} has none: leave it out"
            ).about("--apply-chat-template", True, "a tokenizer with a chat template")
        how: dict[str, Any] = {"batch_size": chosen.batch_size, "limit": chosen.limit, "num_fewshot": fewshot}
        how |= {"chat": chat, "stops": loaded.stops if chat else ()}
        tokenizer, labels, finished = loaded.tokenizer, loaded.label_names, loaded.state.round
        model = loaded.merged() if chosen.merged else loaded.model
        del loaded  # only one model stays in memory
        figures = lm_eval_tasks.measured(found, model, tokenizer, **how)
        del model
        rows = [dict(row) for row in figures.rows]
        if chosen.base:  # loaded anew: with some methods even the initial tensors change its outputs
            base = base_model(config.model, config.data, labels, config.federation.seed)
            beside = lm_eval_tasks.measured(found, base, tokenizer, **how)
            for row, other in zip(rows, beside.rows, strict=True):
                row |= {"base": other["value"], "base_stderr": other["stderr"]}
    result = {
        "run": str(chosen.run_dir),
        "model": "merged" if chosen.merged else "adapter",
        "round": finished,
        "lm_eval": metadata.version("lm-eval"),  # which the figures of its tasks depend on
        "chat_template": chat,
        "limit": chosen.limit,
        "batch_size": chosen.batch_size,
        "figures": rows,
        "shortened": figures.shortened,
        "positions": figures.room,
        "privacy": _COVERED,
    }
    _say(result, chosen)


def _say(result: dict[str, Any], chosen: argparse.Namespace) -> None:
    from secure_fed.report.terminal import show_figures
    from secure_fed.runs.durable import write_new

    if chosen.out is not None:
        write_new(chosen.out, json.dumps(result, indent=2) + "\n")
    if chosen.json:
        print(json.dumps(result))
        return
    notes = [_COVERED]
    if result["shortened"]:
        notes.append(
            f"{result['shortened']} prompts lost their beginning: the model has {result['positions']} positions. "
            "--num-fewshot shortens prompts."
        )
    show_figures(result["figures"], notes)


def _require_language_model(config: RunConfig) -> None:
    from secure_fed.learning import tasks

    if tasks.build(config.data).auto != "AutoModelForCausalLM":
        task = config.data.task
        raise ConfigError(
            f"this run's data.task is {task!r}, whose model scores no next tokens: lm-eval needs a language model, as of "
            "causal_lm, chat or multiple_choice"
        ).about("data.task", task, "causal_lm, chat or multiple_choice")
