"""A results table: one JSON file `{"table", "rows", "meta"}`, the same as Markdown, and a picture.

check_writable(out)                                   # before the work, which may take an hour
rows = [{"kv_format": "bf16", "bytes_per_token": 1152, "source": "measured"}, ...]
table = Table("kv_cache", rows, run_meta("python -m jaxinfer.run ablation", seed=0, samples=100))
write(table, out)                                     # kv_cache.json, kv_cache.md, kv_cache.png
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import rich.table
from rich.markup import escape

from jaxinfer.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASH = "–"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jaxinfer")
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")
# What a picture draws as bars, best first, and what it calls the rows by.
BARS = (
    *("bytes_per_token", "tokens_in_budget", "gpu_bytes", "decode_tokens_per_s", "prefill_tokens_per_s"),
    *("itl_ms", "ttft_ms", "e2e_ms", "kl", "top1_agreement", "detected", "missed"),
)
LABELS = ("name", "label", "model", "phase", "weight_format", "kv_format", "concurrency", "fault", "level")
SOURCES = ("measured", "compiled", "modelled")
# What an uncommitted change must be in for the run to count as other code than the commit's: not a results file.
CODE = ("jaxinfer", "pallas_kernels", "experiments", "pyproject.toml", ":(exclude)experiments/results")
Draw = Callable[["Figure", "Table"], None]


@dataclass(frozen=True)
class Table:
    """Rows of results and where they come from. `rows` and `meta` hold only what JSON can, and no NaN or infinity.

    Anything else given to the constructor is converted: arrays to lists, numbers that are not finite to None.
    `name` is also the name of its files; `draw(figure, table)` fills its picture, by default `draw_default`. `shown`
    names the columns that the terminal has room for, by default all.
    Raises ValueError for a name that can't be, TypeError for a value that can't.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    meta: Mapping[str, Any]
    title: str = ""
    notes: Sequence[str] = ()
    draw: Draw | None = dataclasses.field(default=None, compare=False, repr=False)
    shown: Sequence[str] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(f"{self.name!r} is no name for a table: letters, digits, '.', '_' and '-' only")
        for row in self.rows:
            if (row.get("source") or "measured") not in SOURCES:
                raise ValueError(f"source is {row['source']!r}; it must be one of {', '.join(SOURCES)}")
        object.__setattr__(self, "rows", plain(self.rows))
        object.__setattr__(self, "meta", plain(self.meta))
        object.__setattr__(self, "notes", list(self.notes))

    def to_json(self) -> str:
        """Strict JSON; title and notes are in `meta`. Floats keep all their digits."""
        words = {key: value for key, value in (("title", self.title), ("notes", self.notes)) if value}
        document = {"table": self.name, "rows": self.rows, "meta": words | dict(self.meta)}
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """The table that `to_json` wrote."""
        document = json.loads(text)
        meta = dict(document["meta"])
        title, notes = meta.pop("title", ""), meta.pop("notes", [])
        return cls(document["table"], document["rows"], meta, title, notes)


