"""An audit as one HTML file that opens from disk: what was found in words first, then everything that this rests on.

opening     the verdict, and the numbers that everybody asks for
matrix      every attack at every vantage point
curves      the receiver operating characteristic, and the lower bound beside the accounted epsilon
sweep       runs with more and less privacy, side by side
exposure    the clients and the units that are most exposed
limits      the model-free baseline, what an audit does not prove, and how this one was made
plots       numbers -> inline SVG in the page's colours
page        all sections, in order, in one self-contained file that is written atomically
"""

from attacks.report.page.page import page, write

__all__ = ["page", "write"]
