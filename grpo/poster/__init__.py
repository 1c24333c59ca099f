"""GRPO for poster layouts: the training script, its reward service, the reward, and data.

May import: all rooms of common. Start with poster_grpo.py (the training script), then layout.py
(what a poster is), reward.py (its score) and reward_server.py (the service).
"""