def plain(value: Any) -> Any:
    """`value` as JSON's own types: arrays as lists, NaN and infinities as None. TypeError if it has no such form."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a table can't hold a {type(value).__name__}: {value!r}")


# Where a table comes from


def run_meta(
    command: str | Sequence[str], seed: int, samples: int, precision: Any = None, **extra: Any
) -> dict[str, Any]:
    """What it takes to judge and repeat a run: command, code, device, versions, date, seed, sample size, precision.

    Args:
      command: the command line, as one string or as `sys.argv` has it.
      seed: of the examples and the sampling.
      samples: examples (or rounds) behind each row.
      precision: what each phase ran at, such as {"prefill": "fp8_e4m3", "decode": "int4:g32"}.
      extra: more of it, such as the model's name.
    """
    devices = jax.devices()
    return {
        "command": command if isinstance(command, str) else shlex.join(command),
        **git_state(),
        "device": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "host": {"machine": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "samples": samples,
        "precision": precision,
        **extra,
    }


def git_state(file: Path = Path(__file__)) -> dict[str, Any]:
    """{"commit", "dirty"} of the checkout that tracks `file`; ("unknown", None) outside one, or without git."""

    folder = file.resolve().parent

    def git(*arguments: str, at: Path | str = folder) -> str:
        command = ["git", "-C", str(at), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # An installed copy may lie inside somebody's checkout (in its .venv); that commit says nothing about it.
        git("ls-files", "--error-unmatch", file.name)
        changes = git("status", "--porcelain", "--", *CODE, at=git("rev-parse", "--show-toplevel"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": "unknown", "dirty": None}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def provenance(table: Table) -> str:
    """One line that says how the rows came about, such as `2 rows measured on 1 x NVIDIA H200, 1 row modelled`."""
    device = table.meta.get("device") or {}
    place = f"{device['count']} x {device['kind']}" if device else "an unknown device"
    place = "the CPU" if device.get("platform") == "cpu" else place
    where = {"measured": f" on {place}"}
    counts = Counter(row.get("source") or "measured" for row in table.rows)
    parts = [
        f"{counts[source]} {'row' if counts[source] == 1 else 'rows'} {source}{where.get(source, '')}"
        for source in SOURCES
        if source in counts
    ]
    return ", ".join(parts) or "no rows"


# As files


def check_writable(out_dir: Path | str) -> Path:
    """Make `out_dir` and prove that a file can be written there, before the work starts. Raises UserError if not."""
    folder = Path(out_dir)
    probe = folder / f".{os.getpid()}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"can't write to {folder}: {error.strerror or error}; give another --out folder") from error
    return folder


def write(table: Table, out_dir: Path | str) -> dict[str, Path]:
    """Write NAME.json, NAME.md and NAME.png to `out_dir`; return their paths by kind: {"json", "md", "png"}.

    Each is complete under a temporary name before it takes its place, so that no interruption leaves half a file, and
    the numbers go first, so that a mistake in `draw` (as in `plot`) can't lose them. Raises UserError if it can't
    write.
    """
    folder = check_writable(out_dir)
    paths = {kind: folder / f"{table.name}.{kind}" for kind in ("json", "md", "png")}
    try:
        _replace(paths["json"], lambda draft: draft.write_text(table.to_json(), encoding="utf-8"))
        _replace(paths["md"], lambda draft: draft.write_text(to_markdown(table), encoding="utf-8"))
        paths["png"].unlink(missing_ok=True)  # the picture of other numbers must not stay if this one fails
        _replace(paths["png"], lambda draft: plot(table, draft))
    except OSError as error:
        raise UserError(f"can't write {table.name} to {folder}: {error.strerror or error}") from error
    return paths


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        fill(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


# As text


def to_markdown(table: Table) -> str:
    """The table as GitHub Markdown: title, rows (a dash for null), notes, and what it takes to repeat it."""
    columns, cells = grid(table)
    lines = [f"# {table.title or table.name}", "", f"{provenance(table)}.", ""]
    if columns:
        align = ["--:" if _numeric(column) else "---" for column in zip(*cells, strict=True)]
        written = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in (columns, align, *cells)]
        lines += [*(f"| {' | '.join(row)} |" for row in written), ""]
    lines += [f"- {note}" for note in table.notes] + [""] * bool(table.notes)
    lines += [f"- {key}: `{_meta_text(value)}`" for key, value in table.meta.items()]
    return "\n".join(lines) + "\n"


def to_rich(table: Table) -> rich.table.Table:
    """The table for the terminal: `rich.print(to_rich(table))`.

    What is the same in every row goes into the caption. A table with few rows and many columns is turned, its columns
    one below another, because a terminal is narrow.
    """
    columns, cells = grid(table)
    body = [[name, *column] for name, column in zip(columns, zip(*cells, strict=True), strict=True)]
    body = [column for column in body if not table.shown or column[0] in table.shown]
    shared = [column for column in body if len(column) > 2 and len(set(column[1:])) == 1]
    body = [column for column in body if column not in shared]
    if len(body) > max(6, len(table.rows)):
        body = [list(line) for line in zip(*body, strict=True)]
    caption = [provenance(table), *(f"{name}: {value}" for name, value, *_ in shared if value != DASH), *table.notes]
    shown = rich.table.Table(title=escape(table.title or table.name), caption=escape("\n".join(caption)))
    for name, *column in body:
        shown.add_column(escape(name), justify="right" if _numeric(column) else "left", overflow="fold")
    for row in zip(*(column[1:] for column in body), strict=True):
        shown.add_row(*map(escape, row))
    return shown


def grid(table: Table) -> tuple[list[str], list[list[str]]]:
    """Column names, and the cells of each row as text. Nested fields become one column a leaf, estimates one cell."""
    flat = [flatten(row) for row in table.rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    return columns, [[row.get(name, DASH) for name in columns] for row in flat]


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`row` as {column: text}.

    An estimate with its interval is one cell, `0.93, -0.01 [-0.04, 0.02], n=100`; a distribution is one cell under
    `ttft_ms (mean / p50 / p90 / p95 / p99)`; another mapping gives a column `paper: decode` for each of its entries.
    """
    cells: dict[str, str] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            cells[name] = ", ".join(map(digits, value)) if isinstance(value, list) else digits(value)
        elif {"ci_low", "ci_high"} <= value.keys():
            cells[name] = _estimate(value)
        elif value and value.keys() <= set(PERCENTILES):
            cells[f"{name} ({' / '.join(value)})"] = " / ".join(map(digits, value.values()))
        else:
            cells |= flatten(value, f"{name}: ")
    return cells


