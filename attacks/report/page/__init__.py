"""An audit as one HTML file that opens from disk: first the finding in words, then all of its evidence.

opening     the verdict, and the key figures
matrix      every attack at every vantage point
curves      the receiver operating characteristic, and the lower bound beside the accounted epsilon
sweep       runs with more and less privacy, side by side
exposure    the most exposed clients and units
limits      the model-free baseline, the limits of an audit, and how this one was made
plots       numbers -> inline SVG in the page's colours
page        all sections, in order, in one self-contained file, written atomically
"""

from attacks.report.page.page import page, write

__all__ = ["page", "write"]
