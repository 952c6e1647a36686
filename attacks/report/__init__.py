"""The report of an audit: the verdict in sentences, the table on a terminal, and the page.

reading, values   audit.json as typed values
significance      which findings are significant, and which of these the guarantee covers
readback          the texts that attacks recovered
verdict           the audit in one paragraph, from sentences_guarantee, _membership, _texts and _estimates
wording           adversaries, units and rates in words
sweep             one row for each run, for runs side by side
terminal, page/   the same, printed and as HTML
"""
