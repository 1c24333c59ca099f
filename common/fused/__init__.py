"""Decode steps of Llama-like models, as five Triton kernels per block; docs/decoding.md explains them.

May import: base, maths, tasks, model. Start with step.py (the order of the kernels), then kernels.py.
"""
