"""Pictures of tables with a row for each concurrency: a line for each model and format."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from jaxinfer.evaluation.table import Table


def draw_by_concurrency(figure: Figure, table: Table, panels: Mapping[str, Sequence[str]], format: str) -> None:
    """A panel for each field of each source, over the concurrency; of a distribution, its mean. `format`: the field
    that tells a model's lines apart."""
    figure.set_size_inches(12, 4.5)
    axes = iter(figure.subplots(1, sum(map(len, panels.values()))))
    for source, fields in panels.items():
        rows = [row for row in table.rows if row["source"] == source]
        for field in fields:
            axis = next(axes)
            for model, kind in dict.fromkeys((row["model"], row[format]) for row in rows):
                line = [row for row in rows if (row["model"], row[format]) == (model, kind)]
                values = [v["mean"] if isinstance(v := row[field], Mapping) else v for row in line]
                axis.plot([row["concurrency"] for row in line], values, "o-", markersize=3, label=f"{model} {kind}")
            axis.set_xscale("log", base=2)
            asked = sorted({row["concurrency"] for row in rows})
            axis.set_xticks(asked, [str(n) for n in asked])
            axis.set(xlabel="concurrency", title=f"{field}, {source}", ylim=(0, None))
            axis.title.set_fontsize(9)
            axis.legend(fontsize=7)
