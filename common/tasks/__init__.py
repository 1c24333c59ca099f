"""What is asked, and what an answer is worth: rows of data, the built-in task, answers, rewards, similarity.

May import: base, maths. Start with data.py (what a row is), then rewards.py (what a reward function is).
"""
