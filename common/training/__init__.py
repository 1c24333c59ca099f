"""What an update needs besides a loss: AdamW, micro-batches that fit into memory, sharding, offloading.

May import: base, maths, tasks, model. Start with optim.py, then budgets.py (what happens when memory runs out).
"""
