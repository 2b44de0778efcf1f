"""The table as an SVG picture, in light and dark: a bar per engine, cell and row. Lengths are relative to the best other engine."""

from html import escape

import report
from engines import ENGINES, FORMATS, MODELS

PANEL_WIDTH, PANEL_HEIGHT, GAP, LEFT, TOP = 330, 300, 26, 8, 84
LABEL, VALUE = 92, 46  # widths of the row names and of the number after the longest bar
BAR, BETWEEN_ROWS = 11, 14
ROWS = ["prefill 512", "prefill 2048", "decode at 128", "decode at 2048", "batch"]

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; } .panel { font-size: 13px; font-weight: 600; } .ours { font-weight: 600; } .quiet { fill: #59636e; }
.line { stroke: #59636e; stroke-dasharray: 2 4; opacity: .6; }
.pagedllm { fill: #0969da; } .openvino { fill: #8250df; } .vllm { fill: #bf8700; } .llama_cpp { fill: #6e7781; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .quiet { fill: #9198a1; } .line { stroke: #9198a1; }
  .pagedllm { fill: #4493f8; } .openvino { fill: #ab7df8; } .vllm { fill: #d29922; } .llama_cpp { fill: #8b949e; }
}
"""


def draw(about, runs):
    table = {(line.cell, line.row): line for line in report.lines(runs)}
    longest = max([relative(line, engine) for line in table.values() for engine in line.values if line.row in ROWS], default=1)
    scale = (PANEL_WIDTH - LABEL - VALUE) / max(longest, report.GOALS["batch"])
    panels = [
        panel(model, format, table, scale, LEFT + column * (PANEL_WIDTH + GAP), TOP + row * (PANEL_HEIGHT + GAP))
        for row, model in enumerate(MODELS)
        for column, format in enumerate(FORMATS)
    ]
    width = 2 * LEFT + len(FORMATS) * PANEL_WIDTH + (len(FORMATS) - 1) * GAP
    height = TOP + len(MODELS) * (PANEL_HEIGHT + GAP)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "<title>Tokens per second of pagedllm and of other engines</title>",
        f"<style>{STYLE}</style>",
        text(LEFT, 22, "Tokens per second; bars relative to the best other engine (dashed)", "title"),
        text(LEFT, 41, f"{about['cpu']} ({', '.join(about['vectors'])}), {about['threads']} threads, {about['date']}", "quiet"),
        *legend(),
        *panels,
        "</svg>",
        "",
    ])


def relative(line, engine):
    """Returns the value relative to the best other engine, or to the fastest engine if there is no other."""
    values = line.values
    return values[engine] / (values[line.peer] if line.peer else max(values.values()))


def legend():
    x = LEFT
    for name, engine in ENGINES.items():
        yield bar(x, 52, BAR, name) + text(x + BAR + 5, 61, engine.title)
        x += 100


def panel(model, format, table, scale, x, y):
    parts = [text(x, y + 12, f"{model}, {format}", "panel")]
    y += 24
    best = x + LABEL + scale
    parts.append(f'<line class="line" x1="{best:.1f}" x2="{best:.1f}" y1="{y}" y2="{y + len(ROWS) * group_height() - BETWEEN_ROWS}"/>')
    for row in ROWS:
        line = table.get((f"{model}-{format}", row))
        parts += [text(x, y + 2 * BAR + 4, row, "quiet")] + (bars(line, x + LABEL, y, scale) if line else [])
        y += group_height()
    return "\n".join(parts)


def group_height():
    return len(ENGINES) * BAR + BETWEEN_ROWS


def bars(line, x, y, scale):
    parts = []
    for index, engine in enumerate(ENGINES):
        top = y + index * BAR
        if engine in line.values:
            length = relative(line, engine) * scale
            style = "ours" if engine == report.PAGEDLLM else "quiet"
            parts.append(bar(x, top, length, engine) + text(x + length + 4, top + BAR - 2, report.number(line.values[engine]), style))
    return parts


def bar(x, y, length, engine):
    return f'<rect class="{engine}" x="{x}" y="{y}" width="{length:.1f}" height="{BAR - 2}" rx="1.5"/>'


def text(x, y, what, style=""):
    return f'<text x="{x:.1f}" y="{y}"' + (f' class="{style}"' if style else "") + f">{escape(what)}</text>"
