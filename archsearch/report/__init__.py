"""What a run found, for people: `summary_text` for the terminal, `write_html` for one self-contained page.

Both read the run folder and nothing else. A number that is not in the files is not shown; what is worked out here from numbers
that are (overhead, which candidates cannot be told apart, rounding steps) says so where it stands.
"""

from archsearch.report.drawing import INK, MARK, SERIES, STYLE
from archsearch.report.page import write_html
from archsearch.report.reading import Candidate, Reading, candidates, complete_trials, groups, read_run
from archsearch.report.terminal.summary import BEST_SHOWN, summary_text
from archsearch.report.verdict import Verdict, verdict
from archsearch.report.words import MANTISSA_BITS, SOURCES

__all__ = [
    "BEST_SHOWN",
    "INK",
    "MANTISSA_BITS",
    "MARK",
    "SERIES",
    "SOURCES",
    "STYLE",
    "Candidate",
    "Reading",
    "Verdict",
    "candidates",
    "complete_trials",
    "groups",
    "read_run",
    "summary_text",
    "verdict",
    "write_html",
]
