"""What every script imports: the maths, the rollout, and the plumbing around a training loop."""
