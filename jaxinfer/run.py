"""The command line: `python -m jaxinfer.run`. Arguments in, one call out.

Exit codes: 0 done, 1 the run failed, 2 the arguments are wrong (one line says what and what would do), 130 interrupted.
"""

import functools
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxinfer.errors import UserError

if TYPE_CHECKING:
    from experiments.ablation import Ablation
    from jaxinfer.checkpoints.watch import Watch
    from jaxinfer.evaluation.table import Table

# jax is imported inside the commands: the number of CPU devices must be set before, and --help needs none of it.

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="JAX inference of mixture-of-experts language models: FP8 KV pages, INT4 weights, tags on every page. "
    "Without a command it runs the quick ablation on the model that ships with it.",
)
console = Console()
errors = Console(stderr=True)


def writable(out: Path | None) -> Path | None:
    """Check a results folder before any work is done for it."""
    from jaxinfer.evaluation.table import check_writable

    return out and check_writable(out)



ModelOption = Annotated[str, typer.Option("--model", help="tiny, smollm2, a checkpoint folder, or a GGUF file")]
DevicesOption = Annotated[int, typer.Option("--devices", min=1, help="devices to shard over; on the CPU they are made")]
WeightsOption = Annotated[
    str, typer.Option("--weights", help="bf16, fp8_e4m3, int4:g32, int4:g64, int4:g128 (int4 also with +dense)")
]
KVOption = Annotated[str, typer.Option("--kv", help="number format of the KV pages: bf16, fp8_e4m3")]
IntegrityOption = Annotated[
    str, typer.Option("--integrity", help="what is checked of pages before each read: off, tags, digest")
]
MismatchOption = Annotated[
    str, typer.Option("--on-mismatch", help="of a request whose pages fail the check: abort, or recompute once")
]
PrefixOption = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="keep pages of prompts for others that begin alike")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="folder for JSON, Markdown and pictures", callback=writable)
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="of sampling and of the choice of examples")]

GENERATE_EXAMPLES = """
Answers prompts with the engine.

    python -m jaxinfer.run generate --prompt "Tom has 3 owls and buys 4 more. How many owls does Tom have?"

    python -m jaxinfer.run generate --prompt "..." --prompt "..." --weights int4:g32 --kv fp8_e4m3 --devices 8

    cat prompts.txt | python -m jaxinfer.run generate --prompt - --temperature 0.8 --seed 7
"""
ABLATION_EXAMPLES = """
Measures tables: quality with paired 95% intervals, capacity, speed as ratios.

    python -m jaxinfer.run ablation

    python -m jaxinfer.run ablation --tables kv-cache,weights,integrity --full --out results

    python -m jaxinfer.run ablation --tables capacity-kimi,capacity-glm

    python -m jaxinfer.run ablation --tables prefix-cache
"""
PLAN_EXAMPLES = """
Weights, memory, tokens that fit and time floors of a model on GPUs that need not be there.

    python -m jaxinfer.run plan --model kimi-k2.6 --devices 8 --gpu h200

    python -m jaxinfer.run plan --model kimi-k2.6 --devices 8 --gpu h200 --compile --out results
"""
FAULTS_EXAMPLES = """
Breaks a running engine on purpose, in every way it knows, and counts what is noticed, missed and leaked.

    python -m jaxinfer.run faults --quick

    python -m jaxinfer.run faults --injections 1000 --level tags,digest --out results

A run that is stopped goes on where it was when it is given the same --out and --seed.
"""
CONVERT_EXAMPLES = """
Writes a checkpoint anew with its weights in FP8 blocks or INT4, rounded to nearest, in layouts that other engines read.
Killed on the way, the same command goes on from where it was.

    python -m jaxinfer.run convert --model GLM-4.6 --to int4:g32 --out GLM-4.6-int4
"""
TABLES = {
    "kv-cache": "kv_cache",
    "weights": "weights",
    "integrity": "integrity",
    "prefix-cache": "prefix_cache",
    "capacity-kimi": "capacity",
    "capacity-glm": "capacity",
}


@app.callback(invoke_without_command=True)
def main_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        ablation()


