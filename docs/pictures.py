"""Draws the pictures of the documentation from the code of its own pages.

    python docs/pictures.py                  all of them, into docs/img
    python docs/pictures.py data_losses      one of them

Each drawing first runs the Python blocks of the tutorial it stands in.
"""

from __future__ import annotations

import html
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import unisono
from unisono.errors import UnisonoError

HERE = Path(__file__).parent
RANKS = ("#3f51b5", "#ff7043", "#26a69a", "#ab47bc")
"""One colour for each rank, in all pictures."""


def page(name: str) -> dict[str, Any]:
    """Run the Python blocks of a tutorial and return the names they leave."""
    text = (HERE / "tutorials" / name).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    return names


def data_losses() -> None:
    """Loss curves of the same run on one, two and four ranks."""
    names = page("data.md")
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(names["alone"], color="#bbbbbb", lw=7, label="one process")
    for ranks, style in ((2, "-"), (4, ":")):
        losses = unisono.run(names["train"], ranks=ranks)[0][0]
        axes.plot(losses, style, color=RANKS[ranks // 4], lw=2, label=f"{ranks} ranks")
    axes.set(xlabel="step", ylabel="loss", title="More ranks, the same curve")
    axes.legend(frameon=False)
    _save(figure, "data_losses.svg")


def graph_owners() -> None:
    """Digits in the plane of their first components, by owner; the halo of rank 0."""
    names = page("graph.md")
    nodes, edges, count = names["nodes"], names["edges"], names["count"]
    owner = names["GraphPartition"].morton(nodes[:, :3], 4).owner
    source, target = edges
    halo = torch.unique(source[(owner[target] == 0) & (owner[source] != 0)])
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for rank in range(4):
        mine = owner == rank
        axes.scatter(*nodes[mine, :2].T, s=7, color=RANKS[rank], label=f"rank {rank}", lw=0)
    axes.scatter(
        *nodes[halo, :2].T, s=22, facecolors="none", edgecolors="k", lw=0.5, label="fetched by 0"
    )
    axes.set_title(f"{count} digits, four owners; what rank 0 fetches of the others")
    axes.set_axis_off()
    axes.legend(frameon=False, markerscale=2)
    _save(figure, "graph_owners.png")


def space_fields() -> None:
    """The plate in blocks: what the camera sees, the truth, and what the network infers."""
    names = page("space.md")
    plates, net, size = names["plates"], names["plain"], names["SIZE"]
    with torch.no_grad():
        inferred = net(plates[30:, :1])
    shown = (
        ("u at first", plates[0, 0]), ("u, seen by the camera", plates[30, 0]),
        ("v, the truth", plates[30, 1]), ("v, inferred", inferred[0, 0]),
    )  # fmt: skip
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    for axes, (title, state) in zip(figure.subplots(1, 4), shown, strict=True):
        high = 1.0 if title.startswith("u") else 0.4
        axes.imshow(state, cmap="magma", vmin=0, vmax=high)
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
        _blocks(axes, size)
    _save(figure, "space_fields.png")


def error_bars() -> None:
    """The band around the curve with a gap, and the calibration of the patients' intervals."""
    names = page("error_bars.md")
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    grid = np.linspace(-1.7, 2.4, 200)
    mean, std = (part[:, 0] for part in names["net"].predict(grid[:, None]))
    total = np.hypot(std, 0.05)
    left.fill_between(
        grid, mean - 2 * total, mean + 2 * total, color=RANKS[0], alpha=0.25, lw=0, label="two std"
    )
    left.plot(grid, mean, color=RANKS[0], label="mean")
    left.plot(grid, np.sin(2.2 * grid), "k--", lw=1, label="truth")
    left.plot(names["x"], names["y"], "k.", ms=3, label="seen")
    left.set(title="The band widens where nothing was seen", xlabel="x")
    left.legend(frameon=False, fontsize=8)
    spread = np.sqrt(names["spread"] ** 2 + names["noise"] ** 2)
    levels, shares = names["metric"].calibration_curve(
        names["together"], spread, names["progress"][names["new"]]
    )
    right.plot([0, 1], [0, 1], color="#bbbbbb")
    right.plot(levels, shares, "o-", ms=4, color=RANKS[1])
    right.set(title="90 new patients", xlabel="promised share", ylabel="share inside")
    _save(figure, "error_bars.png")


def next_structure() -> None:
    """Error bars over the strain of a crystal, and what rounds of computing structures bring."""
    names = page("next_structure.md")
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    rng, strains = np.random.default_rng(3), np.linspace(-0.1, 0.12, 90)
    crystals = [names["strained"](rng, strain) for strain in strains]
    energy, std = names["head"](*names["of_atoms"](crystals))
    left.axvspan(-4, 4, color=RANKS[2], alpha=0.2, lw=0, label="range of training")
    left.semilogy(100 * strains, 1e3 * std / 8, ".", color=RANKS[0], label="error bar")
    off = np.abs(energy.numpy() - names["compute"](crystals))
    left.semilogy(100 * strains, 1e3 * off / 8, "k.", ms=2, label="error")
    left.set(title="Error bars know where training ends", xlabel="strain, %", ylabel="meV / atom")
    left.legend(frameon=False, fontsize=8)
    for by_error_bar, label in ((True, "least sure of"), (False, "at random")):
        rounds = np.array([names["choose"](seed, by_error_bar) for seed in range(5)])
        colour = RANKS[not by_error_bar]
        right.plot(rounds.T, color=colour, alpha=0.25, lw=1)
        right.plot(rounds.mean(0), "o-", color=colour, ms=4, label=label)
    right.set(title="Four more structures a round", xlabel="round", ylabel="error, meV / atom")
    right.set_yscale("log")
    right.legend(frameon=False, fontsize=8)
    _save(figure, "next_structure.png")


def _blocks(axes: Axes, size: int) -> None:
    """Outline a 2 x 2 partition, a rank's colour each."""
    half = size / 2
    for rank in range(4):
        row, column = divmod(rank, 2)
        corner = (column * half - 0.5 + 0.4, row * half - 0.5 + 0.4)
        axes.add_patch(_rectangle(corner, half - 0.8, RANKS[rank]))


def _rectangle(corner: tuple[float, float], side: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, side, side, fill=False, edgecolor=colour, lw=1.5)


def explained() -> None:
    """A failure and a hang, as the launcher tells of them: text of real runs, drawn."""
    program = """
import time, torch, unisono


def divide():
    comm = unisono.world()
    share = torch.tensor(12 / (comm.rank - 1))
    return comm.all_reduce(share)


def oversleep():
    comm = unisono.world()
    if comm.rank == 1:
        time.sleep(600)
    comm.barrier()
"""
    panels = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(program, encoding="utf-8")
        for name, deadline in (("divide", None), ("oversleep", 2)):
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(program, str(path), "exec"), names)
            try:
                unisono.run(names[name], ranks=2, timeout_s=deadline, logs=folder)
            except UnisonoError as error:
                told = str(error).replace(f"{folder}/", "")
                told = told.replace(socket.gethostname(), "laptop").splitlines()
                # Frames of ours are left out: the picture shows the reader's own program.
                own = [line for line in told if 'File "/' not in line and "thread 0x" not in line]
                call = f"unisono.run({name}, ranks=2{f', timeout_s={deadline}' * bool(deadline)})"
                panels.append([f">>> {call}", *(line.partition("; logs")[0] for line in own)])
    (HERE / "img" / "explained.svg").write_text(_terminals(panels), encoding="utf-8")


def _terminals(panels: list[list[str]]) -> str:
    """Return texts as windows of a terminal, one below the other."""
    parts, top = [], 0
    for lines in panels:
        height = 20 * len(lines) + 24
        parts.append(f'<rect y="{top}" width="820" height="{height}" rx="8" fill="#1e2430"/>')
        for number, line in enumerate(lines):
            is_loud = line.startswith(("rank", "HINT", "Stopped", "Latest"))
            colour = "#ffb08f" if is_loud else "#9fb3ff" if line.startswith(">>>") else "#d8dee9"
            y, shown = top + 28 + 20 * number, html.escape(line).replace(" ", "&#160;")
            parts.append(f'<text x="16" y="{y}" fill="{colour}">{shown}</text>')
        top += height + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {top - 12}" width="820"'
    style = 'font-family="monospace" font-size="13"'
    return "\n".join([f"{head} {style}>", *parts, "</svg>\n"])


def _save(figure: Figure, name: str) -> None:
    path = HERE / "img" / name
    figure.savefig(path, dpi=110, metadata={"Date": None} if name.endswith("svg") else None)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    pictures = (data_losses, graph_owners, space_fields, error_bars, next_structure, explained)
    for picture in pictures:
        if not sys.argv[1:] or picture.__name__ in sys.argv[1:]:
            picture()
