"""Formulas on plain tensors: losses, advantages, divergences, sampling.

May import: nothing of this project. Start with losses.py, which names the equations of the papers.
"""
