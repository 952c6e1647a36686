"""A finished or unfinished run as one HTML file that a person can read, print and keep.

record               what the run directory says, as one frozen value
guarantee            what the run says of its privacy, read with suspicion
sight                what the server sees of the clients, with masks and without
masks                secure aggregation: whether there was any, its parameters, and what it took
membership           what the run measured of membership, and the way to its audit
overview, privacy,   the sections of the page, one function each: RunRecord -> HTML,
curves, diagnostics, or "" where the section does not apply to the run
details
plots                numbers -> inline SVG in the page's colours (the only importer of matplotlib)
markup               the few HTML shapes of the sections, and the one place where text is escaped
words                numbers as people read them
page                 all sections, in order, in one self-contained file that is written atomically
"""

from secure_fed.report.page.page import write

__all__ = ["write"]
