"""The first table of RESULTS.md: every ratio that has a target, read from the sections below it."""

from __future__ import annotations

import re

from unisono.cli.bench import read_rows

HEADING = "Every ratio and its target"
_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.S | re.M)
_MEASURED = re.compile(r"^Measured on (?:(?P<date>\d{4}-\d\d-\d\d), )?(?P<machine>.+)\.$", re.M)


def with_summary(page: str) -> str:
    """Return the page with its summary made anew, in front of all sections."""
    sections = [(title, body) for title, body in _SECTION.findall(page) if title != HEADING]
    head = page[: match.start()] if (match := _SECTION.search(page)) else page
    parts = [f"## {title}\n{body.rstrip()}\n" for title, body in sections]
    return "\n".join([head.rstrip() + "\n", _summary(sections), *parts])


def _summary(sections: list[tuple[str, str]]) -> str:
    lines: list[str] = []
    machines: list[str] = []
    reached = 0
    for title, body in sections:
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
            lines.append(
                f"| [{title}](#{_anchor(title)}) | {row['case']} | {row['ratio']} "
                f"| {row['target']} | {shown} | {date} | {number} |"
            )
    said = [f"{reached} of {len(lines)} targets reached."]
    said += [f"Machine {i + 1}: {machine}." for i, machine in enumerate(machines)]
    table = [
        "| benchmark | case | ratio | target | verdict | date | machine |",
        "|---|---|---:|---:|---|---|---|",
    ]
    return "\n".join([f"## {HEADING}", "", " ".join(said), "", *table, *lines, ""])


def _anchor(title: str) -> str:
    """Return what Markdown viewers make of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
