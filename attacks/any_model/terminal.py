"""The audit of a model on a terminal."""

from __future__ import annotations

from rich.table import Column, Table

from attacks.any_model.audit import Audit
from secure_fed.report.terminal import PlainConsole


def show(audit: Audit) -> None:
    """Print the verdict, and a table of the signals."""
    console, facts = PlainConsole(), audit.to_dict()
    heads = {"void": "CANNOT TELL", "leak": "LEAK", "nothing": "nothing found"}
    adapter = f" with {facts['adapter']}" if facts["adapter"] else ""
    console.print(f"verdict on {facts['model']}{adapter}: {heads[facts['verdict']]}", style="bold")
    for sentence in facts["sentences"]:
        console.print(sentence)
    table = Table("signal", "AUC, 95 % interval", Column("caught at 1 % false alarms", justify="right"))
    for one in facts["signals"]:
        low, high = one["auc_interval"]
        caught = one["tpr_at_fpr"]["0.01"]
        rate = "too few others" if caught is None else f"{caught['tpr']:.1%}"
        table.add_row(one["signal"], f"{one['auc']:.3f} ({low:.3f} to {high:.3f})", rate)
    console.print(table)
    console.print(f"{facts['members']} members and {facts['non_members']} others; an AUC of .5 is a coin's")
