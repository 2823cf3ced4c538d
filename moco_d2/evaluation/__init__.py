"""Measures of features: is what pretraining learned of use?"""
