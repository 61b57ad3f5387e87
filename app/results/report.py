#!/usr/bin/env python3
"""Makes the README's result tables and the plots beside this file out of the CSVs beside this file.

    python3 app/results/report.py

Every <device>.csv becomes tables between the README's lines <!-- results:begin --> and <!-- results:end -->, and
<device>-read.svg; every <device>-sweep.csv becomes <device>-keys.svg and a paragraph on cliffs. The CSVs are what
single_query_benchmark wrote, each of one run. Only Python's standard library is needed.
"""

import bisect
import csv
import math
import pathlib
import re
import statistics
import sys

sys.dont_write_bytecode = True  # this folder is for results
import plot  # noqa: E402

FOLDER = pathlib.Path(__file__).resolve().parent
README = FOLDER.parent.parent / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

NUMBERS = ["batch", "query_heads", "kv_heads", "keys", "head_dim"]
TIMES = ["microseconds", "microseconds_min", "microseconds_max", "terabytes_per_second"]
COLUMNS = ["implementation", "device", "dtype", *NUMBERS, "mode", *TIMES]

OURS = ("single_query", "single_query_raw")
NOT_ATTENTION = ("read", "empty")
PEER_NAMES = {
    "sdpa": "SDPA",
    "sdpa_grouped": "SDPA, grouped",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA mem. efficient",
    "sdpa_math": "SDPA math",
    "matmul_softmax": "matmul + softmax",
    "flash_forward": "flash forward",
}
CLIFF = 1.25  # times the median of its neighbours, both in time over floor


def peer_name(name):
    if name.startswith("gather_"):
        return "gather, " + peer_name(name[len("gather_"):])
    return PEER_NAMES.get(name, name)


class Problem:
    """The rows of one attention problem in one mode: a dictionary from name to row."""

    def __init__(self, row, feature):
        self.dtype, self.mode, self.feature = row["dtype"], row["mode"], feature
        for column in NUMBERS:
            setattr(self, column, row[column])
        self.rows = {}

    def time(self, name):
        return self.rows[name]["microseconds"] if name in self.rows else None

    @property
    def ours(self):
        return self.rows.get("single_query")

    @property
    def bytes(self):
        return self.ours["terabytes_per_second"] * self.ours["microseconds"] * 1e6

    @property
    def shape(self):
        words = f"{self.batch} x {self.query_heads}/{self.kv_heads}, {self.keys:,} x {self.head_dim}"
        return words + (f", {self.feature}" if self.feature else "")

    def best_peer(self):
        """(name, microseconds) of the fastest LibTorch peer, or None."""
        peers = [(row["microseconds"], name) for name, row in self.rows.items() if name not in OURS + NOT_ATTENTION]
        return (min(peers)[1], min(peers)[0]) if peers else None

    def fraction_of_read(self):
        read = self.time("read")
        return read / self.ours["microseconds"] if read and self.ours else None


