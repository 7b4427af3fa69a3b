#!/usr/bin/env python3
"""Draws what GPUs did for their ranks, from a trace that the tool wrote, as SVG.

    annulus run --device cuda --ranks 4 --strategy ring ... --trace trace.json
    python3 docs/draw_trace.py trace.json --from-ms 1459 --ms 6 > docs/gpu-trace.svg
"""

import argparse
import json

KERNELS, COPIES = 5, 6  # tracks of the trace
COLOURS = {"attend": "#1f6feb", "merge": "#8ab4f8", "round": "#8ab4f8", "Delta": "#8ab4f8", "copy": "#e8710a"}
LEFT, WIDTH, ROW, GAP = 80, 820, 16, 10  # pixels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--from-ms", type=float, required=True)
    parser.add_argument("--ms", type=float, required=True)
    options = parser.parse_args()
    with open(options.trace, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    begin, length = options.from_ms * 1e3, options.ms * 1e3
    slices = [e for e in events if e["ph"] == "X" and e["tid"] in (KERNELS, COPIES)]
    slices = [e for e in slices if e["ts"] + e["dur"] > begin and e["ts"] < begin + length]
    ranks = sorted({e["pid"] for e in slices})
    top = {rank: 34 + i * (2 * ROW + GAP) for i, rank in enumerate(ranks)}
    height = 34 + len(ranks) * (2 * ROW + GAP) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + 40}" height="{height}" fill="white"/>',
    ]
    at = LEFT
    for colour, name in ("#1f6feb", "kernels: queries against keys"), ("#e8710a", "copies of the next keys"):
        lines.append(f'<rect x="{at}" y="10" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{at + 18}" y="21">{name}</text>')
        at += 240
    for rank in ranks:
        lines.append(f'<text x="10" y="{top[rank] + ROW + 4}">rank {rank}</text>')
    for e in slices:
        first = max(e["ts"], begin)
        x = LEFT + (first - begin) / length * WIDTH
        width = max((min(e["ts"] + e["dur"], begin + length) - first) / length * WIDTH - 0.5, 0.7)
        y = top[e["pid"]] + (ROW if e["tid"] == COPIES else 0)
        lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" fill="{COLOURS.get(e["name"], "#999")}"/>'
        )
    for i in range(7):
        x = LEFT + WIDTH * i / 6
        lines.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">{options.ms * i / 6:.1f} ms</text>')
    lines.append("</svg>")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
