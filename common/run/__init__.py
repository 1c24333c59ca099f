"""Services for a run: option rules, checkpoints, interrupts, metrics, guards, the profiler.

May import: base, maths, tasks, model, fused, generation, training. Start with checkpoint.py, then
interrupts.py.
"""
