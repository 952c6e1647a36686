"""Membership scores from the confidences of a model and of its shadow models, as functions of numbers.

lira   likelihood ratios (Carlini et al. 2022)
rmia   likelihood ratios compared with a population's (Zarifzadeh et al. 2024)
"""