@app.command(help=GENERATE_EXAMPLES)
def generate(
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="a user's message, repeatable; - reads lines")],
    model: ModelOption = "tiny",
    weights: WeightsOption = "bf16",
    kv: KVOption = "bf16",
    integrity: IntegrityOption = "tags",
    on_mismatch: MismatchOption = "abort",
    prefix_cache: PrefixOption = True,
    devices: DevicesOption = 1,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="the most tokens of an answer")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0: all")] = 0,
    min_p: Annotated[float, typer.Option("--min-p")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="text that ends an answer; may be repeated")] = None,
    kernels: Annotated[str, typer.Option("--kernels", help="auto, reference, triton, interpret")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="prompts as they are, with special tokens, no chat turn")] = False,
    seed: SeedOption = 0,
) -> None:
    prepare(devices)
    from jaxinfer.checkpoints.model import Model
    from jaxinfer.config import Precision
    from jaxinfer.engine import LLM, SamplingParams

    params = SamplingParams(max_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()))
    Precision.parse(weights, kv)  # before the model, which may take long
    with progress_display() as progress:
        loaded = Model.load(model, devices, loading_bar(progress, f"loading {model}"))
    options: dict[str, Any] = {"integrity": integrity, "on_mismatch": on_mismatch, "prefix_cache": prefix_cache}
    prompts = [line for p in prompt for line in (sys.stdin.read().splitlines() if p == "-" else [p])]
    tokens = [loaded.encode(p) if raw else loaded.chat(p) for p in prompts]
    if not tokens:
        raise UserError("no prompt was given on standard input; give at least one line")
    llm = LLM(loaded, weight_format=weights, kv_format=kv, devices=devices, kernels=kernels, **options)
    for each in tokens:
        llm.engine.check(each, params)
    runs_at = f"{llm.precision}, {devices} device{'s' * (devices > 1)}, integrity {integrity}"
    errors.print(f"{model}: {runs_at}", style="dim", highlight=False)
    if len(tokens) == 1:
        for text in llm.stream(tokens[0], params):
            print(text, end="", flush=True)
        print()
        return
    for text, completion in zip(prompts, llm.generate(tokens, params), strict=True):
        console.print(text, style="bold", markup=False, highlight=False)
        print(completion.text)
        if completion.error:
            errors.print(completion.error, style="red", markup=False, highlight=False)


@app.command(help=ABLATION_EXAMPLES)
def ablation(
    tables: Annotated[str, typer.Option("--tables", help="names with commas between")] = "kv-cache,weights,integrity",
    model: ModelOption = "tiny",
    devices: DevicesOption = 1,
    out: OutOption = None,
    full: Annotated[bool, typer.Option("--full", help="many more examples and rounds; about half an hour")] = False,
    budget: Annotated[int, typer.Option("--budget-mib", min=1, help="KV memory that capacities are given for")] = 16,
    seed: SeedOption = 0,
) -> None:
    makers = table_makers(tables)
    prepare(devices)
    from jaxinfer.checkpoints.model import Model
    command = shlex.join(["python", "-m", "jaxinfer.run", *sys.argv[1:]])
    from experiments.ablation import FULL, QUICK, Ablation

    with progress_display() as progress:
        run = Ablation(
            Model.load(model), command, FULL if full else QUICK, seed, devices, budget << 20, progress
        )
        show((make(run) for make in makers), out)


