"""The text that drafts learn from and are measured on: prompts, what the target writes, plain
text."""
