"""Distillation: local and remote teachers, divergences from them, and their completions.

May import: base, maths, tasks, model, fused, generation, training. Start with distillation.py, then
teachers.py.
"""
