#!/usr/bin/env python3
"""Draws which keys a query sees, straight from equations 1 to 3 of docs/semantics.md.

    python3 docs/draw_pattern.py           writes the pictures of the documents: docs/pattern.svg, docs/phases.svg
    python3 docs/draw_pattern.py --check   fails when a picture in docs/ is not what this script draws

A panel is a query x key matrix: row t, column k, the first position at the top left. The picture needs no background
of its own: its colours are mid-tones that read on white and on black.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).resolve().parent
CELL = 6  # pixels a position
GAP = 26  # between panels
MARGIN = 44  # left, for the row titles
TITLE = 40  # above, for the column titles
CAPTION = 46  # below
COLOURS = ["#3b82d6", "#e0862b", "#2ba38f", "#a65fd0", "#d6506b"]  # one a branch
TEXT = "#7a828e"
FRAME = "#8b93a066"
BOUNDARY = "#8b93a0"


@dataclasses.dataclass(frozen=True)
class Branch:
    segment: int
    dilation: int


@dataclasses.dataclass(frozen=True)
class Pattern:
    tokens: int
    heads: int
    branches: tuple[Branch, ...]
    phase: str  # by_head, by_head_block, every
    causal: bool


def segment_of(branch: Branch, t: int) -> int:
    return t // branch.segment * branch.segment  # eq. 1, one document


def class_of(branch: Branch, t: int) -> int:
    return (t - segment_of(branch, t)) % branch.dilation  # eq. 2


def takes_part(pattern: Pattern, branch: Branch, head: int, c: int) -> bool:
    if pattern.phase == "every":
        return True
    if pattern.phase == "by_head":
        return c == head % branch.dilation
    return c == head // math.ceil(pattern.heads / branch.dilation)  # by_head_block


def sees(pattern: Pattern, branch: Branch, head: int, t: int, k: int) -> bool:
    """Is k in S_i(t, j)?  Eq. 3."""
    return (
        segment_of(branch, k) == segment_of(branch, t)
        and class_of(branch, k) == class_of(branch, t)
        and takes_part(pattern, branch, head, class_of(branch, t))
        and (k <= t or not pattern.causal)
    )


def text(x: float, y: float, content: str, size: int = 12, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(content)}</text>"
    )


def square(t: int, k: int, part: int = 0, parts: int = 1) -> str:
    """A cell as an SVG path; with several parts, one upright strip of it."""
    side = CELL - 1
    return f"M{k * CELL + 0.5 + part * side / parts:g} {t * CELL + 0.5:g}h{side / parts:g}v{side}h-{side / parts:g}z"


def filled(squares: list[str], colour: str) -> str:
    return f'<path fill="{colour}" d="{"".join(squares)}"/>' if squares else ""


def frame(pattern: Pattern, branch: Branch | None) -> str:
    side = pattern.tokens * CELL
    lines = [f'<rect width="{side}" height="{side}" fill="none" stroke="{FRAME}"/>']
    if branch is not None:  # the segments that queries and keys share
        for start in range(0, pattern.tokens, branch.segment):
            length = (min(start + branch.segment, pattern.tokens) - start) * CELL
            lines.append(
                f'<rect x="{start * CELL}" y="{start * CELL}" width="{length}" height="{length}" fill="none" '
                f'stroke="{BOUNDARY}" stroke-width="0.8"/>'
            )
    return "".join(lines)


def one_branch(pattern: Pattern, i: int, head: int) -> str:
    branch = pattern.branches[i]
    positions = range(pattern.tokens)
    squares = [square(t, k) for t in positions for k in positions if sees(pattern, branch, head, t, k)]
    return filled(squares, COLOURS[i]) + frame(pattern, branch)


def all_branches(pattern: Pattern, head: int) -> str:
    """The multiset of eq. 4: a key that several branches reach shows a strip of each colour."""
    squares: list[list[str]] = [[] for _ in pattern.branches]
    for t in range(pattern.tokens):
        for k in range(pattern.tokens):
            reached = [i for i, branch in enumerate(pattern.branches) if sees(pattern, branch, head, t, k)]
            for part, i in enumerate(reached):
                squares[i].append(square(t, k, part, len(reached)))
    return "".join(filled(of_branch, COLOURS[i]) for i, of_branch in enumerate(squares)) + frame(pattern, None)


def svg(width: int, height: int, label: str, body: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif" fill="{TEXT}">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def panel(x: float, y: float, body: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">{body}</g>'


def draw_pattern(pattern: Pattern, heads: list[int]) -> str:
    """Rows are heads, columns are branches, the last column is what the softmax runs over."""
    side = pattern.tokens * CELL
    body = []
    columns = len(pattern.branches) + 1
    for row, head in enumerate(heads):
        y = TITLE + row * (side + GAP)
        body.append(f'<g transform="rotate(-90 {MARGIN - 14} {y + side / 2:g})">')
        body.append(text(MARGIN - 14, y + side / 2, f"head {head}", 13, weight="600") + "</g>")
        for i, branch in enumerate(pattern.branches):
            x = MARGIN + i * (side + GAP)
            if row == 0:
                title = f"segment {branch.segment}, dilation {branch.dilation}"
                body.append(text(x + side / 2, 16, title, 13, weight="600"))
                body.append(text(x + side / 2, 32, "keys →", 11))
            if i > 0:
                body.append(text(x - GAP / 2, y + side / 2 + 6, "+", 18))
            body.append(panel(x, y, one_branch(pattern, i, head)))
        x = MARGIN + len(pattern.branches) * (side + GAP)
        if row == 0:
            body.append(text(x + side / 2, 16, "one softmax over all", 13, weight="600"))
            body.append(text(x + side / 2, 32, "keys →", 11))
        body.append(text(x - GAP / 2, y + side / 2 + 6, "=", 18))
        body.append(panel(x, y, all_branches(pattern, head)))
    width = MARGIN + columns * (side + GAP) - GAP + 8
    bottom = TITLE + len(heads) * (side + GAP) - GAP
    what = f"{pattern.tokens} tokens, {'' if pattern.causal else 'not '}causal. Rows are queries, columns are keys."
    body.append(text(MARGIN, bottom + 20, what, 12, "start"))
    note = "The last segment is just shorter. A key that two branches reach counts twice (a strip of each colour)."
    body.append(text(MARGIN, bottom + 37, note, 12, "start"))
    return svg(width, bottom + CAPTION, "A dilated attention pattern: query by key matrices by branch and head", body)


def draw_phases(pattern: Pattern) -> str:
    """Rows are phase rules, columns are heads, one branch: which class takes part in which head."""
    side = pattern.tokens * CELL
    body = []
    for row, phase in enumerate(["by_head", "by_head_block", "every"]):
        y = TITLE - 12 + row * (side + GAP)
        body.append(f'<g transform="rotate(-90 {MARGIN - 14} {y + side / 2:g})">')
        body.append(text(MARGIN - 14, y + side / 2, phase, 13, weight="600") + "</g>")
        for head in range(pattern.heads):
            x = MARGIN + head * (side + GAP)
            if row == 0:
                body.append(text(x + side / 2, 18, f"head {head}", 13, weight="600"))
            body.append(panel(x, y, one_branch(dataclasses.replace(pattern, phase=phase), 0, head)))
    width = MARGIN + pattern.heads * (side + GAP) - GAP + 8
    height = TITLE - 12 + 3 * (side + GAP) - GAP + 8
    return svg(width, height, "The phase rules: which class takes part in which head", body)


def pictures() -> dict[str, str]:
    nested = Pattern(37, 4, (Branch(8, 1), Branch(16, 2), Branch(64, 4)), "by_head", causal=True)
    phases = Pattern(24, 4, (Branch(16, 2),), "by_head", causal=False)
    return {"pattern.svg": draw_pattern(nested, [0, 1]), "phases.svg": draw_phases(phases)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files in docs/ and write nothing")
    check = parser.parse_args().check
    stale = []
    for file_name, content in pictures().items():
        path = HERE / file_name
        if not check:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(file_name)
    if stale:
        print(f"not what draw_pattern.py draws: {', '.join(stale)}; run python3 docs/draw_pattern.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
