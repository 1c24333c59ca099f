"""Poster-layout GRPO: the training script, the reward service, and the reward."""
