"""A run as a whole: rules for its options, checkpoints, interrupts, metrics, guards, the profiler.

May import: base, maths, tasks, model, generation, training. Start with checkpoint.py, then interrupts.py.
"""
