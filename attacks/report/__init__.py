"""The report of an audit: the verdict in sentences, the table on a terminal, and the page.

sentences the verdict in words: the audit in one paragraph and in a headline, and recovered texts
phrases   what all parts share: adversaries, units, marks, and numbers as limits
curves    ROC curves and lower bounds, drawn
sweep     runs side by side
display   the same, printed and in a notebook
page      the same as one HTML file
"""