def _estimate(entry: Mapping[str, Any]) -> str:
    """`score, diff [low, high], n=100` of the parts that are there; the last estimate is the one with the interval."""
    *others, last = [value for key, value in entry.items() if key not in ("n", "ci_low", "ci_high")] or [None]
    low, high = entry["ci_low"], entry["ci_high"]
    if None in (last, low, high):
        given = [value for value in (*others, last) if value is not None] or [None]
    else:
        # Digits beyond the second or third of the interval's width say nothing.
        places = max(0, round(2 - math.log10(high - low))) if high > low else 4
        given = [*others, f"{last:.{places}f} [{low:.{places}f}, {high:.{places}f}]"]
    return ", ".join(map(digits, given)) + (f", n={entry['n']}" if entry.get("n") is not None else "")


def digits(value: Any) -> str:
    """A value for people: four significant digits, thousands set apart, a dash for null."""
    if value is None or value == {}:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _numeric(cells: Sequence[str]) -> bool:
    """Whether every cell is a number or a dash, and one is a number: such a column is set to the right."""
    numbers = [cell for cell in cells if cell != DASH]
    return bool(numbers) and all(re.fullmatch(r"-?[\d,.]+(e[-+]\d+)?", cell) for cell in numbers)


def _meta_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


# As a picture


def plot(table: Table, path: Path | str) -> None:
    """Draw the table to a PNG file."""
    # Imported here because it takes a second that `--help` needn't wait. Without pyplot there is no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.8 + 0.35 * max(len(table.rows), 4)), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    (table.draw or draw_default)(figure, table)
    figure.suptitle(table.title or table.name)
    figure.supxlabel(provenance(table), fontsize=8, color="dimgray")
    figure.savefig(path, format="png")


def draw_default(figure: Figure, table: Table) -> None:
    """Quality differences, where the rows have any, beside bars of the first two of BARS that they have."""
    names = [row_label(row, i) for i, row in enumerate(table.rows)]
    fields = [field for field in BARS if any(_height(row, field) is not None for row in table.rows)][:2]
    with_quality = any(row.get("quality") for row in table.rows)
    panels = len(fields) + with_quality
    if not panels:
        figure.text(0.5, 0.5, "No numbers to draw: see the table.", ha="center", va="center")
        return
    axes = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].set_ylim(len(names) - 0.5, -0.5)  # the first row on top, as in the table
    if with_quality:
        draw_forest(axes.pop(0), [row.get("quality") or {} for row in table.rows])
    for axis, field in zip(axes, fields, strict=True):
        draw_bars(axis, [_height(row, field) for row in table.rows], field)


def draw_forest(axis: Axes, qualities: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Each row's difference from the reference with its 95% interval, one colour a task, around a line at zero."""
    tasks = list(dict.fromkeys(task for quality in qualities for task in quality))
    for t, task in enumerate(tasks):
        found = [(i, q[task]) for i, q in enumerate(qualities) if task in q and q[task].get("ci_low") is not None]
        centre = [entry["diff"] for _, entry in found]
        below = [entry["diff"] - entry["ci_low"] for _, entry in found]
        above = [entry["ci_high"] - entry["diff"] for _, entry in found]
        heights = [i + 0.6 * ((t + 0.5) / len(tasks) - 0.5) for i, _ in found]
        axis.errorbar(centre, heights, xerr=[below, above], fmt="o", markersize=4, capsize=2, label=task)
    axis.axvline(0, color="gray", linewidth=0.8)
    axis.set_xlabel("quality difference, 95% interval")
    axis.legend(fontsize=7)


def draw_bars(axis: Axes, values: Sequence[float | None], label: str) -> None:
    """A horizontal bar a row with its value beside it; a row without a value gets a dash."""
    bars = axis.barh(range(len(values)), [value or 0 for value in values], height=0.6)
    axis.bar_label(bars, [digits(value) for value in values], padding=3, fontsize=8)
    axis.margins(x=0.3)
    axis.set_xlabel(label)


def row_label(row: Mapping[str, Any], index: int) -> str:
    """What to call a row in a picture: its fields that name a setting, or its number."""
    prefix = {"concurrency": "concurrency "}
    named = [prefix.get(field, "") + str(row[field]) for field in LABELS if row.get(field)]
    return " / ".join(named) or f"row {index + 1}"


def _height(row: Mapping[str, Any], field: str) -> float | None:
    """The number that a bar of `field` shows: of a distribution, its median."""
    value = row.get(field)
    value = value.get("p50") if isinstance(value, Mapping) else value
    return float(value) if isinstance(value, int | float) else None
