"""The demo of `make demo`: prompts of one narrow domain, the project's own."""