@app.command(help=PLAN_EXAMPLES)
def plan(
    model: Annotated[str, typer.Option("--model", help="a preset, or a config.json or its folder")] = "kimi-k2.6",
    devices: Annotated[int, typer.Option("--devices", min=1, help="GPUs of each phase")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, b200, a100")] = "h200",
    prefill_weights: Annotated[str, typer.Option("--prefill-weights")] = "fp8_e4m3",
    prefill_kv: Annotated[str, typer.Option("--prefill-kv")] = "bf16",
    decode_weights: Annotated[str, typer.Option("--decode-weights")] = "int4:g32",
    decode_kv: Annotated[str, typer.Option("--decode-kv")] = "fp8_e4m3",
    context: Annotated[int, typer.Option("--context", help="tokens of a request")] = 21_440,
    compile: Annotated[bool, typer.Option("--compile", help="compile the real steps too; needs the aot extra")] = False,
    out: OutOption = None,
) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on a GPU here, and the compiler must not look for one
    from jaxinfer.planning import report

    formats = (prefill_weights, prefill_kv, decode_weights, decode_kv)
    with progress_display() as progress:
        progress.add_task("planning" + " and compiling" * compile, total=None)
        tables = report.plan(model, devices, gpu, *formats, context, compile)
    show(tables, out)


@app.command(help=FAULTS_EXAMPLES)
def faults(
    quick: Annotated[bool, typer.Option("--quick", help="few injections; about two minutes on two cores")] = False,
    injections: Annotated[
        int | None, typer.Option("--injections", min=1, help="of each fault at each level, 1000 by default")
    ] = None,
    level: Annotated[str, typer.Option("--level", help="names with commas between")] = "off,tags,digest,digest-all",
    out: OutOption = None,
    seed: SeedOption = 0,
) -> None:
    prepare(1)
    from experiments import faults as campaign

    each, operations = campaign.QUICK if quick else campaign.FULL
    levels = list(dict.fromkeys(name.strip() for name in level.split(",") if name.strip()))
    command = shlex.join(["python", "-m", "jaxinfer.run", *sys.argv[1:]])
    with progress_display() as progress:
        bar = progress.add_task("injecting faults", total=(injections or each) * len(campaign.FAULTS) * len(levels))
        notes = out / "faults-progress.jsonl" if out else None
        advance = functools.partial(progress.advance, bar)
        table = campaign.faults(levels, injections or each, operations, seed, command, notes, advance)
    show([table], out)
    if broken := campaign.broken_claims(table):
        errors.print(f"a claim did not hold: {', '.join(broken)}")
        raise typer.Exit(1)


@app.command(help=CONVERT_EXAMPLES)
def convert(
    model: Annotated[Path, typer.Option("--model", help="a Hugging Face folder")],
    to: Annotated[str, typer.Option("--to", help="fp8_e4m3, int4:g32, int4:g64, int4:g128 (int4 also with +dense)")],
    out: Annotated[Path, typer.Option("--out", help="the folder that is made; its place must have the room")],
) -> None:
    prepare(1)
    from jaxinfer.checkpoints.convert import convert
    from jaxinfer.quantization.formats import WeightFormat

    format = WeightFormat.parse(to)
    with progress_display() as progress:
        report = convert(model, out, format, loading_bar(progress, f"converting to {format}"))
    ratio = report.bytes_after / report.bytes_before
    print(f"{out}: {report.bytes_before:,} bytes before, {report.bytes_after:,} after ({ratio:.3f})")
    for error in sorted(report.errors, key=lambda e: -e.relative_rms)[:10]:
        print(f"{error.name}: error {error.relative_rms:.4f} of its size (root mean square), at most {error.max:.4g}")
    if len(report.errors) > 10:
        print(f"and {len(report.errors) - 10} tensors with smaller errors, all in {out / 'conversion.json'}")


def loading_bar(progress: Progress, what: str) -> "Watch":
    """A bar of `progress` for work on a checkpoint."""
    from jaxinfer.checkpoints.watch import Watch

    bar = progress.add_task(what, total=None)

    class Bar(Watch):
        def total(self, steps: int) -> None:
            progress.update(bar, total=steps)

        def advance(self) -> None:
            progress.advance(bar)

        def note(self, text: str) -> None:
            progress.console.print(f"note: {text}", style="dim", highlight=False)

    return Bar()


def show(tables: "Iterable[Table]", out: Path | None) -> None:
    """Print tables as they come, and write each to `out`."""
    from jaxinfer.evaluation.table import to_rich, write

    for table in tables:
        console.print(to_rich(table))
        if out is not None:
            console.print(f"wrote {', '.join(map(str, write(table, out).values()))}", highlight=False)


def table_makers(names: str) -> "list[Callable[[Ablation], Table]]":
    """The function of each table in `names`. UserError on one that there isn't."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in TABLES:
            raise UserError(f"unknown table {name!r}; there are: {', '.join(TABLES)}")
    if not wanted:
        raise UserError(f"no table was named; there are: {', '.join(TABLES)}")

    def make(name: str, run: "Ablation") -> "Table":
        module = importlib.import_module(f"experiments.{TABLES[name]}")
        return getattr(module, name.replace("-", "_"))(run)

    return [functools.partial(make, name) for name in wanted]


def prepare(devices: int) -> None:
    """Set what jax reads when it starts: so many devices on the CPU, and compiled programs kept between runs."""
    flag = "--xla_force_host_platform_device_count"
    if devices > 1 and flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={devices}".strip()
    from jaxinfer.parallel.compilation import use_compilation_cache

    use_compilation_cache()


def progress_display() -> Progress:
    """Bars on standard error, gone when they are done; nothing at all where nobody looks."""
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def main() -> None:
    """Run the command line; every mistake of the user's is one line."""
    try:
        sys.exit(app(standalone_mode=False) or 0)  # what typer.Exit was given
    except UserError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        errors.print("interrupted")
        sys.exit(130)
    except typer.BadParameter.__bases__[0].__bases__[0] as error:  # type: ignore[misc]
        fail(f"{error.format_message()} (see --help)")  # all that typer itself finds wrong with the arguments


def fail(message: str) -> None:
    """Say what is wrong in one line, and end with 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
