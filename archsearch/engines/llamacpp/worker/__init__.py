"""Scripts that run in the engine's interpreter, beside `engines/child/loop.py`. They import nothing
of archsearch."""
