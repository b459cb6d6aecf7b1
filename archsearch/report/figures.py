"""How plots of the page are drawn: colours, canvas, inline SVG. matplotlib is imported on first use."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_P = ParamSpec("_P")
_T = TypeVar("_T")

INK: Final = "#7f7f01"  # stands for the page's text colour: replaced by currentColor once the picture is text
MARK: Final = "#d1495b"
SERIES: Final = ("#2f86b5", "#d1495b", "#d99022", "#3f9a6b", "#9a6fb8", "#8a8f98")
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10.0, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True,
    "grid.color": INK, "grid.alpha": 0.15, "legend.frameon": False, "legend.fontsize": 8.5, "axes.linewidth": 0.8,
}  # fmt: skip


def canvas() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def svg_text(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an inline <svg>: ids made unique in the page, text in the page's colour, nothing that points elsewhere."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = text.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-").replace("xlink:href", "href")
    text = text.replace(INK, "currentColor")
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label, quote=True)}"', 1)


def shade(position: float) -> Any:
    """0..1 -> a colour that reads on white and on black."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("depth", ["#2f86b5", "#2f9d8f", "#d99022", "#d1495b", "#9a4fa0"])(position)


def styled(draw: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """`draw(*args)` in the style of the page; a figure takes its style while it is drawn."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return draw(*args, **kwargs)


def count_axis(axes: Axes, counts: Sequence[int]) -> None:
    """A log2 axis of batch sizes or requests in flight, with a tick at each of `counts`."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(counts), labels=[str(count) for count in sorted(counts)])
    axes.minorticks_off()
    axes.set_xlim(min(counts) / 1.4, max(counts) * 1.4)


def figure_html(figure: Figure, prefix: str, caption: str) -> str:
    """One picture that stands alone in a section, with its caption; `prefix` makes its ids unique in the page."""
    prefix = re.sub(r"[^A-Za-z0-9-]", "-", prefix)
    picture = svg_text(figure, prefix, caption)
    return f'<figure style="max-width: 44rem; margin: 1.2rem 0">{picture}<figcaption>{html.escape(caption)}</figcaption></figure>'
