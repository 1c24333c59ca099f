"""Tasks: data, prompts, the built-in task, answer comparison, rewards, response similarity.

May import: base, maths. Start with data.py (what a row is), then rewards.py (what a reward
function is).
"""
