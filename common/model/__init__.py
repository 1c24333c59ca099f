"""Language models: loading, LoRA, images, attention, log-probabilities, reward models.

May import: base, maths, tasks. Start with models.py (loading), then logprobs.py (what losses need) and
passes.py (old and reference log-probabilities of a batch).
"""
