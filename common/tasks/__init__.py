"""Tasks: data, prompts, the built-in task, comparing answers, rewards, similarity of responses.

May import: base, maths. Start with data.py (what a row is), then rewards.py (what a reward function is).
"""
