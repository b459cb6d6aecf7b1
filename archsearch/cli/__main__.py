"""`python -m archsearch.cli`."""

from archsearch.cli import main

main()
