"""A finished or unfinished run as one HTML file to read, print and keep.

record               the run directory as one frozen value
guarantee            the guarantee that the files state, read with suspicion
observers            the pictures of the first screen: epsilon against each observer, and the data that each party sees
overview             name, first screen, all results
privacy, server_view the clients' protection, its meaning, and the server's view
masks                secure aggregation: its parameters and its cost
membership           the run's own membership inference, and the link to its audit
measured             the metrics of a task in words
curves, diagnostics  accuracy, loss, bytes and diagnostics over the rounds
details              clients, rounds, configuration, versions
statement            the statement for the record, whole, at the end
pictures, plots      drawings: by hand, and by matplotlib
markup               the HTML shapes of the sections; the one place where text is escaped
page                 all sections in order, as one self-contained file, written atomically

A section is a function `RunRecord -> HTML`, and returns "" where it does not apply to the run.
"""

from secure_fed.report.page.page import write_report

__all__ = ["write_report"]
