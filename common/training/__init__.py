"""What an update needs besides a loss: AdamW, micro-batch sizes, sharding, offloading.

May import: base, maths, tasks, model, fused. Start with optim.py, then budgets.py (out of memory in
an update).
"""
