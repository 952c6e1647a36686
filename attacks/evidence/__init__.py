"""From scores to figures: what an attack's scores show about membership and epsilon.

judge              the figures of one finding, from its scores and the coins
against_null       AUC and true-positive rates against a known null distribution
bounds, guessing   lower bounds on epsilon
expected           the lower bound that the best possible attack is expected to show
canary_estimate    estimates of epsilon from canaries: sharper than a bound, and no proof
tradeoff, allowed  the AUC and the true-positive rates that a guarantee allows
main_attack        the choice of the main attack, and the significance of each attack
baseline, blind    how well texts alone predict membership, without a model
exposure           the units and clients that an attack ranks highest
attempts           the results of an attack on texts, and when they are a leak
"""
