"""Two kinds of SVG, in colours that read on light and on dark pages, over a transparent background."""

import html
import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

TEXT = "#808080"
GRID = "#80808040"
OURS = "#2f81f7"
FLOOR = "#808080"
PEERS = ["#d9730d", "#2a9d50", "#a05bd6", "#d64a7a", "#12939a", "#a8871a"]
FONT = 'font-family="sans-serif" font-size="12"'


@dataclass
class Bar:
    label: str
    fraction: float  # of 1
    peer: Optional[float]


@dataclass
class Series:
    label: str
    points: List[Tuple[float, float]]
    kind: str  # "ours", "peer" or "floor"


def text(x, y, words, anchor="start", fill=TEXT, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" {more}>{html.escape(words)}</text>'


def line(x1, y1, x2, y2, stroke=GRID, more=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" {more}/>'


def svg(width, height, title, parts):
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" {FONT}>\n<title>{html.escape(title)}</title>')
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def bar_chart(title, ours, peer, bars):
    """Horizontal bars of `fraction`, a tick where the peer is, an axis from 0 to 100 % or what is larger."""
    left, right, top, step = 330, 60, 62, 22
    width, height = 900, top + step * len(bars) + 34
    most = max([1.0] + [bar.fraction for bar in bars] + [bar.peer for bar in bars if bar.peer])
    scale = (width - left - right) / most
    bottom = top + step * len(bars)
    parts = [text(16, 22, title, more='font-size="14"')]
    parts += [f'<rect x="{left}" y="36" width="12" height="12" fill="{OURS}"/>', text(left + 18, 46, ours)]
    parts += [f'<rect x="{left + 130}" y="34" width="4" height="16" fill="{PEERS[0]}"/>', text(left + 142, 46, peer)]
    for percent in range(0, int(100 * most) + 1, 25):
        x = left + scale * percent / 100
        parts += [line(x, top - 4, x, bottom), text(x, bottom + 18, f"{percent} %", "middle")]
    for i, bar in enumerate(bars):
        y = top + step * i
        length = scale * bar.fraction
        parts.append(text(left - 8, y + 13, bar.label, "end"))
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="14" fill="{OURS}"/>')
        parts.append(text(left + length + 6, y + 13, f"{100 * bar.fraction:.0f} %"))
        if bar.peer:
            parts.append(f'<rect x="{left + scale * bar.peer - 2:.1f}" y="{y}" width="4" height="18" '
                         f'fill="{PEERS[0]}"/>')
    return svg(width, height, title, parts)


def log_chart(title, x_label, y_label, series):
    """Lines over two logarithmic axes, each labelled at its right end; x in powers of 2, y in powers of 10."""
    left, right, top, bottom = 70, 190, 44, 50
    width, height = 900, 520
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_low, x_high = math.log2(min(xs)), max(math.log2(max(xs)), math.log2(min(xs)) + 1)
    y_low, y_high = math.floor(math.log10(min(ys)) * 2) / 2, max(math.ceil(math.log10(max(ys)) * 2) / 2, 1)

    def place(x, y):
        across = (math.log2(x) - x_low) / (x_high - x_low)
        up = (math.log10(y) - y_low) / (y_high - y_low)
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts = [text(16, 22, title, more='font-size="14"'), text(16, height - bottom + 40, y_label + ", against " + x_label)]
    for power in range(math.ceil(x_low), math.floor(x_high) + 1, 2):
        x, _ = place(2.0**power, 10.0**y_low)
        name = f"{2**power // 1024}k" if 1024 <= 2**power < 2**20 else f"{2**power >> 20}M" if power >= 20 else str(2**power)
        parts += [line(x, top, x, height - bottom), text(x, height - bottom + 18, name, "middle")]
    for power in range(math.ceil(y_low), math.floor(y_high) + 1):
        _, y = place(2.0**x_low, 10.0**power)
        parts += [line(left, y, width - right, y), text(left - 8, y + 4, f"{10**power:,}" if power >= 0 else
                                                        f"{10.0**power:g}", "end")]
    labels = []
    peers = iter(PEERS * len(series))
    for one in series:
        colour = OURS if one.kind == "ours" else FLOOR if one.kind == "floor" else next(peers)
        style = {"ours": 'stroke-width="2.5"', "peer": 'stroke-width="1.5"',
                 "floor": 'stroke-width="1.5" stroke-dasharray="5 4"'}[one.kind]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in one.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {style}/>')
        labels.append([place(*one.points[-1])[1], one.label, colour])
    labels.sort()
    for i, label in enumerate(labels):  # no label over another
        label[0] = max(label[0], labels[i - 1][0] + 16 if i else label[0])
        parts.append(text(width - right + 8, label[0] + 4, label[1], fill=label[2]))
    return svg(width, height, title, parts)
