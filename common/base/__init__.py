"""The foundation: checks of options, the command line, devices, ranks, memory, files, HTTP.

May import: nothing of this project. Start with checks.py (the form of every error), then
distributed.py (ranks).
"""
