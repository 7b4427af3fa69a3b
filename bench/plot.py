#!/usr/bin/env python3
"""Draws docs/h200-forward.svg and docs/h200-backward.svg from bench/results. With --check: fails where they differ.

Left: one branch, TFLOP/s, Annulus at dilation 1 and 16 beside cuDNN on dense sequences of the same length.
Right: several branches at 512K tokens, milliseconds, Annulus beside the same pattern composed on cuDNN; the second
picture has forward and backward there.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS, LIGHT, THEIRS = "#1f6feb", "#8ab4f8", "#b0b4ba"
ROW, BAR, LEFT, WIDTH = 44, 11, 150, 300  # pixels: of a group of bars, of a bar; where bars begin, how long they get


def text(x, y, content, anchor="start", weight="normal"):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{content}</text>'


def panel(x, title, groups, legend, unit):
    """A group is (label, [(value, colour), ...]); bars of all groups have one scale."""
    longest = max(value for _, bars in groups for value, _ in bars)
    lines = [text(x, 18, title, weight="bold")]
    at = x
    for colour, name in legend:
        lines.append(f'<rect x="{at}" y="28" width="10" height="10" fill="{colour}"/>')
        lines.append(text(at + 14, 37, name))
        at += 14 + 7 * len(name) + 16
    for i, (label, bars) in enumerate(groups):
        y = 52 + i * ROW
        lines.append(text(x + LEFT - 8, y + BAR * len(bars) / 2 + 4, label, "end"))
        for j, (value, colour) in enumerate(bars):
            length = round(value / longest * WIDTH, 1)
            lines.append(f'<rect x="{x + LEFT}" y="{y + j * BAR}" width="{length}" height="{BAR - 1}" '
                         f'fill="{colour}"/>')
            lines.append(text(x + LEFT + length + 4, y + j * BAR + 9, f"{value:.3g} {unit}"))
    return lines


def forward_dense(head_dim, length, r, causal):
    return f"dense d{head_dim} m{length} r{r}{causal}"


def backward_dense(head_dim, length, r, causal):
    return f"backward d{head_dim} m{length}{causal} r{r}"


# picture -> (name of a row of one branch, what follows the name of a pattern, what a pass is called)
PICTURES = {
    "h200-forward": (forward_dense, "", "forward"),
    "h200-backward": (backward_dense, " forward and backward", "forward and backward"),
}


def draw(picture, report):
    dense_name, pattern_pass, passes = PICTURES[picture]
    rows = {row["name"]: row for row in report["results"]}
    dense, patterns = [], []
    for head_dim in (128, 64):
        for causal in ("", " causal"):
            comma = "," if causal else ""
            for length in (2048, 16384):
                one, far = (rows[dense_name(head_dim, length, r, causal)]["tflop_per_s"] for r in (1, 16))
                dense.append((f"D = {head_dim}, {length}{comma}{causal}",
                              [(one["annulus"], OURS), (far["annulus"], LIGHT), (one["cudnn"], THEIRS)]))
            for branches in (2, 5):
                ms = rows[f"512K d{head_dim} {branches} branches{causal}{pattern_pass}"]["ms"]
                patterns.append((f"D = {head_dim}, {branches} br.{comma}{causal}",
                                 [(ms["annulus"], OURS), (ms["composed"], THEIRS)]))
    title = picture.removeprefix("h200-").capitalize()
    lines = panel(10, f"{title}, one branch, groups of 2,048 and 16,384 rows", dense,
                  [(OURS, "Annulus, dilation 1"), (LIGHT, "dilation 16"), (THEIRS, "cuDNN, dense")], "TFLOP/s")
    lines += panel(560, f"Several branches, {passes}, 512K tokens, 16 heads: less is better", patterns,
                   [(OURS, "Annulus"), (THEIRS, "composed of views, cuDNN and a merge")], "ms")
    height = 52 + 8 * ROW
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1110 {height}" font-family="sans-serif" '
            f'font-size="11">\n<rect width="1110" height="{height}" fill="#ffffff"/>\n'
            + "\n".join(lines) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = 0
    for name in PICTURES:
        results = ROOT / f"bench/results/nvidia-{name}.json"
        picture = ROOT / f"docs/{name}.svg"
        drawn = draw(name, json.loads(results.read_text(encoding="utf-8")))
        if not arguments.check:
            picture.write_text(drawn, encoding="utf-8")
        elif picture.read_text(encoding="utf-8") != drawn:
            print(f"{picture.relative_to(ROOT)} is not what {results.relative_to(ROOT)} says: run python3 bench/plot.py")
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
