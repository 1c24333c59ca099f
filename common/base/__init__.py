"""What stands under everything: checks of settings, the command line, devices, ranks, files, HTTP.

May import: nothing of this project. Start with checks.py (the form of every error) and distributed.py (ranks).
"""
