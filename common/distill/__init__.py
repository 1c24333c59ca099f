"""Distillation: teachers in this process or behind a server, the divergences from them, completions of theirs.

May import: base, maths, tasks, model, generation, training. Start with distillation.py, then teachers.py.
"""
