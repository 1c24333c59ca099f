"""Sampling from a policy: sampler, decode engine, caches, and the batch that goes to the update.

May import: base, maths, tasks, model, fused. Start with batches.py (what a batch is), then
rollout.py and engine.py.
"""
