"""What a run found, for people, out of its folder alone: a number that is not in the files is not
shown; what is worked out from numbers that are says so where it is shown."""

from archsearch.report.page import write_comparison, write_figures, write_html
from archsearch.report.terminal.search import summary_text

__all__ = ["summary_text", "write_comparison", "write_figures", "write_html"]
