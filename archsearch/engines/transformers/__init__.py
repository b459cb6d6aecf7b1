"""transformers, in archsearch's own process."""
