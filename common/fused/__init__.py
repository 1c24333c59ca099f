"""Decode steps of Llama-like models in Triton: five kernels per block; see docs/decoding.md.

May import: base, maths, tasks, model. Start with step.py (the order of the kernels), then
kernels.py.
"""
