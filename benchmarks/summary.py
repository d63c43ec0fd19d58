"""What RESULTS.md opens with: a summary, what missed its target, and every ratio that has one.

All of it is read from the sections below.
"""

from __future__ import annotations

import re

SHORT, MISSED, HEADING = "Summary", "What missed its target", "Every ratio and its target"
_JUDGED = {"ratio", "target", "verdict"}
_MADE = (SHORT, MISSED, HEADING)
_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.S | re.M)
_MEASURED = re.compile(r"^Measured on (?:(?P<date>\d{4}-\d\d-\d\d), )?(?P<machine>.+)\.$", re.M)


def with_summary(page: str) -> str:
    """Return the page with its summary made anew, in front of all sections."""
    sections = [(title, body) for title, body in _SECTION.findall(page) if title not in _MADE]
    head = page[: match.start()] if (match := _SECTION.search(page)) else page
    parts = [f"## {title}\n{body.rstrip()}\n" for title, body in sections]
    return "\n".join([head.rstrip() + "\n", _summary(sections), *parts])


def _summary(sections: list[tuple[str, str]]) -> str:
    lines: list[str] = []
    missed: list[str] = []
    counts: list[str] = []
    machines: list[str] = []
    reached = 0
    for title, body in sections:
        first, before, missed_before = len(lines), reached, len(missed)
        stamp = _MEASURED.search(body)
        date = (stamp and stamp["date"]) or "-"
        if stamp and stamp["machine"] not in machines:
            machines.append(stamp["machine"])
        number = 1 + machines.index(stamp["machine"]) if stamp else 0
        for row in read_rows(body):
            if row["target"] in ("-", ""):
                continue
            verdict = row["verdict"].split()[0]
            reached += verdict == "ok"
            shown = verdict if verdict == "ok" else f"**{verdict.lower()}**"
            told = f"| [{title}](#{_anchor(title)}) | {row['case']} | {row['ratio']} "
            told += f"| {row['target']} |"
            lines.append(f"{told} {shown} | {date} | {number} |")
            if verdict != "ok":
                missed.append(told)
        if len(lines) > first:
            name = f"[{title}](#{_anchor(title)})"
            late = len(missed) - missed_before
            counts.append(f"| {name} | {len(lines) - first} | {reached - before} | {late or '-'} |")
    said = [f"{reached} of {len(lines)} targets reached."]
    said += [f"Machine {i + 1}: {machine}." for i, machine in enumerate(machines)]
    short = [
        f"## {SHORT}",
        "",
        "A figure is the ratio of unisono's time, or bytes, to those of a reference that its "
        "section names, measured in the same run; a target such as `0.75 to 1.25` asks for "
        "agreement. " + " ".join(said),
        "",
        "| benchmark | targets | reached | missed |",
        "|---|---:|---:|---:|",
        *counts,
        "",
        f"## {MISSED}",
        "",
        *(
            ["| benchmark | case | ratio | target |", "|---|---|---:|---:|", *missed]
            if missed
            else ["Nothing."]
        ),
        "",
    ]
    table = [
        "| benchmark | case | ratio | target | verdict | date | machine |",
        "|---|---|---:|---:|---|---|---|",
    ]
    return "\n".join([*short, f"## {HEADING}", "", *table, *lines, ""])


def _anchor(title: str) -> str:
    """Return what Markdown viewers make of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def read_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a benchmark's Markdown tables that have ratio, target and verdict.

    Keys are the names of the columns; the first one's is always `case`.
    """
    rows: list[dict[str, str]] = []
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif set(cells) >= _JUDGED:
            columns = ["case", *cells[1:]]
        elif columns and not set(line) <= set("|-: "):
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows
