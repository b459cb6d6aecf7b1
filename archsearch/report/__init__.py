"""What a run found, for people: `summary_text` for the terminal, `write_html` for one
self-contained page.

Both read the run folder and nothing else. A number that is not in the files is not shown; what is
worked out here from numbers that are (overhead, which candidates are tied, rounding steps) says
so where it is shown.
"""

from archsearch.report.charts import Chart, Series
from archsearch.report.headline import Headline, headline
from archsearch.report.page import write_comparison, write_figures, write_html
from archsearch.report.phrases import MANTISSA_BITS, SOURCES
from archsearch.report.reading import Reading, Shown, candidates, complete_trials, groups, read_run
from archsearch.report.terminal.search import BEST_SHOWN, summary_text

__all__ = [
    "BEST_SHOWN",
    "Chart",
    "MANTISSA_BITS",
    "Series",
    "SOURCES",
    "Shown",
    "Reading",
    "Headline",
    "candidates",
    "complete_trials",
    "groups",
    "read_run",
    "summary_text",
    "headline",
    "write_comparison",
    "write_figures",
    "write_html",
]
