"""The report of an audit: the verdict in sentences, the table on a terminal, and the page.

reading        audit.json as typed values
significance   which findings are significant, and which of these the guarantee covers; the main attack
wording        adversaries, units, rates and recovered texts in words
verdict        the audit in one paragraph and in a headline
curves         ROC curves and lower bounds, drawn
sweep          runs side by side
display        the same, printed and in a notebook
page           the same as one HTML file
"""
