"""Before a run: whether it fits into memory, which options make it fit, and what GPUs can do.

May import: base, maths, tasks, model, fused, generation, training. Start with plan.py, then
footprint.py (what needs memory).
"""
