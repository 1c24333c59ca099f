"""The foundation: checks of settings, the command line, devices, ranks, memory, files, HTTP.

May import: nothing of this project. Start with checks.py (the form of every error) and distributed.py (ranks).
"""
