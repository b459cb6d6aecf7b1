"""Scripts that run in the interpreters of engines. They import nothing of archsearch."""
