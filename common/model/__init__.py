"""A language model from its folder to log-probabilities: loading, LoRA, images, attention, output head, reward models.

May import: base, maths, tasks. Start with models.py (loading), then logprobs.py (what the losses need).
"""