def load(path):
    """The problems of a CSV in its order, the device's name, and the time of an empty kernel (None on a CPU)."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            sys.exit(f"{path}: its columns are not those of single_query_benchmark")
        rows = list(reader)
    problems, device, empty = {}, path.stem, None
    for row in rows:
        for column in NUMBERS:
            row[column] = int(row[column])
        for column in TIMES:
            row[column] = float(row[column])
        device = row["device"]
        name, _, feature = row["implementation"].partition(" ")
        if name == "empty":
            empty = row["microseconds"]
            continue
        key = (feature, row["dtype"], *(row[column] for column in NUMBERS), row["mode"])
        problems.setdefault(key, Problem(row, feature)).rows[name] = row
    return list(problems.values()), device, empty


def table(header, lines):
    if not lines:
        return ""
    text = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(text + ["| " + " | ".join(line) + " |" for line in lines]) + "\n"


def microseconds(value):
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def comparison_table(problems):
    """Ours beside the fastest peer; the read columns where a plain read was measured."""
    with_read = any(problem.time("read") for problem in problems)
    header = ["dtype", "B x Hq/Hkv, N x D", "single_query (us)", "TB/s"]
    header += ["plain read (us)", "of the read"] if with_read else []
    header += ["best LibTorch peer (us)", "which", "times faster"]
    lines = []
    for problem in problems:
        if not problem.ours:
            continue
        ours = problem.ours["microseconds"]
        line = [problem.dtype, problem.shape, f"**{microseconds(ours)}**",
                f"{problem.ours['terabytes_per_second']:.2f}"
                if problem.ours["terabytes_per_second"] >= 0.1 else f"{problem.ours['terabytes_per_second']:.4f}"]
        if with_read:
            fraction = problem.fraction_of_read()
            line += [microseconds(problem.time("read")), f"{100 * fraction:.0f} %"] if fraction else ["", ""]
        peer = problem.best_peer()
        line += [microseconds(peer[1]), peer_name(peer[0]), f"{peer[1] / ours:.2f}"] if peer else ["none", "", ""]
        lines.append(line)
    return table(header, lines)


def host_table(problems):
    lines = []
    for problem in problems:
        for name, row in problem.rows.items():
            shown = {"single_query": "single_query, tensors", "single_query_raw": "single_query, pointers"}
            lines.append([shown.get(name, peer_name(name)), problem.dtype, problem.shape,
                          microseconds(row["microseconds"]), microseconds(row["microseconds_min"])])
    return table(["call", "dtype", "B x Hq/Hkv, N x D", "median (us)", "fastest (us)"], lines)


def read_plot(problems, path):
    bars = []
    for problem in problems:
        fraction = problem.fraction_of_read()
        if fraction and problem.mode == "graph":
            peer = problem.best_peer()
            bars.append(plot.Bar(f"{problem.dtype} {problem.shape}", fraction,
                                 problem.time("read") / peer[1] if peer else None))
    if not bars:
        return ""
    path.write_text(plot.bar_chart("Speed as a fraction of that of a plain read of the same bytes",
                                   "single_query", "best LibTorch peer", bars))
    return f"![Fraction of the read ceiling](app/results/{path.name})\n"


def device_section(path):
    problems, device, empty = load(path)
    graph = [problem for problem in problems if problem.mode == "graph"]
    gpu = empty is not None
    parts = [f"### {device}\n"]
    if gpu:
        parts.append(f"An empty kernel as a graph node takes {empty:.2f} us.\n")
    groups = [
        ("In a CUDA graph, cold caches:", comparison_table([p for p in graph if p.feature in ("", "warm")])),
        ("", read_plot(problems, path.with_name(path.stem + "-read.svg"))),
        ("Pages, lengths, windows, masks and modifiers, in a CUDA graph:",
         comparison_table([p for p in graph if p.feature not in ("", "warm")])),
        ("One call after the other, nothing captured:" if gpu else "Against LibTorch on the same threads, in turn, K and V cold:",
         comparison_table([p for p in problems if p.mode == "eager"])),
        ("Host time of one call, launch included:", host_table([p for p in problems if p.mode == "host"])),
    ]
    for title, content in groups:
        if content:
            parts.append(f"{title}\n\n{content}" if title else content)
    return "\n".join(parts)


class ReadFloor:
    """Microseconds that a plain read of so many bytes takes, between the measured ones; all reads of a sweep."""

    def __init__(self, problems):
        points = {}
        for problem in problems:
            if problem.time("read") and problem.ours:
                points[problem.bytes] = min(problem.time("read"), points.get(problem.bytes, math.inf))
        self.bytes = sorted(points)
        self.times = [points[size] for size in self.bytes]

    def __call__(self, size):
        right = bisect.bisect_left(self.bytes, size)
        if right == 0:
            return self.times[0]
        if right == len(self.bytes):
            return self.times[-1] * size / self.bytes[-1]
        low, high = self.bytes[right - 1], self.bytes[right]
        weight = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
        return math.exp((1 - weight) * math.log(self.times[right - 1]) + weight * math.log(self.times[right]))


def cliffs(problems, floor):
    """(ratio, problem, axis) for every point and axis, the ratio of its time over floor to its neighbours' median."""
    found = []
    for axis in ["keys", "head_dim", "query_heads", "batch"]:
        lines = {}
        for problem in problems:
            if problem.ours and not problem.feature:
                others = tuple(getattr(problem, column) for column in ["dtype", *NUMBERS] if column != axis)
                lines.setdefault(others, []).append(problem)
        for line in lines.values():
            line.sort(key=lambda problem: getattr(problem, axis))
            over_floor = [problem.ours["microseconds"] / floor(problem.bytes) for problem in line]
            for i, problem in enumerate(line):
                neighbours = over_floor[max(0, i - 2):i] + over_floor[i + 1:i + 3]
                if len(neighbours) >= 2:
                    found.append((over_floor[i] / statistics.median(neighbours), problem, axis))
    return sorted(found, key=lambda point: -point[0])


