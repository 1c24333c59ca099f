"""Before a run: whether it fits into memory, with which settings it would, and what the GPUs of a machine can do.

May import: base, maths, tasks, model, generation, training. Start with plan.py, then footprint.py (what takes memory).
"""
