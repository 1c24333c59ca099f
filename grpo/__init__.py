"""GRPO scripts; a package only so that grpo/poster can be imported from anywhere in the clone."""
