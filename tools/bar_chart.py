"""Draws one horizontal bar chart as SVG text, the same bytes for the same figures. Pure; knows nothing of measurements.

Refuses nothing: a chart without bars is an empty chart. Called by measurements.py.
"""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH = 900
LABEL_WIDTH = 380
BAR_WIDTH = 330
ROW_HEIGHT = 24
TOP = 44
CHARACTERS = 60  # of a label, at the font size below
STYLE = "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.bar{fill:#4c78a8}.line{stroke:#c44e52}"


class Bar(NamedTuple):
    """One row: `shown` stands behind the bar."""

    label: str
    value: float
    shown: str


def bar_chart(title: str, bars: list[Bar], *, line_at: float | None = None) -> str:
    """Bars of `value`, none below 0; a vertical line at `line_at` shows where a ratio is 1."""
    most = max([bar.value for bar in bars] + ([line_at] if line_at else []), default=0.0) or 1.0
    height = TOP + ROW_HEIGHT * len(bars) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
        *(_row(bar, TOP + ROW_HEIGHT * n, most) for n, bar in enumerate(bars)),
    ]
    if line_at is not None:
        x = LABEL_WIDTH + BAR_WIDTH * line_at / most
        parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 8}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _row(bar: Bar, top: int, most: float) -> str:
    width = max(BAR_WIDTH * bar.value / most, 1.0)
    label = bar.label if len(bar.label) <= CHARACTERS else bar.label[: CHARACTERS - 1] + "…"
    middle = top + ROW_HEIGHT * 2 // 3
    return (
        f'<text x="{LABEL_WIDTH - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>'
        f'<rect class="bar" x="{LABEL_WIDTH}" y="{top + 4}" width="{width:.1f}" height="{ROW_HEIGHT - 8}"/>'
        f'<text x="{LABEL_WIDTH + width + 6:.1f}" y="{middle}">{escape(bar.shown)}</text>'
    )
