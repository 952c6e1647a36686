"""From scores to figures: what an attack's scores show of membership and of epsilon.

judge             the figures of one finding, from its scores and the coins
against_null      AUC and true-positive rates against a known null distribution
bounds, guessing  lower bounds on epsilon
canary_estimate   estimates of epsilon from canaries, which are sharper than a bound and prove nothing
tradeoff, allowed the AUC and the true-positive rates that a guarantee allows
main_attack       which attack is the main one, and the significance of each
baseline          what texts alone say of membership, without a model
exposure          the units and clients that an attack accuses first
attempts          what an attack on texts recovered, and when that is a leak
"""
