"""Several configurations over several seeds, side by side.

    from secure_fed.commands.comparison import compare
    rows = compare({"plain": config, "private": other}, seeds=(0, 1, 2), out="runs/compared")

runs      the runs and their folders; makes the remaining runs, and writes the results
rows      a configuration's runs as one row of numbers; the cost of all private runs together, to a unit that is in all of them
tables    the rows as Markdown, CSV and JSON, the cost in words, and the drawing of accuracy over rounds and over bytes

A run is an ordinary run directory, OUT/NAME/seed-SEED, and everything about it is read from there.
"""

from secure_fed.commands.comparison.rows import Row, Spread
from secure_fed.commands.comparison.runs import compare

__all__ = ["Row", "Spread", "compare"]
