"""What a run found, for people: `summary_text` for the terminal, `write_html` for one
self-contained page.

Both read the run folder and nothing else. A number that is not in the files is not shown; what is
worked out here from numbers that are (overhead, which candidates are tied, rounding steps) says
so where it is shown.
"""

from archsearch.report.page import write_comparison, write_figures, write_html
from archsearch.report.terminal.search import summary_text

__all__ = [
    "summary_text",
    "write_comparison",
    "write_figures",
    "write_html",
]
