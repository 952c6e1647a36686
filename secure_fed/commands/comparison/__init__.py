"""Several configurations over several seeds, side by side.

    from secure_fed.comparison import compare
    rows = compare({"plain": config, "private": other}, seeds=(0, 1, 2), out="runs/compared")

plan      which run goes where, and what of it is there already: everything that can be refused is, before a run starts
runs      runs what is left, and writes what came of it
rows      a configuration's runs as one row of numbers
totals    the cost of all private runs together, for whoever is in all of them
cost_notes    that cost in words, before and after
tables    the rows as Markdown, CSV and JSON
drawing   accuracy over rounds and over bytes, as one SVG (the only importer of matplotlib here)

A run is an ordinary run directory, OUT/NAME/seed-SEED, and whatever is read of it is read from there.
"""

from secure_fed.commands.comparison.rows import Row, Spread
from secure_fed.commands.comparison.runs import compare

__all__ = ["Row", "Spread", "compare"]
