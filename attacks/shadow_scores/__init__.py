"""Scores of membership from the confidences of a model and of shadows of it, as functions on numbers.

lira   likelihood ratios (Carlini et al. 2022)
rmia   ratios against those of a population (Zarifzadeh et al. 2024)
"""