def keys_plot(problems, device, floor, path):
    line = [p for p in problems
            if (p.dtype, p.batch, p.query_heads, p.kv_heads, p.head_dim, p.feature) == ("bfloat16", 1, 32, 8, 128, "")]
    line.sort(key=lambda problem: problem.keys)
    names = {name for problem in line for name in problem.rows} - set(NOT_ATTENTION)
    series = []
    for name in sorted(names, key=lambda name: (name not in OURS, name)):
        points = [(problem.keys, problem.time(name)) for problem in line if problem.time(name)]
        label = name if name in OURS else peer_name(name)
        series.append(plot.Series(label, points, "ours" if name in OURS else "peer"))
    series.append(plot.Series("plain read", [(p.keys, floor(p.bytes)) for p in line if p.ours], "floor"))
    path.write_text(plot.log_chart(f"bfloat16, batch 1, 32/8 heads, head_dim 128, {device}", "keys",
                                   "microseconds a call", series))


def sweep_section(path):
    problems, device, _ = load(path)
    floor = ReadFloor(problems)
    if not floor.bytes:
        sys.exit(f"{path}: a sweep without a row 'read' has no floor")
    picture = path.with_name(path.stem.removesuffix("-sweep") + "-keys.svg")
    keys_plot(problems, device, floor, picture)
    points = cliffs(problems, floor)
    over = [point for point in points if point[0] > CLIFF]
    axes = dict.fromkeys(axis for _, _, axis in points)
    text = (f"![Time against keys](app/results/{picture.name})\n\n"
            f"Points that differ in {', '.join(axes)} alone: each one's time over that of a plain read of the same bytes, "
            f"against the median of its neighbours, is more than {CLIFF} times as much in {len(over)} of {len(points)} "
            f"comparisons.")
    worst = over[:12] or points[:1]
    if worst:
        text += " The worst: " + "; ".join(f"{problem.dtype} {problem.shape}: {ratio:.2f} along {axis}"
                                           for ratio, problem, axis in worst) + "."
    return text + "\n"


def main():
    sections = []
    for path in sorted(FOLDER.glob("*.csv"), key=lambda path: (path.stem.startswith("cpu"), path.stem)):
        if path.stem.endswith(("-partial", "-check")):
            continue
        sections.append(sweep_section(path) if path.stem.endswith("-sweep") else device_section(path))
    if not sections:
        sys.exit(f"{FOLDER} holds no CSV: run single_query_benchmark first")
    text = README.read_text() if README.exists() else ""
    block = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not block.search(text):
        sys.exit(f"{README} has no lines {BEGIN} and {END}")
    content = f"{BEGIN}\n" + "\n".join(sections) + END
    README.write_text(block.sub(lambda _: content, text))
    print(f"{README}: {len(sections)} sections between {BEGIN} and {END}")


if __name__ == "__main__":
    main()
